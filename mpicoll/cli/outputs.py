"""The files that a command writes at its end: opened before its work."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from mpicoll.errors import LaunchError


class Output:
    """A file that is opened before the work of a command, and written after the work.

    The old content stays until then. A new file that is never written is removed.

    Args:
        option: the option that names the file, for errors.
        path: the file.

    Raises:
        LaunchError: the file cannot be opened.
    """

    def __init__(self, option: str, path: str) -> None:
        self.path = path
        self._option = option
        self._is_new = not os.path.lexists(path)
        folder = os.path.dirname(path) or "."
        try:
            with open(path, "ab"):
                pass
        except OSError as error:
            missing = f"there is no folder {folder}"
            raise self._error(error.strerror if os.path.isdir(folder) else missing) from None

    def _error(self, text: str | None) -> LaunchError:
        return LaunchError(f"{self._option} {self.path}: {text}")

    def write(self, data: bytes) -> None:
        """Replace the content of the file.

        Raises:
            LaunchError: the file cannot be written.
        """
        self._is_new = False
        try:
            Path(self.path).write_bytes(data)
        except OSError as error:
            raise self._error(error.strerror) from None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._is_new:
            Path(self.path).unlink(missing_ok=True)


def picture_format(option: str, path: str) -> str:
    """Return the format of a picture, which the ending of its name selects.

    Raises:
        LaunchError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        if error.name != "matplotlib":
            raise LaunchError(f"{option} needs matplotlib, which cannot be imported: {error}") from error
        raise LaunchError(f'{option} needs matplotlib: pip install "mpicoll[plot]"') from None
    known = FigureCanvasBase.get_supported_filetypes()
    ending = os.path.splitext(path)[1].removeprefix(".").lower()
    if ending not in known:
        raise LaunchError(f"{option} {path}: the ending of the name is the format, one of {', '.join(sorted(known))}")
    return ending
