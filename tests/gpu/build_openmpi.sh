#!/usr/bin/env bash
# Build an Open MPI that knows of CUDA, as a cluster with GPUs has one, on a machine with neither a GPU nor CUDA.
#
#     tests/gpu/build_openmpi.sh PREFIX [FOLDER]
#
# PREFIX   where it is installed. It can be moved to another place, or to a machine with a GPU (tests/gpu/run.sh).
# FOLDER   where it is built; default: a temporary folder, which is removed.
#
# Needs gcc, make, and apt-get with a mirror of Debian, which has the source. CUDA's headers are those of CUDA_HOME, or of
# NVIDIA's wheel from the package index. Takes 5 to 30 minutes, less with JOBS=8.
#
# PREFIX/driver has a library in the place of NVIDIA's driver, without which such an Open MPI cannot be loaded: driver.c tells
# what it does. It is for machines without a GPU alone.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
prefix=$(cd "$1" && pwd)
if [ $# -gt 1 ]; then
    work=$2
    mkdir -p "$work"
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
cd "$work"

step() { # NAME COMMAND...: run it into NAME.log, and show the end of that where it fails
    local name=$1
    shift
    echo "== $name"
    "$@" >"$work/$name.log" 2>&1 || { tail -n 30 "$work/$name.log"; exit 1; }
}

cuda=${CUDA_HOME:-}
if [ ! -e "$cuda/include/cuda.h" ]; then
    step headers python3 -m pip download --no-deps --dest wheels nvidia-cuda-runtime-cu12
    python3 -m zipfile -e wheels/nvidia_cuda_runtime_cu12-*.whl unpacked
    cuda=$work/unpacked/nvidia/cuda_runtime
fi

# The source package, by a list of its own: that of the machine stays as it is.
mirror=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources 2>/dev/null | head -n 1)
mkdir -p lists/partial
echo "deb-src ${mirror:-http://deb.debian.org/debian} trixie main" >sources.list
apt=(apt-get -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists"
    -o APT::Sandbox::User=root)
step list "${apt[@]}" -o Acquire::AllowInsecureRepositories=true update
step source "${apt[@]}" --allow-unauthenticated --download-only source openmpi
mkdir -p source build "$prefix/driver"
tar -xf openmpi_*.orig.tar.* -C source --strip-components=1

# Every function of the driver that the header declares, or gives another name.
functions() {
    grep -oE '\bcu[A-Z][A-Za-z0-9]*(_v[0-9]+)? *\(' "$cuda/include/cuda.h" | tr -d ' ('
    sed -nE 's/^# *define +cu[A-Z][A-Za-z0-9]* +(cu[A-Z][A-Za-z0-9_]*).*/\1/p' "$cuda/include/cuda.h"
}
grep -oE '^int cu[A-Za-z0-9_]+' "$here/driver.c" | cut -d ' ' -f 2 >known
functions | sort -u | grep -vxFf known | sed 's/.*/int &(void) { return 3; }/' >others.c # CUDA_ERROR_NOT_INITIALIZED
step driver gcc -w -O1 -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$prefix/driver/libcuda.so.1" "$here/driver.c" others.c
ln -sf libcuda.so.1 "$prefix/driver/libcuda.so"

cd build
step configure ../source/configure --prefix="$prefix" --with-cuda="$cuda" --with-cuda-libdir="$prefix/driver" \
    --with-hwloc=internal --with-libevent=internal --with-pmix=internal --with-prrte=internal --without-ucx --without-ofi \
    --without-verbs --disable-mpi-fortran --disable-oshmem --disable-io-romio --disable-dlopen --disable-sphinx enable_libxml2=no
step make make -j "${JOBS:-$(nproc)}"
step install make install-strip
export OPAL_PREFIX=$prefix LD_LIBRARY_PATH=$prefix/lib:$prefix/driver
echo "$prefix knows of CUDA: $("$prefix/bin/ompi_info" --parsable --all | sed -n 's/.*mpi_built_with_cuda_support:value://p')"
