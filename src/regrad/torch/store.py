"""Copies of a user's step, and the guard that leaves the user's own objects as they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils import _pytree as pytree

from regrad.core import trace as tr
from regrad.core.errors import InvalidSubject
from regrad.torch.step import Step
from regrad.torch.values import keeps_values

_CONTAINERS = (list, dict, set)


class _Copy(FakeCopyMode):
    """Deep copies become fake, but for tensors that :func:`regrad.torch.values.keeps_values`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and id(args[0]) not in args[1]:
            tensor = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                if keeps_values(tensor):
                    own = args[1][id(tensor)] = tensor.detach().clone()
                    return own
        return super().__torch_function__(func, types, args, kwargs)


def fake_copy(step: Step, mode: FakeTensorMode) -> Step:
    """``step`` with every tensor fake: same classes, same aliasing, no bytes. The user's objects are not touched."""
    with _Copy(mode):
        return _copied(step)


def real_copy(step: Step) -> Step:
    """``step`` with copies of all its tensors: as many bytes again as the step holds."""
    return _copied(step)


def _copied(step: Step) -> Step:
    gradients = {id(p): p.grad for p in step.model.parameters() if p.grad is not None}
    memo: dict[int, Any] = {}
    model, batch, optimizer = copy.deepcopy((step.model, step.batch, step.optimizer), memo)
    for old, new in zip(step.model.parameters(), model.parameters(), strict=True):
        if id(old) in gradients:
            # Parameter's own deepcopy leaves .grad out, and a kept gradient is part of the steady state.
            new.grad = copy.deepcopy(gradients[id(old)], memo)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType):
                vars(module)[name] = rebound(value, memo)
        for table in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(table.items()):
                table[key] = rebound(hook, memo)
    return Step(model, batch, rebound(step.loss, memo), optimizer, gradients=step.gradients)


def rebound(function: Any, memo: dict[int, Any]) -> Any:
    """``function`` with what it closes over replaced by its copy in ``memo``, where there is one.

    A deep copy shares functions, so one that closes over the user's model would run the user's weights.
    """
    if isinstance(function, MethodType):
        owner = memo.get(id(function.__self__))
        return function if owner is None else MethodType(function.__func__, owner)
    if not isinstance(function, FunctionType):
        return function
    closure, defaults = function.__closure__ or (), function.__defaults__ or ()
    keywords = function.__kwdefaults__ or {}
    held = [*map(_content, closure), *defaults, *keywords.values()]
    copies = [memo.get(id(value)) or rebound(value, memo) for value in held]
    if all(copy_ is value for copy_, value in zip(copies, held, strict=True)):
        return function
    cells = tuple(
        cell if copy_ is _content(cell) else CellType(copy_) for cell, copy_ in zip(closure, copies, strict=False)
    )
    after = len(closure) + len(defaults)
    new_defaults = tuple(copies[len(closure) : after]) or None
    new = FunctionType(function.__code__, function.__globals__, function.__name__, new_defaults, cells or None)
    new.__kwdefaults__ = dict(zip(keywords, copies[after:], strict=True)) or None
    vars(new).update(vars(function))
    return new


_EMPTY = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


@contextmanager
def own_gradients(step: Step) -> Iterator[None]:
    """Hold the user's ``.grad``s back while a copy runs, and refuse a step that reached the user's own model.

    That happens where the loss takes the model from a global name and not from its argument.
    """
    held = [(parameter, parameter.grad) for parameter in step.model.parameters()]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        reached = any(parameter.grad is not None for parameter, _ in held)
        for parameter, gradient in held:
            parameter.grad = gradient
    if reached:
        raise InvalidSubject(
            f"running a copy of {type(step.model).__name__} gave gradients to the model itself: the loss, a hook or a "
            "replaced forward uses the model by a global name. Let loss(model, batch) use the model that it is given."
        )


def persistent_tensors(step: Step) -> Iterator[tuple[torch.Tensor, str]]:
    """Every tensor that is there before the step, with its category: weights first, then what aliases none of them."""
    for parameter in step.model.parameters():
        yield parameter, tr.WEIGHTS
    for parameter in step.model.parameters():
        if parameter.grad is not None:
            yield parameter.grad, tr.GRADIENTS
    if step.optimizer is not None:
        for state in step.optimizer.state.values():
            for leaf in pytree.tree_leaves(state):
                if isinstance(leaf, torch.Tensor):
                    yield leaf, tr.OPTIMIZER_STATE
        for group in step.optimizer.param_groups:
            for leaf in pytree.tree_leaves({key: value for key, value in group.items() if key != "params"}):
                if isinstance(leaf, torch.Tensor):
                    yield leaf, tr.OPTIMIZER_STATE
    for buffer in step.model.buffers():
        yield buffer, tr.BUFFERS
    for module in step.model.modules():
        for value in vars(module).values():
            for leaf in pytree.tree_leaves(value) if isinstance(value, (torch.Tensor, list, tuple)) else ():
                if isinstance(leaf, torch.Tensor):
                    yield leaf, tr.BUFFERS
    for leaf in pytree.tree_leaves(step.batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf, tr.INPUTS


def persistent_bytes(step: Step) -> int:
    """Bytes of the distinct storages of :func:`persistent_tensors`."""
    sizes: dict[int, int] = {}
    for tensor, _ in persistent_tensors(step):
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


@contextmanager
def untouched(step: Step) -> Iterator[None]:
    """Bring back, on the way out, whatever running *copies* of ``step`` can reach of the user's own state.

    Copies own their tensors and attributes. What they still share with the user's objects are the process's generators
    and modes, and the plain containers that hooks and the loss close over.
    """
    states = generators()
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    kept = [(box, copy.copy(box)) for box in _shared_containers(step)]
    try:
        yield
    finally:
        set_generators(states)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        for box, before in kept:
            _refill(box, before)


def generators() -> tuple[Any, ...]:
    """The states of the process's generators: Python's, NumPy's, torch's on CPU and on every CUDA device."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), _numpy_state(), torch.get_rng_state(), cuda


def set_generators(states: tuple[Any, ...]) -> None:
    """Bring back what :func:`generators` gave."""
    python, numpy_state, torch_cpu, cuda = states
    random.setstate(python)
    _set_numpy_state(numpy_state)
    torch.set_rng_state(torch_cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


def _numpy_state() -> Any:
    import numpy

    return numpy.random.get_state()


def _set_numpy_state(state: Any) -> None:
    import numpy

    numpy.random.set_state(state)


def python_draws() -> tuple[Any, ...]:
    """The states of Python's and NumPy's global generators, comparable by ``==``."""
    name, keys, position, has_gauss, gauss = _numpy_state()
    return random.getstate(), (name, keys.tobytes(), position, has_gauss, gauss)


def _shared_containers(step: Step) -> list[Any]:
    """Lists, dicts and sets that functions of the step close over: deepcopy shares functions, so copies write into them."""
    functions = [step.loss]
    for module in step.model.modules():
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            functions += list(table.values())
        functions += [value for value in vars(module).values() if callable(value) and not isinstance(value, nn.Module)]
    for parameter in step.model.parameters():
        functions += list((getattr(parameter, "_backward_hooks", None) or {}).values())
    found: dict[int, Any] = {}
    for function in functions:
        for cell in getattr(function, "__closure__", None) or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if isinstance(value, _CONTAINERS):
                found[id(value)] = value
    return list(found.values())


def _refill(box: Any, before: Any) -> None:
    if isinstance(box, list):
        box[:] = before
    elif box != before or isinstance(box, dict):
        box.clear()
        box.update(before)
