"""Whether threads, or signal handlers, may make a call of the library: what their code and their variables lead to.

The search goes from the frames of a thread to the functions that their code names, to the objects in their variables, and so
on. It knows no types. A name that any of this code mentions stands for each attribute of that name that a reached object has. So
the search also finds calls that a thread never makes. It does not find functions whose names are computed, and functions that
come from another process. Functions of the standard library are taken to use nothing of the program but what the program gives
them, and those of installed packages that do not use the library nothing but that and the objects of their modules. No code of
the program runs.
"""

from __future__ import annotations

import _thread
import builtins
import dis
import gc
import os
import signal
import sys
import sysconfig
import weakref
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import resolve_name
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any

from mpicoll import errors

MOST = 30_000
"""The most objects that a search visits. Of threads that reach more, it is unknown what they call."""

_OWN = __name__.partition(".")[0]
_ATOMS = {
    *(int, float, complex, bool, bytes, bytearray, range, slice, type(None), type(...), CodeType, TracebackType),
    *(ClassMethodDescriptorType, GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType),
}
"""The types of objects that lead to nothing but their class."""

_STANDARD = tuple(f"{path}/" for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")} if path)
_INSTALLED = "/site-packages/", "/dist-packages/"
_MAKES = {"__new__", "__init__", "__post_init__"}
_SUSPENDED = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
_SILENT = {"DistributedSampler", "ReduceOp"}
"""Other names of the library that stand for no communication."""
_TEXTS = {str, tuple, dict}
"""The types of attributes that describe a class, such as ``__slots__``."""
_SIGNALS = os.kill, os.killpg, signal.pthread_kill, signal.raise_signal, _thread.interrupt_main
"""Functions by which a program signals itself."""
_IMPORT = dis.opmap["IMPORT_NAME"]
_VARIABLES = {number for name, number in dis.opmap.items() if name.endswith(("_NAME", "_GLOBAL"))} - {_IMPORT}
"""Instructions that read or write a variable of a module or of a class under way, by its name."""
_SHIFTS = {
    dis.opmap[name]: shift
    for name, shift, since in (("LOAD_GLOBAL", 1, (3, 11)), ("LOAD_ATTR", 1, (3, 12)), ("LOAD_SUPER_ATTR", 2, (3, 12)))
    if name in dis.opmap and sys.version_info >= since
}
"""By how many bits the number of a name stands higher in the argument of an instruction."""
_OPTIMIZED = 1
"""The flag of code whose variables are no dictionary: of functions."""
_HEAP = 1 << 9
"""The flag of types that are made at run time, such as all classes in Python."""
_PLAIN = object.__basicsize__ + 16
"""The most bytes of an object that has no other contents than its dictionary."""


def may_call(roots: Iterable[Any]) -> bool:
    """Return whether frames, functions or other objects may lead to a call of the library that communicates."""
    search = _Search()
    try:
        search.run(roots)
    except Exception:  # _Found; another thread has changed a container meanwhile; an import that would fail
        return True
    return False


class _Found(Exception):
    """A call was found, or code of which nothing is known."""


class _Search:
    """One search: the names and the objects that were reached so far."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._spaces: list[
            tuple[Any, Any, set[str]]
        ] = []  # an object, its attributes, and the names that were looked up
        # An object of None: the attributes are those of a module of the library.
        self._kinds: set[tuple[type, bool]] = set()
        self._todo: list[Any] = []
        self._seen: dict[int, Any] = {}

    def run(self, roots: Iterable[Any]) -> None:
        """Visit everything that the roots lead to; raise :class:`_Found` at a call."""
        self._todo.extend(roots)
        while self._todo:
            while self._todo:
                self._visit(self._todo.pop())
            for owner, space, done in self._spaces:
                for name in (space.keys() & self.names) - done:
                    done.add(name)
                    if owner is None:
                        _judge(name)
                    else:
                        self._attribute(owner, space[name])

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            self.names.update(_names((value,)))
        if kind is str or kind in _ATOMS or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # the reference prevents that another object gets the same identifier
        if len(self._seen) > MOST:
            raise _Found
        if issubclass(kind, FunctionType):
            self._function(value)
        elif issubclass(kind, MethodType):
            self._todo += (value.__func__, value.__self__)
        elif issubclass(kind, BuiltinFunctionType):
            if value in _SIGNALS:
                raise _Found  # the handler may end a wait of the main thread
            if not issubclass(type(value.__self__), ModuleType):
                self._todo.append(value.__self__)
        elif issubclass(kind, FrameType):
            self._code(value.f_code, value.f_globals)
            if value.f_code.co_flags & _OPTIMIZED:
                self._todo += value.f_locals.values()
        elif kind in _SUSPENDED:
            self._todo.append(getattr(value, _SUSPENDED[kind]))
        elif issubclass(kind, ModuleType):
            self._module_as_value(value)
        elif issubclass(kind, type):
            self._class(value, made=True)
        elif issubclass(kind, weakref.ref):
            self._todo.append(weakref.ref.__call__(value))
        else:
            self._instance(value, kind)

    def _function(self, function: FunctionType) -> None:
        if _is_own(function.__globals__.get("__name__")):
            _judge(function.__name__)
            return
        self._code(function.__code__, function.__globals__)
        self._todo += (function.__closure__, function.__defaults__, function.__kwdefaults__)
        self._todo += vars(function).values()

    def _code(self, code: CodeType, variables: dict[str, Any]) -> None:
        names, attributes, imported = _mentioned(code)
        self.names |= attributes
        if _is_standard(code.co_filename):
            return
        if _is_installed(code.co_filename) and _top(variables.get("__name__")) not in _users(len(sys.modules)):
            home = variables.get("__name__")
            found = [variables.get(name) for name in names]
            self._todo += (each for each in found if _is_of(each, home))
            return
        value: Any
        for name in names:
            value = variables.get(name, vars(builtins).get(name))
            if value is eval or value is exec:
                raise _Found
            if issubclass(type(value), ModuleType):
                self._module(value, names)
            else:
                self._todo.append(value)
        for name, level in imported:
            full = resolve_name("." * level + name, variables.get("__package__") or "") if level else name
            known = [sys.modules[each] for each in (full, _top(full)) if each in sys.modules]
            if not known and _top(full) not in sys.stdlib_module_names:
                raise _Found  # of a module that is not loaded
            for module in known:
                self._module(module, names)

    def _module(self, module: ModuleType, names: frozenset[str]) -> None:
        """Visit the attributes of a module that one code mentions."""
        todo, done = [module], set()
        while todo:
            each = todo.pop()
            done.add(each)
            space = _space(each)
            if _is_own(space.get("__name__")):
                for name in _exported(space) & names:
                    _judge(name)
                if "getattr" in names:
                    raise _Found
            for name in space.keys() & names:
                value = space[name]
                if not issubclass(type(value), ModuleType):
                    self._todo.append(value)
                elif value not in done:
                    todo.append(value)

    def _module_as_value(self, module: ModuleType) -> None:
        """Note a module that a variable holds: any code may use its attributes."""
        space = _space(module)
        if _is_own(space.get("__name__")):
            self._spaces.append((None, dict.fromkeys(_exported(space)), set()))
        elif not _is_standard(space.get("__file__") or "<frozen"):
            self._spaces.append((module, space, set()))

    def _class(self, kind: type, *, made: bool) -> None:
        """Visit a class: its methods for operators, and those that make an instance if ``made``."""
        for each in type.__getattribute__(kind, "__mro__"):
            if (each, made) in self._kinds:
                continue
            self._kinds.add((each, made))
            space = type.__getattribute__(each, "__dict__")
            if _is_own(space.get("__module__")):
                _judge(each.__name__)
                return
            if each.__flags__ & _HEAP:
                special = {name for name in space if name[:2] == name[-2:] == "__"}
                self._spaces.append((each, space, special))
                methods = [space[name] for name in special if made or name not in _MAKES]
                self._todo += (method for method in methods if type(method) not in _TEXTS)

    def _instance(self, value: Any, kind: type) -> None:
        self._class(kind, made=False)
        own = _space(value)
        classes = [type.__getattribute__(each, "__dict__") for each in type.__getattribute__(kind, "__mro__")]
        slots = {
            name: each
            for space in classes
            if "__slots__" in space
            for name, each in space.items()
            if type(each) is MemberDescriptorType
        }
        self._spaces += ((value, space, set()) for space in (own, slots) if space)
        if not kind.__flags__ & _HEAP or kind.__basicsize__ - 8 * len(slots) > _PLAIN or kind.__itemsize__:
            self._todo += (each for each in gc.get_referents(value) if each is not own and each is not kind)

    def _attribute(self, owner: Any, value: Any) -> None:
        """Visit what a name of a class or an object stands for."""
        if type(value) is property:
            self._todo += (value.fget, value.fset, value.fdel)
        elif type(value) in (staticmethod, classmethod):
            self._todo.append(value.__func__)
        elif type(value) is not MemberDescriptorType:
            self._todo.append(value)
        elif not issubclass(type(owner), type):  # the slot of an object
            try:
                self._todo.append(value.__get__(owner))
            except AttributeError:
                pass


def _judge(name: str) -> None:
    """Raise :class:`_Found` for a name of the library, unless what it names never communicates: an error, a question."""
    if not name.startswith(("_", "get_", "is_")) and name not in vars(errors) and name not in _SILENT:
        raise _Found


def _space(value: object) -> dict[str, Any]:
    """Return the dictionary of an object, without running code of the program; {} if it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _exported(space: dict[str, Any]) -> set[str]:
    """Return the names of a module of the library, also those of functions that it loads later."""
    return {*space.get("__all__", ()), *(name for name, value in space.items() if type(value) is not ModuleType)}


def _is_own(module: object) -> bool:
    return _top(module) == _OWN


def _top(module: object) -> str:
    """Return the package of a module."""
    return module.partition(".")[0] if type(module) is str else ""


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_STANDARD) and not _is_installed(file))


