#!/usr/bin/env bash
# Put a stand-in for CUDA below the CuPy of an environment, so that tests/gpu runs on a machine that has no GPU.
#
#     tests/gpu/standin/install.sh VENV
#
# VENV   an environment that has CuPy for CUDA 12. It is of no use on a GPU afterwards.
#
# CuPy has CUDA's runtime built in: its module of it is built again, from its own source, to call cuda.cpp instead. All else is the
# CuPy that everybody has. Needs g++, and the package index for CuPy's source and CUDA's headers. Then
#
#     LD_LIBRARY_PATH=VENV/standin CUDA_PATH=VENV/standin CUPY_CACHE_DIR=VENV/standin/cache CUPY_ACCELERATORS= \
#         VENV/bin/mpiexec -n 2 VENV/bin/python -m pytest --with-mpi tests/gpu
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=$(cd "$1" && pwd)
python=$venv/bin/python
room=$venv/standin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$room"
mkdir -p "$room/include"

quietly() { # COMMAND...: show what it printed only where it fails
    "$@" >"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; exit 1; }
}
of_python() { "$python" -c "$1"; }

version=$(of_python 'import importlib.metadata as of; print(of.version("cupy-cuda12x"))')
module=$(of_python 'import importlib.machinery, importlib.util as of; print(of.find_spec("cupy_backends").submodule_search_locations[0]
    + "/cuda/api/runtime" + importlib.machinery.EXTENSION_SUFFIXES[0])')
pip=("$python" -m pip --disable-pip-version-check)

# CUDA's headers, and CuPy's source and what compiled it.
quietly "${pip[@]}" download --no-deps -d "$work" nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-nvcc-cu12==12.9.86
for wheel in "$work"/nvidia_*.whl; do
    "$python" -m zipfile -e "$wheel" "$work/cuda"
done
cp -r "$work"/cuda/nvidia/*/include/* "$room/include"
CUPY_INSTALL_USE_STUB=1 quietly "${pip[@]}" download --no-deps --no-binary cupy -d "$work" "cupy==$version"
mkdir "$work/cupy"
tar -xf "$work/cupy-$version.tar.gz" -C "$work/cupy" --strip-components=1
cython=$(strings -a "$module" | sed -n 's/^_cython_\([0-9]*\)_\([0-9]*\)_\([0-9]*\)$/\1.\2.\3/p' | head -n 1)
quietly "${pip[@]}" install --target "$work/cython" "cython==$cython"
(
    cd "$work/cupy"
    PYTHONPATH=$work/cython quietly "$python" -m cython -3 --cplus -E \
        CUPY_USE_CUDA_PYTHON=False,CUPY_CUFFT_STATIC=False,CUPY_CUDA_VERSION=12090,CUPY_HIP_VERSION=0,CUPY_CYTHON_VERSION="$cython" \
        cupy_backends/cuda/api/runtime.pyx -o "$work/runtime.cpp"
)
# A header that those wheels lack.
cat >"$room/include/cuda_profiler_api.h" <<END
#include <cuda_runtime_api.h>
extern "C" cudaError_t cudaProfilerStart(void), cudaProfilerStop(void);
END
headers=$(of_python 'import sysconfig; print(sysconfig.get_path("include"))')
compile=(g++ -O1 -w -shared -fPIC -std=c++17)

# What is asked for, and the stand-in does not know, fails when it is called.
"${compile[@]}" -I"$headers" -I"$work/cupy/cupy_backends/cuda/api" -I"$work/cupy" -I"$room/include" -DCUPY_CACHE_KEY=1 \
    "$work/runtime.cpp" -o "$work/asks.so"
"${compile[@]}" -fvisibility=hidden -I"$room/include" "$here/cuda.cpp" -o "$work/knows.so"
nm -D --defined-only "$work/knows.so" | sed -n 's/.* \(cu[A-Za-z0-9_]*\)$/\1/p' | sort >"$work/known"
{
    nm -D "$work/asks.so" | sed -n 's/^ *U \(cuda[A-Za-z0-9_]*\)$/\1/p'
    sed -nE "s/.*_L\.get\(f?'([A-Za-z0-9_]*)(\{version\})?'\).*/cu\1\2/p" "$work/cupy/cupy_backends/cuda/api/_driver_extern.pxi" |
        sed 's/{version}/_v2/'
    # An MPI that knows of CUDA asks the driver for more.
    grep -oE '\bcu[A-Z][A-Za-z0-9]*(_v[0-9]+)? *\(' "$room/include/cuda.h" | tr -d ' ('
    sed -nE 's/^# *define +cu[A-Z][A-Za-z0-9]* +(cu[A-Z][A-Za-z0-9_]*).*/\1/p' "$room/include/cuda.h"
} | sort -u | comm -23 - "$work/known" | sed 's/.*/int &(void) { return 801; }/' >"$work/others.c" # not supported
gcc -c -w -fPIC "$work/others.c" -o "$work/others.o"
"${compile[@]}" -fvisibility=hidden -I"$room/include" "$here/cuda.cpp" "$work/others.o" -Wl,-soname,libcuda.so.1 \
    -o "$room/libcuda.so.1" -ldl -lpthread
ln -s libcuda.so.1 "$room/libcudart.so.12"
# cuBLAS, in the same way; its functions have versions.
"${compile[@]}" -fvisibility=hidden -I"$room/include" "$here/cublas.cpp" -o "$work/cublas.so"
nm -D --defined-only "$work/cublas.so" | sed -n 's/.* \(cublas[A-Za-z0-9_]*\)$/\1/p' | sort >"$work/known"
nm -D "${module%/api/*}"/libs/cublas.*.so | sed -n 's/^ *U \(cublas[A-Za-z0-9_]*\).*/\1/p' | sort -u | comm -23 - "$work/known" |
    sed 's/.*/int &(void) { return 15; }/' >"$work/others.c" # not supported
gcc -c -w -fPIC "$work/others.c" -o "$work/others.o"
echo 'libcublas.so.12 { global: cublas*; local: *; };' >"$work/versions"
"${compile[@]}" -fvisibility=hidden -I"$room/include" "$here/cublas.cpp" "$work/others.o" "$room/libcuda.so.1" \
    -Wl,-soname,libcublas.so.12 -Wl,--version-script="$work/versions" -o "$room/libcublas.so.12"
ln -s libcublas.so.12 "$room/libcublasLt.so.12"
ln -s libcuda.so.1 "$room/libnvrtc.so.12"
cp "$here/kernel.h" "$room"
"${compile[@]}" -I"$headers" -I"$work/cupy/cupy_backends/cuda/api" -I"$work/cupy" -I"$room/include" -DCUPY_CACHE_KEY=1 \
    "$work/runtime.cpp" "$room/libcuda.so.1" -o "$module"
touch "$room/.installed"
