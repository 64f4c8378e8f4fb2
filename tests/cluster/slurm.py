"""A real Slurm for tests: a login host and nodes in namespaces, with daemons, keys and places of their own.

Nothing of the machine is changed, and a Slurm that already runs on it does not notice. All of it ends with the test.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hosts
from hosts import Hosts, hosts_up
from jobs import LISTENER, MARK

LOGIN = "login"
TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "munged")
CPUS = 4
MEMORY = 4000  # MB of each node, as Slurm is told
WORD = "mpicoll"  # the name of the cluster

# What a login shell has, and what a test that runs as root needs.
KEPT = ("HOME", "PATH", "LANG", "LC_ALL", "TERM", "PYTHONPATH", "PYTHONFAULTHANDLER", MARK)
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}

CONFIGURATION = """ClusterName={word}
SlurmctldHost={login}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={own}/munge.socket
StateSaveLocation={own}/state
SlurmdSpoolDir={own}/spool
# The mpi plugin pmix makes its folders here, by numbers of users and steps: two nodes must not share it.
TmpFS={own}/tmp
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
SlurmctldLogFile={log}/slurmctld
SlurmdLogFile={log}/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=5
SlurmdParameters=config_overrides
# MPICH's mpiexec starts its proxies by srun: with pmix, they would have variables that make MPI_Init abort.
MpiDefault=none
MpiParams=ports=20000-20999
ReturnToService=2
SwitchType=switch/none
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=3600
JobRequeue=1
OverTimeLimit=0
CompleteWait=0
MailProg=/bin/true
PropagateResourceLimitsExcept=MEMLOCK,CORE,NOFILE,NPROC,STACK
{gres}
NodeName={nodes} CPUs={cpus} RealMemory={memory} State=UNKNOWN{has}
PartitionName=main Nodes={nodes} Default=YES MaxTime=60 DefaultTime=10 State=UP OverSubscribe=NO
"""


@dataclass(frozen=True)
class Finished:
    """How a batch job ended.

    Attributes:
        job: its id.
        state: Slurm's word for it, ``"COMPLETED"`` or ``"FAILED"`` for example, ``"LIMIT"`` when the test's limit was over
            and the job was cancelled.
        code: its exit code, 128 and the number for a signal.
        output: what it printed, standard output and, when it is apart, standard error after it.
        seconds: from its submission on.
    """

    job: int
    state: str
    code: int
    output: str
    seconds: float

    def __str__(self) -> str:
        return f"job {self.job} {self.state}, exit code {self.code}, after {self.seconds:.1f} s\n{self.output}"


@dataclass(frozen=True)
class Slurm:
    """The Slurm that is up.

    Attributes:
        folder: of its own, the same on all hosts.
        nodes: the names of the nodes.
        hosts: the login host and the nodes.
    """

    folder: Path
    nodes: tuple[str, ...]
    hosts: Hosts

    def environment(self, changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """Return the variables of a shell on the login host: the machine's plain ones, nothing of a launcher."""
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | ROOT_MAY
        # Of each host alone: Open MPI names its folders there by process ids, which hosts and earlier runs have in common.
        environment["TMPDIR"] = str(self.folder / "own" / "tmp")
        for name, value in (changes or {}).items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        return environment

    def run(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        limit: float = 60.0,
        on: str = LOGIN,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host and return how it ended: code 124 or 137 when it was killed at its limit.

        Args:
            words: the command.
            env: changes to its variables; None removes one.
            limit: seconds.
            on: another host.
            cwd: its working folder, the cluster's own if not given.
        """
        # Killing nsenter would leave the command running, so the limit is on the host.
        command = [*self.hosts.enter(on), "timeout", "-k", "2", str(limit), *words]
        if cwd is not None:
            command[command.index(f"--wd={self.hosts.folder}")] = f"--wd={cwd}"
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=self.environment(env),
            timeout=limit + 30,
            check=False,
        )

    def ask(self, *words: str) -> str:
        """Return what one of Slurm's commands prints, and insist that it goes well."""
        done = self.run(words)
        assert done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout.strip()

    def start(
        self,
        script: Path,
        *args: str,
        export: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
    ) -> int:
        """Submit a batch script and return the job's id.

        Args:
            script: it.
            args: its arguments.
            export: what ``sbatch --export=ALL,…`` hands it besides the shell's variables (no commas in the values).
            options: of sbatch, before the script; those in the script itself come after them.
            env: changes to the shell's variables; None removes one.
        """
        assert not any("," in value for value in (export or {}).values()), "sbatch --export takes no commas"
        chosen = ["--export=" + ",".join(["ALL", *(f"{name}={value}" for name, value in (export or {}).items())])]
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        done = self.run(["sbatch", "--parsable", *chosen, *options, str(script), *args], env=env, cwd=work)
        assert done.returncode == 0, f"sbatch {script}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return int(done.stdout.strip().split(";")[0])

    def submit(
        self,
        script: Path,
        *args: str,
        export: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        limit: float = 60.0,
    ) -> Finished:
        """Submit a batch script, as `start` does, and wait until the job has ended; cancel it at the limit in seconds.

        It is submitted once more when Open MPI says that it failed in the one way that is known to be nobody's fault.
        """
        done = self.finish(self.start(script, *args, export=export, options=options, env=env), limit=limit)
        if done.code and LISTENER in done.output:
            print(f"submitted again, Open MPI said: {LISTENER}")
            done = self.finish(self.start(script, *args, export=export, options=options, env=env), limit=limit)
        return done

    def finish(self, job: int, *, limit: float = 60.0) -> Finished:
        """Wait until a job has ended, and cancel it when that takes longer than the limit in seconds."""
        began = time.monotonic()
        over = False
        while (state := self.job_state(job)) not in ENDED:
            if not over and time.monotonic() - began > limit:
                over = True
                print(f"job {job} {state} at its limit:\n{self.ask('scontrol', 'show', 'job', str(job))}")
                self.ask("scancel", str(job))
            assert time.monotonic() - began < limit + 60, f"job {job} does not end: {state}\n{self.logs()}"
            time.sleep(0.1)
        seconds = time.monotonic() - began
        about = self.about(job)
        code, _, number = about["ExitCode"].partition(":")
        return Finished(
            job,
            "LIMIT" if over else state,
            int(code) or (128 + int(number) if int(number) else 0),
            self.output(job),
            seconds,
        )

    def about(self, job: int) -> dict[str, str]:
        """Return what Slurm says of a job, by its names: ``JobState``, ``NodeList``, ``StdOut``, …."""
        text = self.ask("scontrol", "--oneliner", "show", "job", str(job))
        return dict(re.findall(r"(?:^| )([A-Za-z/:]+)=(.*?)(?= [A-Za-z/:]+=|$)", text.splitlines()[0]))

    def job_state(self, job: int) -> str:
        """Return Slurm's word for the state of a job: ``"PENDING"``, ``"RUNNING"``, ``"COMPLETED"``, …."""
        return self.about(job)["JobState"]

    def output(self, job: int) -> str:
        """Return what a job has printed so far."""
        about = self.about(job)
        files = dict.fromkeys(about[name] for name in ("StdOut", "StdErr") if name in about)
        return "".join(Path(file).read_text(errors="replace") for file in files if Path(file).exists())

    def wait_for(self, job: int, text: str, *, times: int = 1, limit: float = 60.0) -> None:
        """Wait until a job has printed a text."""
        until = time.monotonic() + limit
        while self.output(job).count(text) < times:
            state = self.job_state(job)
            about = f"job {job} ({state}) never printed {text!r}:\n{self.output(job)}"
            assert state not in ENDED, about
            assert time.monotonic() < until, about
            time.sleep(0.1)

    def cancel(self, job: int) -> None:
        """Cancel a job."""
        self.ask("scancel", str(job))

    def clear(self, limit: float = 30.0) -> None:
        """Cancel all jobs and wait until the nodes are idle."""
        until = time.monotonic() + limit
        while jobs := self.ask("squeue", "-h", "-o", "%A").split():
            assert time.monotonic() < until, f"jobs {jobs} do not end\n{self.logs()}"
            self.run(["scancel", *jobs])
            time.sleep(0.1)
        while any(state != "idle" for state in self.ask("sinfo", "-h", "-N", "-o", "%t").split()):
            assert time.monotonic() < until, f"the nodes are not idle\n{self.logs()}"
            time.sleep(0.1)

    def requeue(self, job: int) -> None:
        """Put a running job back into the queue; it starts again after some seconds."""
        self.ask("scontrol", "requeue", str(job))

    def signal(self, job: int, name: str, *, batch: bool = False) -> None:
        """Send a signal to the steps of a job, or to its batch shell alone."""
        self.ask("scancel", f"--signal={name}", *(["--batch"] if batch else []), str(job))

    def kill_node(self, name: str) -> None:
        """Take a node's power away: it is silent and all that runs there is gone. Slurm notices after 10 to 30 seconds.

        A job on it that may be requeued is then pending for two minutes.
        """
        self.hosts.kill(name)

    def logs(self) -> str:
        """Return what the daemons have said, for a failed test."""
        return "".join(
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]) + "\n"
            for log in sorted((self.folder / "log").iterdir())
        )


