"""What a step leaves behind in Python: outputs that attributes, lists or hooks hold, and losses kept with their graph.

Two steps are run on a copy without bytes. What is reachable after the first and was not before it, the first step left;
of that, what is alive after the second one grows, and what the second step replaced without ever reading it is held for
nothing. State that a step reads before it puts another tensor in its place is no trap.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from regrad.core.advice import Trap
from regrad.core.units import format_bytes
from regrad.torch.graphs import passes, saved_bytes
from regrad.torch.profile import Profile
from regrad.torch.step import Step
from regrad.torch.values import operands

RETAINED, KEPT_GRAPH = "retained outputs", "a kept loss graph"
SMALL_BYTES = 1 << 12
_DEEPEST, _LONGEST = 4, 10_000
_BOXES = (list, tuple, set, collections.deque)
_CHANGEABLE = (list, dict, set, collections.deque)
_OWN = {"_parameters", "_buffers", "_modules"}
_WORDS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
}


@dataclass(frozen=True)
class Held:
    """A tensor that something other than autograd holds: where, and by which module; "" for none."""

    path: str
    module: str
    tensor: torch.Tensor


def held_by(step: Step) -> list[Held]:
    """Tensors that are neither parameters nor buffers and that modules, hooks, the loss or the globals that their code
    names hold."""
    own = {id(tensor) for tensor in (*step.model.parameters(), *step.model.buffers())}
    own |= {id(parameter.grad) for parameter in step.model.parameters() if parameter.grad is not None}
    found: dict[int, Held] = {}
    for path, module, value in _roots(step):
        for where, tensor in _inside(value, path, _DEEPEST):
            if id(tensor) not in own:
                found.setdefault(id(tensor), Held(where, module, tensor))
    return list(found.values())


def _roots(step: Step) -> Iterator[tuple[str, str, Any]]:
    """(path, module, value) of everything that may hold a tensor beyond a step."""
    seen: set[Any] = set()
    for name, module in step.model.named_modules():
        for key, value in vars(module).items():
            path = f"{name}.{key}" if name else key
            if key in _WORDS:
                for hook in value.values():
                    for inside, held in _of_function(hook, f"{_WORDS[key]} of {name or 'the model'}"):
                        yield inside, name, held
            elif isinstance(value, (FunctionType, MethodType)):
                for inside, held in _of_function(value, path):
                    yield inside, name, held
            elif key not in _OWN and not isinstance(value, nn.Module):
                yield path, name, value
        if type(module).forward not in seen:
            seen.add(type(module).forward)
            for inside, held in _of_function(type(module).forward, f"forward of {type(module).__name__}"):
                yield inside, name, held
    for inside, held in _of_function(step.loss, "the loss"):
        yield inside, "", held


def _of_function(function: Any, words: str) -> Iterator[tuple[str, Any]]:
    """What a function closes over, and the globals that it names."""
    if isinstance(function, MethodType):
        yield f"{words}, its object", vars(function.__self__) if hasattr(function.__self__, "__dict__") else None
        function = function.__func__
    if not isinstance(function, FunctionType):
        if callable(function) and hasattr(function, "__dict__") and not isinstance(function, nn.Module):
            yield f"{words}, its object", vars(function)
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"{name} in {words}", cell.cell_contents
        except ValueError:
            continue
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (torch.Tensor, *_BOXES, dict)):
            yield f"global {name} in {words}", value


def _inside(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth and isinstance(value, _BOXES):
        for number, item in enumerate(list(value)[:_LONGEST]):
            yield from _inside(item, f"{path}[{number}]", depth - 1)
    elif depth and isinstance(value, Mapping):
        for key, item in list(value.items())[:_LONGEST]:
            yield from _inside(item, f"{path}[{key!r}]", depth - 1)
    elif depth and _is_plain_object(value):
        for key, item in list(vars(value).items()):
            yield from _inside(item, f"{path}.{key}", depth - 1)


def _is_plain_object(value: Any) -> bool:
    if not hasattr(value, "__dict__") or type(value).__module__ in ("builtins", "torch", "functools"):
        return False
    return not isinstance(value, (nn.Module, type, FunctionType, torch.optim.Optimizer))


@contextmanager
def containers_kept(step: Step) -> Iterator[None]:
    """Put back, on the way out, what running copies of ``step`` adds to lists, dicts and sets that functions of the step
    reach by a global name; copies share those with the user."""
    boxes = {id(value): value for _, _, value in _roots(step) if isinstance(value, _CHANGEABLE)}
    before = [(box, list(box.items()) if isinstance(box, dict) else list(box)) for box in boxes.values()]
    try:
        yield
    finally:
        for box, content in before:
            now = list(box.items()) if isinstance(box, dict) else list(box)
            if len(now) != len(content) or any(a is not b for a, b in zip(_flat(now), _flat(content), strict=False)):
                box.clear()
                (box.extend if isinstance(box, (list, collections.deque)) else box.update)(content)


def _flat(items: list[Any]) -> list[Any]:
    return [part for item in items for part in (item if isinstance(item, tuple) else (item,))]


class _ReadWatch(TorchDispatchMode):
    """Notes which of the watched storages an operation reads."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watched, self.read = watched, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in operands(args) + operands(kwargs or {}):
            self.read.add(tensor.untyped_storage()._cdata)
        self.read &= self.watched
        return func(*args, **(kwargs or {}))


