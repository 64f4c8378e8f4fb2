#!/usr/bin/env bash
# Run the tests of arrays on a GPU on a bare machine with a GPU, Python and CuPy, and no package index.
#
#     tests/gpu/run.sh OUT WHEELS [OPENMPI]
#
# OUT      a folder for report.txt, report.json and the logs.
# WHEELS   a folder with wheels for this machine's Python: mpi4py, mpich, pytest, pytest-mpi, and what they need (pip download).
# OPENMPI  the prefix of a CUDA-aware Open MPI, unpacked anywhere; without it what is handed to MPI is not tested.
#
# Runs on 2 and on 4 ranks that share the GPU: by way of the host and on the GPU on MPICH's wheel, and handed to Open MPI. Exit
# code 0 when nothing failed and something was tested. On a machine without a GPU it runs on CuPy with a stand-in for CUDA below
# (standin/install.sh).
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

run() { # NAME RANKS FILES MPIEXEC...: the tests, into NAME-RANKS.log and .xml; on 0 ranks: they start jobs by MPIEXEC themselves
    local name=$1-$2 ranks=$2 files=$3
    shift 3
    local command=("$python" -m pytest -q --color=no --junitxml="$out/$name.xml")
    for file in $files; do
        command+=("tests/gpu/test_$file.py")
    done
    if [ "$ranks" -gt 0 ]; then
        command=("$@" -n "$ranks" "${command[@]}" --with-mpi)
    fi
    echo "== $name"
    TEST_LAUNCHER=$* timeout -k 10 "${LIMIT:-240}" "${command[@]}" >"$out/$name.log" 2>&1
    echo "exit code $?" >>"$out/$name.log"
    tail -n 2 "$out/$name.log"
}

export MPICOLL_CUDA=off
(
    # Else mpi4py takes the machine's, if it has one.
    MPI4PY_LIBMPI=$(find "$out/env" -name "libmpi.so.12" | head -n 1)
    export MPI4PY_LIBMPI
    for ranks in 2 4; do
        run host "$ranks" "gpu kinds link" "$mpiexec"
        # As if each rank had a GPU of its own: large reductions leave it, too.
        MPICOLL_CUDA_IPC=off run apart "$ranks" gpu "$mpiexec"
    done
    run jobs 0 jobs "$mpiexec"
)
if [ -n "$openmpi" ]; then
    export OPAL_PREFIX=$openmpi LD_LIBRARY_PATH=$openmpi/lib:${LD_LIBRARY_PATH:-} PATH=$openmpi/bin:$PATH
    export MPI4PY_LIBMPI=$openmpi/lib/libmpi.so MPICOLL_CUDA=auto
    mpirun=("$openmpi/bin/mpiexec" --oversubscribe --bind-to none)
    for ranks in 2 4; do
        MPICOLL_CUDA_IPC=off run aware "$ranks" "gpu kinds" "${mpirun[@]}"
    done
    run aware-jobs 0 jobs "${mpirun[@]}"
fi
"$python" tests/gpu/report.py "$out"
