"""Reads a failed allocation: whether an error is one, how much was asked for, where in the step, and what is alive."""

from __future__ import annotations

import gc
import linecache
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from regrad.core.advice import Trap
from regrad.core.oom import OUTSIDE, REPLAY
from regrad.core.trace import BACKWARD, FORWARD, OPTIMIZER
from regrad.core.units import parse_bytes
from regrad.torch.graphs import passes, saved_bytes
from regrad.torch.record import LIBRARIES
from regrad.torch.traps_retained import kept_graph_trap

MOST_ONE_STEP_PASSES = 2
"""A loss may well be a sum over two forward passes (two views, two players); more below one holder are kept ones."""
_SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
_ASKED = (
    re.compile(r"you tried to allocate (\d+) bytes"),
    re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)? ?[KMGT]?i?B)"),
    re.compile(r"Unable to allocate (\d+(?:\.\d+)? [KMGTPE]?i?B)"),
)
_BACKWARD_FILES = ("torch/_tensor.py", "torch/autograd/__init__.py", "torch/autograd/graph.py")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory ran out: torch's own type, Python's, or the words of an allocator."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def asked_bytes(error: BaseException) -> int | None:
    """How much was asked for, as far as the message says; where it rounds (CUDA) so does this."""
    for pattern in _ASKED:
        match = pattern.search(str(error))
        if match is not None:
            return _read(match[1])
    return None


def _read(text: str) -> int | None:
    if text.isdecimal():
        return int(text)
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", text).groups()  # type: ignore[union-attr]
    power = {"P": 2, "E": 3}.get(unit[0])
    if power is not None:  # beyond what a budget can be, and not beyond what a typo can ask for
        return int(float(number) * 1024 ** (power + 3))
    return parse_bytes(f"{number} {unit}") if unit != "B" else int(float(number))


@dataclass(frozen=True)
class Place:
    """Where in the step an error was raised; see :class:`regrad.core.oom.Explanation`."""

    phase: str
    modules: tuple[str, ...]
    code: str
    where: str
    operation: str


def place(traceback: TracebackType | None, model: nn.Module | None) -> Place:
    """Read the place off a traceback; module names are those in ``model``, or in the outermost module that it shows."""
    frames = list(_frames(traceback))
    phase, stack, users = "", list[nn.Module](), ("", "")
    for frame, line in frames:
        code = frame.f_code
        file = code.co_filename.replace("\\", "/")
        module = frame.f_locals.get("self")
        if code.co_name in ("backward", "grad", "_engine_run_backward") and file.endswith(_BACKWARD_FILES):
            phase = BACKWARD
            stack = []
        elif code.co_name == "step" and issubclass(type(module), torch.optim.Optimizer):
            phase = OPTIMIZER
        elif isinstance(module, nn.Module) and code.co_name in ("forward", "_call_impl"):
            if not stack or stack[-1] is not module:
                stack.append(module)
            phase = phase or FORWARD
        if not code.co_filename.startswith(LIBRARIES) and not file.endswith("contextlib.py"):
            users = f"{code.co_filename}:{line}", linecache.getline(code.co_filename, line).strip()
    if phase == BACKWARD and stack:
        phase = REPLAY
    last = frames[-1] if frames else None
    operation = "" if last is None else linecache.getline(last[0].f_code.co_filename, last[1]).strip()
    return Place(phase or OUTSIDE, tuple(_names(stack, model)), users[1], users[0], operation)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _names(stack: list[nn.Module], model: nn.Module | None) -> list[str]:
    root = model if model is not None else (stack[0] if stack else None)
    known = {id(module): name for name, module in root.named_modules()} if root is not None else {}
    return [known.get(id(module)) or type(module).__name__ for module in stack]


# -- what is alive ----------------------------------------------------------------------------------------------------


def tensors_alive(objects: Iterable[object]) -> list[torch.Tensor]:
    """The real tensors among ``objects``, whatever else is there."""
    found: list[torch.Tensor] = []
    for one in objects:
        kind = type(one)
        if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor):
            found.append(one)  # type: ignore[arg-type]
    return found


def alive(objects: list[object], device: str) -> dict[str, int]:
    """Bytes on ``device`` by kind: weights, gradients, optimizer, activations (what has a graph, and what graphs saved),
    and other tensors. Each storage counts once, under the first kind that it is of."""
    tensors = [t for t in tensors_alive(objects) if t.device.type == device and t.layout == torch.strided]
    leaves = [t for t in tensors if t.is_leaf and t.requires_grad]
    state = [
        leaf
        for one in objects
        if issubclass(type(one), torch.optim.Optimizer)  # isinstance would wake lazy objects
        for leaf in pytree.tree_leaves(list(one.state.values()))  # type: ignore[attr-defined]
        if isinstance(leaf, torch.Tensor) and leaf.device.type == device
    ]
    graphs = [t for t in tensors if t.grad_fn is not None]
    seen: set[int] = set()
    found = {
        "weights": _count(leaves, seen),
        "gradients": _count([t.grad for t in leaves if t.grad is not None], seen),
        "optimizer": _count(state, seen),
    }
    results = _count(graphs, seen)
    found["activations"] = results + saved_bytes(graphs, seen)
    found["other tensors"] = _count(tensors, seen)
    return found


def _count(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    size = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            size += storage.nbytes()
    return size


def kept_graph(objects: list[object], traceback: TracebackType | None) -> Trap | None:
    """Losses of many forward passes that one tensor, or one list, holds with their graphs; None if there are none."""
    scalars = [t for t in tensors_alive(objects) if t.grad_fn is not None and t.numel() == 1]
    if not scalars:
        return None
    holders: list[list[torch.Tensor]] = [[one] for one in scalars]
    for box in gc.get_referrers(*scalars):
        if isinstance(box, (list, deque)) and box is not scalars and box is not objects:
            holders.append([t for t in box if any(t is scalar for scalar in scalars)])
    counted = [(passes(roots), roots) for roots in holders]
    graphs, roots = max(counted, key=lambda pair: len(pair[0]))
    if len(graphs) <= MOST_ONE_STEP_PASSES:
        return None
    where = _variable(roots, traceback) or "a tensor"
    nodes = sum(one.nodes for one in graphs)
    return kept_graph_trap(
        f"{where} holds the graphs of {len(graphs)} forward passes, {nodes:,} nodes", saved_bytes(roots)
    )


def _variable(roots: list[torch.Tensor], traceback: TracebackType | None) -> str:
    """The local variable that holds one of ``roots``, in words; "" if none of the frames has it."""
    frames = [frame for frame, _ in _frames(traceback)]
    outer = frames[0].f_back if frames else None
    while outer is not None:
        frames.append(outer)
        outer = outer.f_back
    for frame in frames:
        for name, value in frame.f_locals.items():
            inside = list(value) if isinstance(value, (list, deque)) else [value]
            if not name.startswith("_") and any(item is root for item in inside for root in roots):
                return f"{name} in {frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]})"
    return ""


def objects_alive() -> list[Any]:
    """Everything that Python's collector knows, after a collection."""
    gc.collect()
    return gc.get_objects()
