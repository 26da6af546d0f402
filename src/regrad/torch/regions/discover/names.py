"""Which names a region's code can reach: attributes, globals, helper functions. Read from the bytecode, once a code.

An attribute is touched by name, so an object that is reachable and whose name no code mentions need not be copied: a
lambda that can reach a whole trainer copies what it names, not the trainer. Not covered: names made at run time.
"""

from __future__ import annotations

import dis
import functools
import sys
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from regrad.torch.regions.discover.boxes import MISSING

# Code in these packages is taken to keep no Python state of its own beyond what the walk looks at directly.
_OPAQUE = {"torch", "numpy", "regrad", "_pytest", "pytest", "typing_extensions", "scipy", "jax"}
_READ_IN_TORCH = ("torch.nn.modules.", "torch.nn.utils.", "torch.ao.")
_MOST_CODES = 4000
_NOT_RUN = ("__init__", "__repr__", "__str__", "__getstate__", "__setstate__", "__reduce__", "__del__", "__dir__")


@functools.cache
def is_library(module: str | None) -> bool:
    """Whether code of ``module`` is left unread."""
    if not module:
        return True
    if module.startswith(_READ_IN_TORCH):
        return False
    top = module.partition(".")[0]
    return top in _OPAQUE or (top in sys.stdlib_module_names and top != "__main__")


class Reach:
    """What the code of one region can name. Grows as new code is met.

    names    attribute names and identifiers in string constants
    globals  (module globals, name) of data; the key has the identity of the globals
    classes  (class, name) of data attributes of the classes met
    cells    variables that methods share with the function in which their class was made
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.classes: dict[tuple[type, str], None] = {}
        self.cells: dict[int, CellType] = {}
        self._codes: set[CodeType] = set()
        self._types: set[type] = set()
        self._made: set[type] = set()
        self._members: dict[str, list[Any]] = {}
        self._called: set[str] = set()  # members that Python calls by itself
        self._settled = (0, 0)

    def knows(self, cls: type) -> bool:
        """Whether :meth:`add_class` was called with ``cls``."""
        return cls in self._types

    def size(self) -> int:
        """Grows whenever something new was learnt."""
        return len(self.names) + len(self.globals) + len(self.classes) + len(self.cells) + len(self._codes)

    def add_function(self, function: Any) -> None:
        """Read a function, a method or a wrapped one."""
        while isinstance(function, (MethodType, staticmethod, classmethod)):
            function = function.__func__
        if isinstance(function, functools.partial):
            self.add_function(function.func)
        elif isinstance(function, FunctionType):
            self.add_code(function.__code__, function.__globals__)
        if hasattr(function, "__wrapped__"):
            self.add_function(function.__wrapped__)

    def add_class(self, cls: type, *, made: bool = False) -> None:
        """Read the methods of ``cls``, and of its bases outside libraries, that some code names.

        ``made`` is whether code of the region makes instances, so that ``__init__`` runs too.
        """
        if made and cls not in self._made:
            self._made.add(cls)
            self._add_method(vars(cls).get("__init__"))
        if cls in self._types:
            return
        self._types.add(cls)
        for base in cls.__mro__:
            if base is object or is_library(base.__module__) or base.__qualname__ == "Module":
                continue
            keeps_data = not base.__module__.startswith("torch.")
            for name, value in tuple(vars(base).items()):
                if isinstance(value, (FunctionType, staticmethod, classmethod, property, functools.cached_property)):
                    self._members.setdefault(name, []).append(value)
                    if name == "forward" or (name.startswith("__") and name not in _NOT_RUN):
                        self._called.add(name)
                elif keeps_data and not (
                    name.startswith("__") or isinstance(value, (type, BuiltinFunctionType)) or hasattr(value, "__get__")
                ):
                    self.classes[base, name] = None
        self.settle()

    def settle(self) -> None:
        """Read the members whose names have come up: a method can only run if some code names it, or Python calls it."""
        while (len(self.names), len(self._members)) != self._settled:
            ready = [name for name in self._members if name in self.names or name in self._called]
            for name in ready:
                for value in self._members.pop(name, ()):
                    self._add_member(value)
            if not ready:
                self._settled = len(self.names), len(self._members)

    def _add_member(self, value: Any) -> None:
        if isinstance(value, property):
            self._add_method(value.fget)
            self._add_method(value.fset)
        elif isinstance(value, functools.cached_property):
            self._add_method(value.func)
        else:
            self._add_method(value)

    def _add_method(self, function: Any) -> None:
        while isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        for cell in getattr(function, "__closure__", None) or ():
            self.cells[id(cell)] = cell
        self.add_function(function)

    def add_code(self, code: CodeType, names: dict[str, Any]) -> None:
        """Read ``code``, the code nested in it, and the functions and classes that it names among ``names``."""
        waiting = [code]
        while waiting and len(self._codes) < _MOST_CODES:
            one = waiting.pop()
            if one in self._codes:
                continue
            self._codes.add(one)
            self.names.update(one.co_names)
            for constant in one.co_consts:
                if isinstance(constant, CodeType):
                    waiting.append(constant)
                elif isinstance(constant, str) and constant.isidentifier():
                    self.names.add(constant)
            self._read_globals(one, names)

    def _read_globals(self, code: CodeType, names: dict[str, Any]) -> None:
        for name in code.co_names:
            if name in names:
                self._add_global(names, name, code)
        for name in _stored_globals(code):
            self.globals[id(names), name] = (names, name)

    def _add_global(self, names: dict[str, Any], name: str, code: CodeType) -> None:
        value = names.get(name, MISSING)
        if isinstance(value, ModuleType):
            if not is_library(value.__name__):
                for attribute in code.co_names:
                    if attribute in vars(value) and not isinstance(vars(value)[attribute], ModuleType):
                        self._add_global(vars(value), attribute, code)
        elif isinstance(value, FunctionType):
            if not is_library(value.__module__):
                self.add_function(value)
                if value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__:
                    self.globals[id(names), name] = (names, name)
        elif isinstance(value, type):
            if not is_library(value.__module__):
                self.add_class(value, made=True)
        elif not isinstance(value, BuiltinFunctionType):
            self.globals[id(names), name] = (names, name)
            if isinstance(value, functools._lru_cache_wrapper):
                self.add_function(value.__wrapped__)


@functools.cache
def _stored_globals(code: CodeType) -> tuple[str, ...]:
    """The global names that ``code`` writes."""
    return tuple(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL")
