"""Stores without a server and without a file: in this process, and a part of another store."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mpicoll.errors import DistStoreError
from mpicoll.stores.base import Store, longest_rest, name_of_key, progress, to_bytes, to_seconds
from mpicoll.stores.table import CHANGES, StoreTable, timed_out


class LocalStore(Store):
    """A store that applies its operations in this process. It tries an operation until the operation is possible."""

    def __init__(self) -> None:
        super().__init__()
        self._table = StoreTable()

    def _try(self, op: str, args: Sequence[bytes]) -> list[bytes] | None:
        """Apply an operation to the table, or return None if it is not possible yet.

        Raises:
            BlockingIOError: the table cannot be used now.
        """
        return self._table.do(op, args)

    def _rest(self, waited: float, left: float) -> None:
        """Wait, for ``left`` seconds at most, until an operation that was not possible may have become possible."""
        raise NotImplementedError

    def _blocked(self, op: str, timeout: float) -> DistStoreError:
        """Return the error of an operation at whose limit the table could not be used."""
        raise NotImplementedError

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        start = time.monotonic()
        while True:
            is_blocked = False
            try:
                found = self._try(op, args)
                if found is not None:
                    return found
            except BlockingIOError:
                is_blocked = True
            waited = time.monotonic() - start
            if waited >= timeout:
                raise self._blocked(op, timeout) if is_blocked else timed_out(op, args, timeout, self._table.values)
            tried = (
                min(waited, 0.005) if is_blocked else waited
            )  # a lock is held for a short time, and others wait for it, too
            self._rest(tried, min(timeout - waited, longest_rest()))
            progress()


class HashStore(LocalStore):
    """A store of this process, for its threads.

    Source: torch.distributed.HashStore.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        with self._changed:
            found = super()._ask(op, args, timeout)
            if op in CHANGES:
                self._changed.notify_all()
            return found

    def _rest(self, waited: float, left: float) -> None:
        self._changed.wait(left)


class PrefixStore(Store):
    """A part of another store: each key has a prefix in the other store.

    Source: torch.distributed.PrefixStore.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__()
        if not isinstance(prefix, str):
            raise TypeError(f"PrefixStore: prefix must be a string, not {type(prefix).__name__}")
        if store is None:
            raise ValueError("PrefixStore: store must not be None")
        self.prefix = prefix
        self.underlying_store = store

    def num_keys(self) -> int:
        """Return the number of keys of the whole underlying store (as torch)."""
        return self.underlying_store.num_keys()

    @property
    def timeout(self) -> timedelta:
        """The limit of the waits of the underlying store."""
        return self.underlying_store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the waits of the underlying store."""
        self.underlying_store.set_timeout(timeout)

    def _do(self, op: str, *args: Any, timeout: timedelta | None = None) -> list[bytes]:
        return super()._do(op, *args, timeout=self.timeout if timeout is None else timeout)

    def _ask(self, op: str, args: Sequence[bytes], timeout: float) -> list[bytes]:
        front = f"{self.prefix}/".encode()
        store = self.underlying_store
        if type(store)._ask is Store._ask:  # a program's own store, which has only the public functions
            if op != "list_keys":
                return _by_functions(store, op, self._with_prefix(op, args), timeout)
            keys = [key.encode(errors="surrogateescape") for key in store.list_keys()]
        elif op == "list_keys":
            keys = store._ask("list_keys", [], timeout)
        else:
            return store._ask(op, self._with_prefix(op, args), timeout)
        return [key[len(front) :] for key in keys if key.startswith(front)]

    def _with_prefix(self, op: str, args: Sequence[bytes]) -> list[bytes]:
        """Return the arguments with the prefix before each key."""
        front = f"{self.prefix}/".encode()
        if op in ("check", "wait", "multi_get"):
            return [front + arg for arg in args]
        if op == "multi_set":
            return [front + arg if not place % 2 else arg for place, arg in enumerate(args)]
        return [front + args[0], *args[1:]]

    def clone(self) -> Store:
        """Return the same part of a clone of the underlying store."""
        return PrefixStore(self.prefix, self.underlying_store.clone())


def _by_functions(store: Store, op: str, args: list[bytes], timeout: float) -> list[bytes]:
    """Apply an operation by the store's function of that name."""
    found: Any
    if op in ("check", "wait", "multi_get"):
        keys = [name_of_key(arg) for arg in args]
        limited = op == "wait" and timeout != to_seconds(store.timeout)
        found = getattr(store, op)(keys, *([timedelta(seconds=timeout)] if limited else []))
    elif op == "multi_set":
        store.multi_set([name_of_key(arg) for arg in args[::2]], list(args[1::2]))
        return []
    else:
        key, rest = name_of_key(args[0]), args[1:]
        given = [int(rest[0])] if op == "add" else [rest[0] == b"1"] if op == "queue_pop" else rest
        found = getattr(store, op)(key, *given)
    results = found if op == "multi_get" else [] if found is None or op == "wait" else [found]
    return [b"%d" % each if isinstance(each, int) else to_bytes(each, "a value") for each in results]
