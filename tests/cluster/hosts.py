"""Several hosts on one machine: each with a network, a hostname and mounts of its own, joined by one switch.

The first process of each host holds its namespaces and ends when its standard input does, so they vanish with the test,
also when that is killed. Nothing is given a name outside them: the switch, too, is in a namespace of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs import MARK, family, mpiexec

NAMESPACES = ("--net", "--uts", "--mount", "--ipc")
PROCESSES = ("--pid", "--fork", "--kill-child")
SWITCH = "switch"

# A first process says how the machine numbers it (the old /proc tells), makes what the host has for itself, and waits until the
# test lets go. As the first one of its process namespace it takes all others with it, and has to bury them meanwhile.
_FIRST_PROCESS = """
import os, signal, socket, subprocess, sys
name, names, processes, mounts = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
outside = os.readlink("/proc/self")
socket.sethostname(name)
commands = [["--make-rprivate", "/"], ["-t", "tmpfs", "tmpfs", "/dev/shm"], ["--bind", names, "/etc/hosts"]]
if processes:
    commands.append(["-t", "proc", "proc", "/proc"])
for mount in mounts:
    source, _, place = mount.partition("=")
    commands.append(["--bind", source, place] if source else ["-t", "tmpfs", "tmpfs", place])
for command in commands:
    subprocess.run(["mount", *command], check=True)
if processes:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", outside, flush=True)
sys.stdin.read()
"""

# What launchers start in place of ssh: options, a host, and words for that host's shell. Where the host has died meanwhile it
# says nothing and does not end, as an ssh whose other end has lost its power.
_REMOTE_SHELL = """#!/bin/sh
while :; do case $1 in -[lpoiF]) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift
first=$(cat "{folder}/$host.pid")
nsenter -t "$first" -n -u -m -i --wd=/ -- /bin/sh -c "$*"
code=$?
[ -e "{folder}/$host.dead" ] && exec sleep 600
exit $code
"""


@dataclass(frozen=True)
class Hosts:
    """The hosts that are up.

    Attributes:
        folder: of their own, the same on all of them.
        names: theirs, in the order of their addresses.
        first: the first process of each, and of the switch.
        processes: whether each has a process namespace of its own.
    """

    folder: Path
    names: tuple[str, ...]
    processes: bool = False
    first: dict[str, int] = field(default_factory=dict)

    def enter(self, host: str) -> list[str]:
        """Return the start of a command that runs on a host."""
        own = ["-p"] if self.processes else []
        return ["nsenter", "-t", str(self.first[host]), "-n", "-u", "-m", "-i", *own, f"--wd={self.folder}", "--"]

    def launcher(self, ranks: int, forward: Sequence[str] = ()) -> list[str]:
        """Return the start of a command that starts jobs on all hosts, from the first one.

        Args:
            ranks: how many on each host, one host after the other.
            forward: variables that the ranks are to have.
        """
        shell = str(self.folder / "remote-shell")
        hosts = ",".join(f"{name}:{ranks}" for name in self.names)
        if family() == "mpich":
            return [*self.enter(self.names[0]), mpiexec(), "-launcher", "ssh", "-launcher-exec", shell, "-hosts", hosts]
        variables = ["PRTE_MCA_plm=ssh", f"PRTE_MCA_plm_ssh_agent={shell}"]
        names = (MARK, "TEST_JOB_FOLDER", "PYTHONPATH", "PYTHONFAULTHANDLER", *forward)
        passed = [word for name in names if name in os.environ or name in forward for word in ("-x", name)]
        options = ["--allow-run-as-root", "--bind-to", "none", *passed, "--host", hosts]
        return [*self.enter(self.names[0]), "env", *variables, mpiexec(), *options]

    def cut(self, host: str) -> None:
        """Pull the cable of a host: silence, no connection is closed."""
        self._port(host, "down")

    def mend(self, host: str) -> None:
        """Put the cable of a host back."""
        self._port(host, "up")
        _await_link(self.inside(host))

    def kill(self, host: str) -> None:
        """Take a host's power away: its link is silent first, then all of its processes are gone."""
        (self.folder / f"{host}.dead").touch()
        self.cut(host)
        space = os.readlink(f"/proc/{self.first[host]}/ns/net")
        until = time.monotonic() + 10
        while pids := [pid for pid in _within(space) if pid != self.first[host]]:
            assert time.monotonic() < until, f"processes of {host} do not die: {pids}"
            for pid in [self.first[host]] if self.processes else pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.first[host], signal.SIGKILL)

    def inside(self, host: str) -> list[str]:
        """Return the start of a command of ``ip`` about a host's network."""
        return ["nsenter", "-t", str(self.first[host]), "-n", "ip"]

    def _port(self, host: str, state: str) -> None:
        number = self.names.index(host)
        subprocess.run([*self.inside(SWITCH), "link", "set", f"port{number}", state], check=True)


