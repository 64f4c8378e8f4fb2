#!/usr/bin/env bash
# Run the tests of arrays on a GPU on a bare machine with a GPU, Python and CuPy, and no package index.
#
#     tests/gpu/run.sh OUT WHEELS [OPENMPI]
#
# OUT      a folder for report.txt, report.json and the logs.
# WHEELS   a folder with wheels for this machine's Python: mpi4py, mpich, pytest, pytest-mpi, and what they need (pip download).
# OPENMPI  the prefix of a CUDA-aware Open MPI, unpacked anywhere; without it what is handed to MPI is not tested.
#
# Runs on 2 and on 4 ranks that share the GPU: by way of the host on MPICH's wheel, and handed to Open MPI. Exit code 0 when
# nothing failed and something was tested.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
wheels=$(cd "$2" && pwd)
openmpi=${3:+$(cd "$3" && pwd)}
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
cd "$root" || exit 2

# Not --target, which leaves out the libraries beside site-packages.
"$python" -m pip install -q --no-index --no-deps --no-compile --ignore-installed --root-user-action ignore \
    --no-warn-script-location --prefix "$out/env" "$wheels"/*.whl || exit 2
site=$(dirname "$(find "$out/env" -type d -name mpi4py | head -n 1)")
mpiexec=$(find "$out/env" -name mpiexec | head -n 1)
export PYTHONPATH=$site:$root PATH=$(dirname "$mpiexec"):$PATH PYTHONUNBUFFERED=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
"$python" -c 'import cupy; print("CuPy", cupy.__version__, "GPUs:", cupy.cuda.runtime.getDeviceCount())' || exit 2

run() { # NAME RANKS MPIEXEC...: the tests, into NAME.log and NAME.xml
    local name=$1 ranks=$2
    shift 2
    echo "== $name on $ranks ranks"
    timeout -k 10 "${LIMIT:-240}" "$@" -n "$ranks" "$python" -m pytest -q --color=no --with-mpi tests/gpu \
        --junitxml="$out/$name-$ranks.xml" >"$out/$name-$ranks.log" 2>&1
    echo "exit code $?" >>"$out/$name-$ranks.log"
    tail -n 2 "$out/$name-$ranks.log"
}

# Else mpi4py takes the machine's, if it has one.
libmpi=$(find "$out/env" -name "libmpi.so.12" | head -n 1)
for ranks in 2 4; do
    MPI4PY_LIBMPI=$libmpi MPICOLL_CUDA=off run host "$ranks" "$mpiexec"
    # As if each rank had a GPU of its own: large reductions leave it, too.
    MPI4PY_LIBMPI=$libmpi MPICOLL_CUDA=off MPICOLL_CUDA_IPC=off run apart "$ranks" "$mpiexec"
done
if [ -n "$openmpi" ]; then
    export OPAL_PREFIX=$openmpi LD_LIBRARY_PATH=$openmpi/lib:${LD_LIBRARY_PATH:-} PATH=$openmpi/bin:$PATH
    export MPI4PY_LIBMPI=$openmpi/lib/libmpi.so
    for ranks in 2 4; do
        MPICOLL_CUDA=auto MPICOLL_CUDA_IPC=off run aware "$ranks" "$openmpi/bin/mpiexec" --oversubscribe --bind-to none
    done
fi
"$python" tests/gpu/report.py "$out"
