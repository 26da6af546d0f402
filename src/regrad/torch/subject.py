"""From a SUBJECT, the words that name a training step on the command line, to an ``rt.Step``.

    FILE:FACTORY               a Python file and a function in it that returns an rt.Step
    transformers:CONFIGCLASS   a configuration of the transformers library: its defaults, random weights, random tokens
    transformers:CONFIG.JSON   the same with the settings of a file; the path alone will do

Weights and tokens are seeded, so the same SUBJECT is the same step every time.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from regrad.core.errors import InfeasibleBudget, InvalidSubject, UsageError, mark_as_users
from regrad.torch.step import Step

TRANSFORMERS = "transformers"
Result = TypeVar("Result")
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Wishes:
    """What a user asked for beside the SUBJECT; ``None`` means nothing was said.

    A factory gets those that were said as keyword arguments of the same names, ``config`` spread out. ``without_bytes``
    asks for a model of fake tensors where regrad itself builds it; a factory is not told.
    """

    batch: int | None = None
    sequence: int | None = None
    dtype: torch.dtype | None = None
    optimizer: MakeOptimizer | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    without_bytes: bool = False

    def said(self) -> dict[str, Any]:
        """The wishes that were expressed, by name."""
        named = {name: getattr(self, name) for name in ("batch", "sequence", "dtype", "optimizer")}
        spoken = {name: value for name, value in named.items() if value is not None}
        return spoken | {name: read_value(text) for name, text in self.config.items()}


def read_value(text: str) -> Any:
    """``"4"``, ``"0.1"``, ``"True"``, ``"None"``, ``"[1, 2]"`` as what they say, anything else as the string it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None}.get(text, text)


def load_subject(subject: str, wishes: Wishes | None = None) -> Step:
    """The step that ``subject`` names.

    Raises :class:`InvalidSubject` for anything that stands between the words and a step. What a factory itself
    raises is marked as the user's and passed on. Cost: the model is built for real, in main memory.
    """
    if subject.endswith(".json") and ":" not in subject:
        subject = f"{TRANSFORMERS}:{subject}"
    head, colon, name = subject.rpartition(":")
    if not colon or not head or not name:
        raise InvalidSubject(
            f"cannot read {subject!r} as a SUBJECT: there is no ':' with something on both sides. "
            "Write FILE:FACTORY, such as train.py:make_step, or transformers:CONFIGCLASS, such as "
            "transformers:GPT2Config."
        )
    wishes = wishes or Wishes()
    if head == TRANSFORMERS:
        from regrad.torch.transformers_subject import build_step

        return build_step(name, wishes)
    return _from_factory(Path(head), name, wishes)


def with_subject(subject: str, wishes: Wishes, run: Callable[[Step], Result]) -> Result:
    """``run`` on the step that ``subject`` names.

    A step that was built without bytes cannot be run for real where fake tensors do not carry it. It is then built again
    with them, where there is room, and that one decides: its exception is the model's own.
    """
    step = load_subject(subject, wishes)
    try:
        return run(step)
    except Exception as error:
        built_without = isinstance(next(step.model.parameters()), FakeTensor) and wishes.without_bytes
        if not built_without or isinstance(error, (UsageError, InfeasibleBudget)):
            raise
    return run(load_subject(subject, replace(wishes, without_bytes=False)))


def _from_factory(path: Path, name: str, wishes: Wishes) -> Step:
    factory = getattr(_load_file(path), name, None)
    if factory is None or not callable(factory):
        what = "does not define" if factory is None else f"has a {type(factory).__name__}, not a function, called"
        raise InvalidSubject(
            f"{path} {what} {name!r}. Name a function of that file that returns regrad.torch.Step(model, batch, ...)."
        )
    arguments = wishes.said()
    _check_arguments(factory, arguments, f"{path}:{name}")
    try:
        step = factory(**arguments)
    except Exception as error:
        if not isinstance(error, InvalidSubject):
            mark_as_users(error)
        raise
    if not isinstance(step, Step):
        raise InvalidSubject(
            f"{path}:{name} returned a {type(step).__name__}, not a regrad.torch.Step. "
            "End it with: return rt.Step(model, batch, loss=..., optimizer=...)."
        )
    return step


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidSubject(
            f"there is no file {str(path)!r} (looked in {Path.cwd()}). Give the path of a Python file."
        )
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_subject"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidSubject(
            f"{path} is not a Python file: its name does not end in .py. Give a file of Python source."
        )
    module = importlib.util.module_from_spec(spec)
    # Neighbours of the file can be imported as they can when it is run as a script; classes of it can be found again.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        where = _last_line_in(error, path)
        raise InvalidSubject(
            f"{path} cannot be imported: {type(error).__name__}: {error}{where}. It must run by itself: python {path}"
        ) from error
    return module


def _last_line_in(error: BaseException, path: Path) -> str:
    lines = []
    traceback = error.__traceback__
    while traceback is not None:
        if Path(traceback.tb_frame.f_code.co_filename) == path:
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    return f" (at {path}:{lines[-1]})" if lines else ""


def _check_arguments(factory: Callable[..., Any], arguments: Mapping[str, Any], what: str) -> None:
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments) or "no argument"
        raise InvalidSubject(
            f"{what} cannot be called with {given}: {error}. Options that are given on the command line reach the "
            f"factory as keyword arguments of the same names; it is {_name(factory)}{inspect.signature(factory)}."
        ) from None
    except ValueError:  # a callable without a signature shows what it thinks of its arguments when it is called
        return


def _name(factory: Callable[..., Any]) -> str:
    return str(getattr(factory, "__name__", type(factory).__name__))
