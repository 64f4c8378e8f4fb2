#!/bin/sh
# Install what the tests in tests/cluster need besides Python: Slurm, munge, Debian's Open MPI, ip.
# Only as root where apt-get is; otherwise, and when that fails, it says so, and the tests skip with what they lack.
# TEST_INSTALL=no: install nothing.
set -u

missing=""
for pair in slurmctld:slurm-wlm slurmd:slurm-wlm munged:munge mpirun.openmpi:openmpi-bin ip:iproute2 unshare:util-linux; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null || case " $missing " in
    *" ${pair#*:} "*) ;;
    *) missing="$missing ${pair#*:}" ;;
    esac
done
[ -n "$missing" ] || exit 0

if [ "${TEST_INSTALL:-yes}" = no ]; then
    why="TEST_INSTALL=no"
elif [ "$(id -u)" -ne 0 ]; then
    why="only root can install them"
elif ! command -v apt-get >/dev/null; then
    why="there is no apt-get"
else
    # RUNLEVEL: no service is started; the tests start daemons of their own, in namespaces.
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    log=$(mktemp)
    if { apt-get update -qq && apt-get install -y -q --no-install-recommends $missing; } >"$log" 2>&1 </dev/null; then
        echo "== installed for tests/cluster:$missing"
        rm -f "$log"
        exit 0
    fi
    why="apt-get failed: $(grep -m 1 '^E:' "$log" || tail -n 1 "$log")"
    rm -f "$log"
fi
echo "== tests/cluster goes without:$missing ($why)"