def missing() -> str:
    """Return why there can be no Slurm here, or ""."""
    if why := hosts.missing(processes=True):
        return why
    for tool in TOOLS:
        if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            return f"a Slurm of their own needs the command {tool}: see tests/cluster/install.sh"
    if not Path("/etc/slurm").is_dir():
        return "a Slurm of their own needs the folder /etc/slurm, where Slurm's commands look"
    return ""


def _libraries(folder: Path) -> list[tuple[Path | None, Path]]:
    """Return the mounts that give Slurm's mpi plugin pmix the library name that Debian has in a package for developers only."""
    mounts: list[tuple[Path | None, Path]] = []
    for number, place in enumerate(sorted(Path("/usr/lib").glob("*/pmix2/lib"))):
        if not (place / "libpmix.so.2").exists():
            continue
        copy = folder / f"pmix{number}"
        shutil.copytree(place, copy, symlinks=True)
        if not (copy / "libpmix.so").is_symlink():
            (copy / "libpmix.so").symlink_to("libpmix.so.2")
        mounts.append((copy, place))
    return mounts


def _configure(folder: Path, names: Sequence[str], gpus: int) -> None:
    etc = folder / "etc"
    for part in ("etc", "log", "own"):
        (folder / part).mkdir()
    (etc / "slurm.conf").write_text(
        CONFIGURATION.format(
            word=WORD,
            login=LOGIN,
            own=folder / "own",
            log=folder / "log",
            nodes=",".join(names),
            cpus=CPUS,
            memory=MEMORY,
            gres="GresTypes=gpu" if gpus else "",
            has=f" Gres=gpu:{gpus}" if gpus else "",
        )
    )
    version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True, env=_sbin()).stdout
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    plugin = "disabled" if number >= (23, 11) else "cgroup/v1"
    (etc / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
    if gpus:
        devices = (f"Name=gpu File={folder}/own/gpu{gpu} Flags=nvidia_gpu_env\n" for gpu in range(gpus))
        (etc / "gres.conf").write_text("".join(devices))
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))


