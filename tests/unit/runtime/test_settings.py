"""MPICOLL_* variables."""

from __future__ import annotations

import dataclasses
import warnings
from datetime import timedelta

import pytest

from mpicoll.runtime.settings import INTERNAL, SETTINGS, Settings, read_settings, to_seconds


def test_defaults() -> None:
    """An empty environment gives the defaults of the table."""
    assert read_settings({}) == Settings()
    for setting in SETTINGS:
        assert getattr(Settings(), setting.field) == setting.default, setting.variable


def test_values_are_read() -> None:
    """Each variable sets its field."""
    settings = read_settings({"MPICOLL_TIMEOUT": "12.5", "MPICOLL_STALL_WARN": "3", "MPICOLL_EXIT_GRACE": "1e2"})
    assert (settings.timeout, settings.stall_warn, settings.exit_grace) == (12.5, 3.0, 100.0)
    for text, value in (("1", True), ("ON", True), (" yes ", True), ("0", False), ("false", False)):
        assert read_settings({"MPICOLL_STRICT": text}).strict is value, text
    for text, level in (("full", "full"), ("roll", "roll"), ("off", "off"), (" ROLL ", "roll"), ("Off", "off")):
        assert read_settings({"MPICOLL_CHECK": text}).check == level, text


def test_unknown_values_name_the_variable_and_what_it_takes() -> None:
    """A value that a variable does not take is a ValueError."""
    for variable in ("MPICOLL_TIMEOUT", "MPICOLL_STALL_WARN", "MPICOLL_EXIT_GRACE"):
        for text in ("", "soon", "0", "-1", "nan", "1s"):
            with pytest.raises(ValueError, match=rf"{variable}={text!r} is no valid value \(seconds > 0\)"):
                read_settings({variable: text})
    for text in ("", "2", "maybe"):
        with pytest.raises(ValueError, match="0 or 1"):
            read_settings({"MPICOLL_STRICT": text})
    for text in ("", "0", "on", "none", "full,roll"):
        with pytest.raises(ValueError, match=rf"MPICOLL_CHECK={text!r} is no valid value \(full, roll or off\)"):
            read_settings({"MPICOLL_CHECK": text})
    for text in ("", "0", "off", "errors"):
        with pytest.raises(ValueError, match=rf"MPICOLL_LEFTOVER={text!r} is no valid value \(error or warn\)"):
            read_settings({"MPICOLL_LEFTOVER": text})


def test_unknown_names_warn_once_with_the_nearest() -> None:
    """One warning names every unknown variable, and the nearest known one."""
    environment = {"MPICOLL_TIMEOT": "1", "MPICOLL_STRIKT": "1", "OTHER": "x"}
    with pytest.warns(UserWarning, match="MPICOLL_") as seen:
        assert read_settings(environment) == Settings()
    assert len(seen) == 1
    text = str(seen[0].message)
    assert "MPICOLL_TIMEOT is not a variable" in text
    assert "nearest known variable is MPICOLL_TIMEOUT" in text
    assert "nearest known variable is MPICOLL_STRICT" in text


def test_unknown_names_are_errors_when_strict() -> None:
    """MPICOLL_STRICT=1 turns the warning into a ValueError."""
    with pytest.raises(ValueError, match="MPICOLL_TIMEOT is not a variable"):
        read_settings({"MPICOLL_TIMEOT": "1", "MPICOLL_STRICT": "1"})


def test_variables_of_the_library_itself_are_known() -> None:
    """What a launcher passes to its ranks gives no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_settings(dict.fromkeys(INTERNAL, "x"))


def test_settings_are_frozen() -> None:
    """Settings cannot be changed after they were read."""
    settings = Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.timeout = 1.0  # type: ignore[misc]


def test_seconds() -> None:
    """Limits are seconds or timedeltas, positive."""
    assert to_seconds(3) == 3.0
    assert to_seconds(timedelta(minutes=1)) == 60.0
    for wrong in ("3", None, True):
        with pytest.raises(TypeError, match="the limit must be a number of seconds"):
            to_seconds(wrong, "the limit")  # type: ignore[arg-type]
    for low in (0, -1, float("nan"), timedelta(0)):
        with pytest.raises(ValueError, match="must be positive"):
            to_seconds(low)
