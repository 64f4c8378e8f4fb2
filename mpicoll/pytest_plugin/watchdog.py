"""The limit of a test: if it passes, every rank writes its place, one rank prints the places, and the job ends."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from mpicoll.diagnosis.report.entries import name_ranks
from mpicoll.pytest_plugin.calls import account_of, lines_of
from mpicoll.pytest_plugin.ranks import Ranks
from mpicoll.pytest_plugin.verdicts import prefixed
from mpicoll.runtime.call_site import stacks
from mpicoll.runtime.watchdog import OwnThread, own_idents

AFTER_FAILURE = 1 / 3  # the share of the limit that the other ranks have to finish a test after a rank has failed
ANSWERS = 2.0  # seconds in which all ranks write their stacks
NATIVE_GRACE = 10.0  # seconds past the limit after which a process that no thread can stop is ended from C


class Watchdog(OwnThread):
    """A thread that ends the job when a test exceeds its limit, after all ranks that can have written their places.

    The ranks share a folder of files, which a rank with a stuck main thread can use, too: ``alarm`` asks all ranks to write
    ``rank.N``, and the rank that creates ``speaker`` prints. A rank that does not see the folder (another node) prints its own
    stack.
    """

    def __init__(self, ranks: Ranks, err: int) -> None:
        # A thread of the library: a search for deadlocks waits two seconds for other threads of the program.
        super().__init__(name="mpicoll-pytest", daemon=True)
        self.ranks = ranks
        self.err = err
        self.where = ""
        self.waits = False
        self.words = ""
        self.failures: Callable[[], str] = str
        self._what = ""
        self._limit = 0.0
        self._deadline: float | None = None
        self._changed = threading.Condition()
        name = tempfile.mkdtemp(prefix="mpicoll-pytest-") if ranks.rank == 0 else ""
        self.folder = Path(ranks.gather_text(name)[0])
        self.meets = self.folder.is_dir()
        self.start()

    def arm(self, what: str, limit: float, native: bool = True) -> None:
        """Start the limit of ``what``."""
        with self._changed:
            self._what, self._limit, self.words = what, limit, ""
            self._deadline = time.monotonic() + limit
            self._changed.notify()
        if native:
            faulthandler.dump_traceback_later(limit + NATIVE_GRACE, exit=True, file=self.err)

    def hurry(self, words: str) -> None:
        """Shorten the limit, since this rank has failed; ``words`` is the text of the failure."""
        with self._changed:
            if self._deadline is not None:
                self._deadline = min(self._deadline, time.monotonic() + AFTER_FAILURE * self._limit)
                self.words = words

    def disarm(self, native: bool = True) -> None:
        """End the limit."""
        with self._changed:
            self._deadline = None
        if native:
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """End the limit and remove the folder."""
        self.disarm()
        if self.ranks.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(None if self._deadline is None else 0.2)
                deadline = self._deadline
            if deadline is None:
                continue
            if time.monotonic() > deadline or (self.meets and (self.folder / "alarm").exists()):
                break

        def end_hard() -> None:
            """End the process if the report does not."""
            time.sleep(ANSWERS + 4.0)
            os._exit(1)

        OwnThread(target=end_hard, name=f"{self.name} hard end", daemon=True).start()
        try:
            self._end_job()
        finally:
            os._exit(1)

    def _end_job(self) -> None:
        account = {
            "where": self.where,
            "words": self.words,
            "waits": self.waits,
            "stacks": self._stacks(),
            "calls": account_of(self.ranks.rank, self.ranks.size),
        }
        if not self.meets:
            self._print(self._report({self.ranks.rank: account}))
            time.sleep(ANSWERS)
            self.ranks.abort()
        try:
            (self.folder / "alarm").touch()
            draft = self.folder / f"draft.{self.ranks.rank}"
            draft.write_text(json.dumps(account))
            draft.rename(self.folder / f"rank.{self.ranks.rank}")
        except FileNotFoundError:
            time.sleep(ANSWERS + 2.0)  # Another rank prints its report now, then ends the job.
            return
        until = time.monotonic() + ANSWERS
        while len(found := list(self.folder.glob("rank.*"))) < self.ranks.size and time.monotonic() < until:
            time.sleep(0.02)
        try:
            os.close(os.open(self.folder / "speaker", os.O_CREAT | os.O_EXCL))
        except OSError:
            time.sleep(ANSWERS + 2.0)  # Another rank prints, then ends the job.
            return
        accounts = {int(path.name[5:]): json.loads(path.read_text()) for path in sorted(found)}
        # At once, so that a rank that comes later finds no folder, and ends without a report of its own.
        with contextlib.suppress(OSError):
            self.folder = self.folder.rename(f"{self.folder}.done")
        self._print(self._earlier() + self._report(accounts))
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        self.ranks.abort()

    def _stacks(self) -> dict[str, str]:
        # Without the threads of this plugin and of the library, which wait on purpose.
        own = own_idents()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        with stacks() as frames:
            found = {ident: _stack(frame) for ident, frame in frames.items()}
        return {names.get(ident, str(ident)): text for ident, text in found.items() if ident not in own}

    def _report(self, accounts: dict[int, dict[str, Any]]) -> str:
        failed = [rank for rank, account in accounts.items() if account["words"]]
        limit = f"its limit of {self._limit:g} s"
        why = f"within a third of {limit} after a rank had failed" if failed else f"within {limit}"
        lines = ["", "", f"mpicoll: {self._what} was not over on all ranks {why}; the job ends here."]
        places: dict[str, list[int]] = {}
        for rank, account in accounts.items():
            places.setdefault(account["where"], []).append(rank)
        lines += [f"  {name_ranks(on)}: {place}" for place, on in sorted(places.items())]
        silent = sorted(set(range(self.ranks.size)) - set(accounts)) if self.meets else []
        if silent:
            lines.append(f"  no answer (in native code, or on another node): {name_ranks(silent)}")
        if calls := lines_of({rank: account["calls"] for rank, account in accounts.items()}, silent):
            lines += ["", *calls]
        for rank in failed:
            lines += ["", prefixed(rank, accounts[rank]["words"])]
        alike: dict[tuple[str, str], list[int]] = {}
        for rank, account in accounts.items():
            for name, stack in account["stacks"].items():
                if not account["waits"]:
                    alike.setdefault((name, stack), []).append(rank)
        for (name, stack), on in sorted(alike.items(), key=lambda entry: min(entry[1])):
            lines += ["", f"{name_ranks(on)}, thread {name}, most recent call last:", prefixed(min(on), stack)]
        rank = self.ranks.rank
        lines += [
            "",
            f"rank {rank} ends the job now. It has not failed, whatever the launcher or another rank says of it.",
        ]
        return "\n".join(lines) + "\n"

    def _earlier(self) -> str:
        """Return the failures of earlier tests, which pytest would have printed at the end."""
        try:
            text = self.failures()
        except Exception as error:  # a plugin of others
            text = f"the failures of earlier tests cannot be shown: {type(error).__name__}: {error}\n"
        return f"\n\n{text}" if text else ""

    def _print(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self.err, data) :]


def _stack(frame: FrameType) -> str:
    """Return a thread's stack without the frames of pytest."""
    entries = traceback.extract_stack(frame)
    inner = [index for index, entry in enumerate(entries) if Path(entry.filename).parent.name in {"_pytest", "pluggy"}]
    own = entries[inner[-1] + 1 :] if inner else entries
    return "".join(traceback.format_list(own or entries))
