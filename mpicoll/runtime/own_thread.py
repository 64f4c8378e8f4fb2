"""The class of the library's threads, which are not threads of the program."""

from __future__ import annotations

import threading


class OwnThread(threading.Thread):
    """A thread of the library: a search for deadlocks does not ask what it does.

    Only the class tells it from the program's threads, which may have any name.
    """


def own_idents() -> set[int | None]:
    """Return the identifiers of the library's threads that are alive."""
    return {thread.ident for thread in threading.enumerate() if isinstance(thread, OwnThread)}