def _sbin() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def _daemon(up: Hosts, host: str, *words: str) -> None:
    """Start a daemon of a host, which goes to the background when it serves."""
    environment = {name: value for name, value in _sbin().items() if not name.startswith(("SLURM", "MUNGE"))}
    # Its own output would be a pipe that it keeps open.
    log = up.folder / "log" / f"{words[0]}.start.{host}"
    with open(log, "wb") as said:
        done = subprocess.run(
            [*up.enter(host), *words],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=30,
            check=False,
        )
    assert done.returncode == 0, f"{words[0]} on {host}: exit code {done.returncode}\n{log.read_text()}"


@contextlib.contextmanager
def slurm(folder: Path, nodes: int = 2, gpus: int = 0) -> Iterator[Slurm]:
    """Bring up a Slurm with a login host and some nodes, each with 4 CPUs (as Slurm is told).

    Args:
        folder: for what belongs to it; a short path, since sockets are made in it (108 characters at most).
        nodes: how many.
        gpus: how many each node pretends to have: Slurm hands them out and sets CUDA_VISIBLE_DEVICES.
    """
    assert len(str(folder)) < 60, f"too long for the sockets in it: {folder}"
    names = tuple(f"node{number + 1}" for number in range(nodes))
    _configure(folder, names, gpus)
    own = folder / "own"
    mounts = [(folder / "etc", Path("/etc/slurm")), (None, own), *_libraries(folder)]
    with hosts_up(folder, (*names, LOGIN), mounts=dict.fromkeys((*names, LOGIN), mounts), processes=True) as up:
        cluster = Slurm(folder, names, up)
        for host in (*names, LOGIN):
            places = [f"--{what}-file={own}/munge.{what}" for what in ("pid", "seed", "log")]
            _daemon(up, host, "mkdir", "-m", "0755", *(str(own / part) for part in ("state", "spool", "tmp")))
            _daemon(
                up, host, "munged", "--force", f"--key-file={folder}/munge.key", f"--socket={own}/munge.socket", *places
            )
        _daemon(up, LOGIN, "slurmctld", "-c")
        for name in names:
            for gpu in range(gpus):  # a device as /dev/null is, since Slurm looks whether it is one
                _daemon(up, name, "mknod", str(own / f"gpu{gpu}"), "c", "1", "3")
            _daemon(up, name, "slurmd", "-N", name)
        until = time.monotonic() + 60
        while (said := cluster.run(["sinfo", "-h", "-N", "-o", "%t"]).stdout.split()) != ["idle"] * nodes:
            assert time.monotonic() < until, f"the nodes are not idle: {said}\n{cluster.logs()}"
            time.sleep(0.1)
        yield cluster
