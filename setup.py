"""What setup.cfg cannot say: the C extension. Without a C compiler the library is installed without it, and goes through MPI."""

import zlib
from pathlib import Path

from setuptools import Extension, setup

FOLDER = "mpicoll/native"
root = Path(__file__).parent
files = sorted(root.joinpath(FOLDER).rglob("*.[ch]"))
names = [str(path.relative_to(root)) for path in files]
version = f"{zlib.crc32(b''.join(path.read_bytes() for path in files)):08x}"

setup(
    ext_modules=[
        Extension(
            "mpicoll._native",
            [name for name in names if name.endswith(".c")],
            depends=names,
            define_macros=[("VERSION", f'"{version}"')],
            # Each operation is rounded by itself, as NumPy does.
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