def _is_installed(file: str) -> bool:
    return any(each in file for each in _INSTALLED)


def _is_of(value: Any, module: object) -> bool:
    """Return whether a global variable holds a function or a class of its own module, or an object that is no module."""
    if issubclass(type(value), (FunctionType, type)):
        return getattr(value, "__module__", None) == module
    return not issubclass(type(value), ModuleType)


@lru_cache(maxsize=1)
def _users(_: int) -> set[str]:
    """Return the packages whose modules use the library, also through other packages; asked anew if more modules are loaded."""
    uses: dict[str, set[str]] = {}
    for name, module in tuple(sys.modules.items()):
        if _top(name) not in sys.stdlib_module_names:
            values = tuple(_space(module).values())
            found = uses.setdefault(_top(name), set())
            found.update(_top(_space(value).get("__name__")) for value in values if issubclass(type(value), ModuleType))
            found.update(_top(value.__module__) for value in values if type(value) in (FunctionType, type))
    users = {_OWN, *(["torch"] if f"{_OWN}.torch" in sys.modules else [])}
    while True:
        more = {package for package, used in uses.items() if package not in users and not used.isdisjoint(users)}
        if not more:
            return users
        users |= more


def _names(values: Iterable[Any]) -> list[str]:
    return [value for value in values if type(value) is str and len(value) < 100 and value.isidentifier()]


