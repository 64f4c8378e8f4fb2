"""What setup.cfg cannot say: the C extension. Without a C compiler the library is installed without it, and goes through MPI."""

import zlib
from pathlib import Path

from setuptools import Extension, setup

FOLDER = "mpicoll/native"
files = sorted(
    path for path in Path(__file__).with_name("mpicoll").joinpath("native").iterdir() if path.suffix in (".c", ".h")
)
version = f"{zlib.crc32(b''.join(path.read_bytes() for path in files)):08x}"

setup(
    ext_modules=[
        Extension(
            "mpicoll._native",
            [f"{FOLDER}/{path.name}" for path in files if path.suffix == ".c"],
            depends=[f"{FOLDER}/{path.name}" for path in files],
            define_macros=[("VERSION", f'"{version}"')],
            # Each operation is rounded by itself, as NumPy does.
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)
