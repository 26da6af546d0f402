"""Which line of the user's code runs: torch, regrad and the standard library are not the user's; models that ship are."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from regrad.torch.regions.discover.names import is_library

_SHIPPED = ("regrad.bench", "regrad.demo", "regrad.verify")
_END = "regrad.torch.audit.runs"


@functools.cache
def _is_users(module: str) -> bool:
    if module == "torch" or module.startswith("torch."):
        return False
    return module.startswith(_SHIPPED) or not is_library(module)


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code of the user's."""
    return not frame.f_code.co_filename.startswith("<") and _is_users(frame.f_globals.get("__name__", ""))


def line_of(frame: FrameType | None) -> str:
    """``file:line`` of the innermost frame of the user's from ``frame`` outwards; "" if the audit comes first."""
    while frame is not None:
        if frame.f_globals.get("__name__", "") == _END:
            return ""
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_line() -> str:
    """:func:`line_of` the caller."""
    return line_of(sys._getframe(1))


class LineTrace:
    """Calls ``passed(line)`` whenever a line of the user's has run, with the line; a line that calls others passes twice.

    Takes the place of a tracer that is on (a debugger's, a coverage tool's) while it is entered.
    """

    def __init__(self, passed: Any) -> None:
        self.passed = passed
        self.line = ""
        self._before: Any = None

    def __enter__(self) -> LineTrace:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_users(frame):
            return None
        self._pass(self.line)
        self.line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return self._moved

    def _moved(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._pass(self.line)
        self.line = line_of(frame.f_back) if event == "return" else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return self._moved

    def _pass(self, line: str) -> None:
        self.passed(line)