@lru_cache(maxsize=4096)
def _mentioned(code: CodeType) -> tuple[frozenset[str], frozenset[str], tuple[tuple[str, int], ...]]:
    """Return the names that code mentions, also as strings; those that may be attributes; what it imports: names and levels."""
    names = {*_names(code.co_names), *_names(code.co_consts)}
    attributes = names - _only_variables(code)
    imported: list[tuple[str, int]] = []
    for each in code.co_consts:
        if type(each) is tuple:
            found = _names(each)
            names.update(found)
            attributes.update(found)
        elif type(each) is CodeType:
            inner, some, more = _mentioned(each)
            names |= inner
            attributes |= some
            imported += more
    if _IMPORT in code.co_code[::2]:
        constants: list[Any] = []
        for instruction in dis.get_instructions(code):
            if instruction.opcode == _IMPORT:
                level = constants[-2] if len(constants) > 1 else 0
                imported.append((instruction.argval, level if type(level) is int else 0))
            elif instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                constants.append(instruction.argval)
    return frozenset(names), frozenset(attributes), tuple(imported)


def _only_variables(code: CodeType) -> set[str]:
    """Return names that code uses for variables, and for nothing else."""
    used: tuple[set[int], set[int]] = set(), set()
    argument = 0
    for operation, byte in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = argument << 8 | byte
        if operation == dis.EXTENDED_ARG:
            continue
        if operation in dis.hasname:
            used[operation in _VARIABLES].add(argument >> _SHIFTS.get(operation, 0))
        argument = 0
    return {code.co_names[at] for at in used[True] - used[False] if at < len(code.co_names)} - {*_names(code.co_consts)}