def retained_traps(profile: Profile) -> list[Trap]:
    """Both traps of what a step leaves behind. Cost: two fake steps."""
    rehearsal = profile.rehearsal
    step = rehearsal.step
    with containers_kept(step), rehearsal.entered():
        before = {one.tensor.untyped_storage()._cdata for one in held_by(step)}
        step()
        left = [one for one in held_by(step) if one.tensor.untyped_storage()._cdata not in before]
        places = [(one.path, one.module, one.tensor.untyped_storage().nbytes()) for one in left]
        weak = [StorageWeakRef(one.tensor.untyped_storage()) for one in left]
        identities = [one.tensor.untyped_storage()._cdata for one in left]
        watch = _ReadWatch(set(identities))
        del left
        first_nodes = sum(one.nodes for one in passes(held.tensor for held in _scalars(step)))
        with watch:
            step()
        growing = [not reference.expired() for reference in weak]
        found = _kept_graphs(step, first_nodes)
        found += _outputs(places, growing, [identity in watch.read for identity in identities])
        step.clear_gradients()
    return found


def _outputs(places: list[tuple[str, str, int]], growing: list[bool], read: list[bool]) -> list[Trap]:
    """Outputs that are held: those that add up, and those that are replaced and were never read."""
    adding = [place for place, more in zip(places, growing, strict=True) if more]
    idle = [place for place, more, used in zip(places, growing, read, strict=True) if not more and not used]
    found = []
    for chosen, words in ((adding, "more with every step"), (idle, "from one step to the next, and never read again")):
        size = sum(bytes_ for *_, bytes_ in chosen)
        if size < SMALL_BYTES:
            continue
        names = list(dict.fromkeys(path.partition("[")[0] for path, _, _ in chosen))
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        found.append(
            Trap(
                name=RETAINED,
                what=f"{shown} hold {format_bytes(size)} of what the forward made, {words}",
                modules=tuple(dict.fromkeys(module for _, module, _ in chosen if module)),
                bytes=size,
                cure="keep a number (.item()) or a copy off the device (.detach().cpu()), or clear it before the next "
                "step; .detach() alone keeps the bytes",
            )
        )
    return found


def _scalars(step: Step) -> list[Held]:
    """The scalars with a graph that are held."""
    return [one for one in held_by(step) if one.tensor.grad_fn is not None and one.tensor.numel() == 1]


def _kept_graphs(step: Step, first_nodes: int) -> list[Trap]:
    """Scalars that are held with graphs of more than one forward pass."""
    scalars = _scalars(step)
    graphs = passes(one.tensor for one in scalars)
    nodes = sum(one.nodes for one in graphs)
    if len(graphs) < 2 or nodes <= first_nodes:
        return []
    where = ", ".join(sorted({one.path.partition("[")[0] for one in scalars}))
    modules = tuple({one.module for one in scalars if one.module})
    size = saved_bytes(one.tensor for one in scalars)
    words = f"the graphs of earlier steps, {nodes - first_nodes:,} nodes more with every one"
    return [kept_graph_trap(f"{where} holds {words}", size, modules)]


def kept_graph_trap(what: str, size: int, modules: tuple[str, ...] = ()) -> Trap:
    """The trap of losses that are summed or listed with their graphs, which hold ``size`` bytes."""
    held = f"{format_bytes(size)} of saved tensors in them" if size else "their saved tensors a backward released"
    return Trap(
        name=KEPT_GRAPH,
        what=f"{what}; {held}",
        modules=modules,
        bytes=size,
        cure="add up numbers, not tensors with a graph: total += loss.item() (or loss.detach())",
    )