def _within(space: str) -> list[int]:
    """Return the live processes of a network namespace."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns" / "net") == space:
                pids.append(int(entry.name))
    return pids


def missing(*, processes: bool = False) -> str:
    """Return why there can be no hosts here, or ""."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"hosts of their own need the command {tool}"
    spaces = [*NAMESPACES, *(PROCESSES if processes else ())]
    prepare = "mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm" + (
        " && mount -t proc proc /proc" if processes else ""
    )
    tried = subprocess.run(["unshare", *spaces, "sh", "-c", prepare], capture_output=True, text=True)
    if tried.returncode:
        return f"this machine gives no namespaces: {tried.stderr.strip()}"
    link = "ip link add switch type bridge && ip link add port type veth peer name eth0"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", link], capture_output=True, text=True)
    if tried.returncode:
        return f"this machine makes no virtual network links: {tried.stderr.strip()}"
    return ""


def _await_link(ip: list[str], name: str = "eth0", limit: float = 10.0) -> None:
    """Wait until the kernel says that a link is up: up to a second after both ends are, and UCX leaves it out before."""
    show = [*ip, "-o", "link", "show", name]
    until = time.monotonic() + limit
    while "state UP" not in (said := subprocess.run(show, capture_output=True, text=True, check=True).stdout):
        assert time.monotonic() < until, f"the link between the hosts did not come up: {said}"
        time.sleep(0.02)


@contextlib.contextmanager
def hosts_up(
    folder: Path,
    names: Sequence[str] = ("host1", "host2"),
    *,
    mounts: Mapping[str, Sequence[tuple[Path | None, Path]]] | None = None,
    processes: bool = False,
) -> Iterator[Hosts]:
    """Bring up hosts, joined by a switch.

    Args:
        folder: for what belongs to them; all see it.
        names: theirs.
        mounts: of each host: what is seen instead of a folder; None is an empty one that vanishes with the host.
        processes: Give each a process namespace of its own. All that runs on a host, in the background too, then ends with
            the test, and one host cannot start anything on another: for hosts with a resource manager.
    """
    addresses = {name: f"10.77.0.{number + 1}" for number, name in enumerate(names)}
    table = folder / "names"
    table.write_text("127.0.0.1 localhost\n" + "".join(f"{addresses[name]} {name}\n" for name in names))
    shell = folder / "remote-shell"
    shell.write_text(_REMOTE_SHELL.format(folder=folder))
    shell.chmod(0o755)
    started: list[subprocess.Popen[str]] = []
    outside = socket.gethostname()
    up = Hosts(folder, tuple(names), processes)
    try:
        for name in (*names, SWITCH):
            own = processes and name != SWITCH
            seen = [f"{source or ''}={place}" for source, place in (mounts or {}).get(name, ())]
            spaces = [*NAMESPACES, *(PROCESSES if own else ())]
            words = [sys.executable, "-c", _FIRST_PROCESS, name, str(table), "own" if own else "", *seen]
            with open(folder / f"{name}.said", "wb") as errors:
                started.append(
                    subprocess.Popen(
                        ["unshare", *spaces, *words],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                )
        for name, process in zip((*names, SWITCH), started, strict=True):
            assert process.stdout is not None
            said = process.stdout.readline().split()
            assert said[:1] == ["ready"], f"{name} did not come up: {(folder / f'{name}.said').read_text()}"
            up.first[name] = int(said[1])
            (folder / f"{name}.pid").write_text(said[1])
        switch = up.inside(SWITCH)
        subprocess.run([*switch, "link", "add", SWITCH, "type", "bridge"], check=True)
        subprocess.run([*switch, "link", "set", SWITCH, "up"], check=True)
        for number, name in enumerate(names):
            # Both ends are made where they belong: the machine itself never sees the link.
            peer = ["type", "veth", "peer", "name", "eth0", "netns", str(up.first[name])]
            subprocess.run([*switch, "link", "add", f"port{number}", *peer], check=True)
            subprocess.run([*switch, "link", "set", f"port{number}", "master", SWITCH, "up"], check=True)
            subprocess.run([*up.inside(name), "addr", "add", f"{addresses[name]}/24", "dev", "eth0"], check=True)
            for link in ("eth0", "lo"):
                subprocess.run([*up.inside(name), "link", "set", link, "up"], check=True)
        for number, name in enumerate(names):
            _await_link(up.inside(name))
            _await_link(switch, f"port{number}")
        assert socket.gethostname() == outside
        yield up
    finally:
        for process in started:
            assert process.stdin is not None
            process.stdin.close()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
