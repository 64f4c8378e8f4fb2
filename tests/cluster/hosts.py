"""Several hosts on one machine: each with a network, a hostname and mounts of its own, joined by one link.

The first process of each host holds its namespaces and ends when its standard input does, so they vanish with the test,
also when that is killed. Nothing is given a name outside them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import MARK, family, mpiexec

NAMES = ("host1", "host2")
NAMESPACES = ("--net", "--uts", "--mount", "--ipc")

# Shared memory of its own, as on a host; its name and the others' addresses; then wait until the test lets go.
_FIRST_PROCESS = """
import os, socket, subprocess, sys
name, names, mounts = sys.argv[1], sys.argv[2], sys.argv[3:]
socket.sethostname(name)
for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "tmpfs", "/dev/shm"], ["--bind", names, "/etc/hosts"], *(
    ["--bind", *mount.split("=")] for mount in mounts
)):
    subprocess.run(["mount", *command], check=True)
print("ready", flush=True)
sys.stdin.read()
"""

# What launchers start in place of ssh: options, a host, and words for that host's shell.
_REMOTE_SHELL = """#!/bin/sh
while :; do case $1 in -[lpoiF]) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift
exec nsenter -t "$(cat "{folder}/$host.pid")" -n -u -m -i --wd=/ -- /bin/sh -c "$*"
"""


@dataclass(frozen=True)
class Hosts:
    """The hosts that are up.

    Attributes:
        folder: of their own, the same on all of them.
    """

    folder: Path

    def enter(self, host: str) -> list[str]:
        """Return the start of a command that runs on a host."""
        pid = (self.folder / f"{host}.pid").read_text()
        return ["nsenter", "-t", pid, "-n", "-u", "-m", "-i", f"--wd={self.folder}", "--"]

    def launcher(self, ranks: int, forward: Sequence[str] = ()) -> list[str]:
        """Return the start of a command that starts jobs on all hosts, from the first one.

        Args:
            ranks: how many on each host, one host after the other.
            forward: variables that the ranks are to have.
        """
        shell = str(self.folder / "remote-shell")
        hosts = ",".join(f"{name}:{ranks}" for name in NAMES)
        if family() == "mpich":
            return [*self.enter(NAMES[0]), mpiexec(), "-launcher", "ssh", "-launcher-exec", shell, "-hosts", hosts]
        variables = ["PRTE_MCA_plm=ssh", f"PRTE_MCA_plm_ssh_agent={shell}"]
        names = (MARK, "TEST_JOB_FOLDER", "PYTHONPATH", "PYTHONFAULTHANDLER", *forward)
        passed = [word for name in names if name in os.environ or name in forward for word in ("-x", name)]
        options = ["--allow-run-as-root", "--bind-to", "none", *passed, "--host", hosts]
        return [*self.enter(NAMES[0]), "env", *variables, mpiexec(), *options]


def missing() -> str:
    """Return why there can be no hosts here, or ""."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"hosts of their own need the command {tool}"
    tried = subprocess.run(["unshare", *NAMESPACES, "mount", "--make-rprivate", "/"], capture_output=True, text=True)
    if tried.returncode:
        return f"this machine gives no namespaces: {tried.stderr.strip()}"
    one, two = f"v{os.getpid()}a", f"v{os.getpid()}b"
    tried = subprocess.run(
        ["ip", "link", "add", one, "type", "veth", "peer", "name", two], capture_output=True, text=True
    )
    if tried.returncode:
        return f"this machine makes no virtual network links: {tried.stderr.strip()}"
    subprocess.run(["ip", "link", "del", one], check=True)
    return ""


def _await_link(show: list[str], limit: float = 10.0) -> None:
    """Wait until the kernel says that a link is up: up to a second after both ends are, and UCX leaves it out before."""
    until = time.monotonic() + limit
    while "state UP" not in (said := subprocess.run(show, capture_output=True, text=True, check=True).stdout):
        assert time.monotonic() < until, f"the link between the hosts did not come up: {said}"
        time.sleep(0.02)


@contextlib.contextmanager
def two_hosts(folder: Path, far: Path, near: Path) -> Iterator[Hosts]:
    """Bring up two hosts; the second sees the content of ``far`` where the first sees that of ``near``."""
    addresses = {name: f"10.77.0.{number + 1}" for number, name in enumerate(NAMES)}
    names = folder / "names"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{addresses[name]} {name}\n" for name in NAMES))
    shell = folder / "remote-shell"
    shell.write_text(_REMOTE_SHELL.format(folder=folder))
    shell.chmod(0o755)
    first: dict[str, subprocess.Popen[str]] = {}
    outside = socket.gethostname()
    try:
        for name in NAMES:
            mounts = [f"{far}={near}"] if name == NAMES[1] else []
            first[name] = subprocess.Popen(
                ["unshare", *NAMESPACES, sys.executable, "-c", _FIRST_PROCESS, name, str(names), *mounts],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            output = first[name].stdout
            assert output is not None
            assert output.readline() == "ready\n", f"{name} did not come up"
            (folder / f"{name}.pid").write_text(str(first[name].pid))
        one, two = (str(first[name].pid) for name in NAMES)
        # Both ends are made where they belong: the machine itself never sees the link.
        subprocess.run(
            [
                "nsenter",
                "-t",
                one,
                "-n",
                "ip",
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                two,
            ],
            check=True,
        )
        inside = {name: ["nsenter", "-t", str(first[name].pid), "-n", "ip"] for name in NAMES}
        for name in NAMES:
            subprocess.run([*inside[name], "addr", "add", f"{addresses[name]}/24", "dev", "eth0"], check=True)
            for link in ("eth0", "lo"):
                subprocess.run([*inside[name], "link", "set", link, "up"], check=True)
        for name in NAMES:
            _await_link([*inside[name], "-o", "link", "show", "eth0"])
        assert socket.gethostname() == outside
        yield Hosts(folder)
    finally:
        for process in first.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
            process.kill()
            process.wait()
