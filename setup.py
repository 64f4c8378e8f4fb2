"""What setup.cfg cannot say: the C extension. Where there is no C compiler, the library does without it, in Python."""

import zlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "mpicoll/_riding.c"
version = f"{zlib.crc32(Path(__file__).with_name('mpicoll').joinpath('_riding.c').read_bytes()):08x}"

setup(
    ext_modules=[
        Extension(
            "mpicoll._riding",
            [SOURCE],
            define_macros=[("VERSION", f'"{version}"')],
            # Each operation is rounded by itself, as NumPy does it.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)
