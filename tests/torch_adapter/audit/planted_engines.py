"""Checkpoints that forget something each, spelled as torch's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

Engine = Callable[..., Any]


def torchs(function: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own, run to its end: it brings back torch's generators and autocast, and no other state."""
    return checkpoint(function, *args, use_reentrant=False, early_stop=False, determinism_check="none", **kwargs)


def no_generator(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Forgets torch's generator."""
    return checkpoint(function, *args, use_reentrant=False, early_stop=False, preserve_rng_state=False, **kwargs)


def reentrant(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Forgets that gradients are on: the first run is under ``no_grad``."""
    return checkpoint(function, *args, use_reentrant=True, **kwargs)


def closed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Holds the arguments in a closure, where no version counter is looked at: forgets that one may change in place."""
    return torchs(lambda: function(*args, **kwargs))


def _twice(function: Any, args: Any, kwargs: Any, again: Callable[[Callable[[], Any]], Any]) -> Any:
    """torch's checkpoint, with ``again(run)`` in place of the second run."""
    runs = [0]

    def run(*inner: Any) -> Any:
        runs[0] += 1
        if runs[0] == 1:
            return function(*inner, **kwargs)
        return again(lambda: function(*inner, **kwargs))

    return torchs(run, *args)


def no_autocast(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Forgets autocast, in one block."""
    if not hasattr(function.__self__, "marked"):
        return torchs(function, *args, **kwargs)

    def again(run: Callable[[], Any]) -> Any:
        with torch.autocast("cpu", enabled=False):
            return run()

    return _twice(function, args, kwargs, again)


def other_copy(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Puts an equal copy where a buffer was."""
    module = function.__self__

    def again(run: Callable[[], Any]) -> Any:
        result = run()
        if hasattr(module, "constant"):
            module.constant = module.constant.clone()  # <- other copy
        return result

    return _twice(function, args, kwargs, again)


def left_at_entry(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Brings the state back to the entry for the replay, and forgets to bring the present back."""
    module = function.__self__
    state = getattr(module, "state", None)
    entry = None if state is None else state.clone()

    def again(run: Callable[[], Any]) -> Any:
        if state is not None:
            state.data.copy_(entry)
        result = run()
        if state is not None:
            state.data.copy_(entry)  # <- left at entry
        return result

    return _twice(function, args, kwargs, again)


def one_ulp(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives an output that is off by one unit in the last place, in one block."""
    out = torchs(function, *args, **kwargs)
    if not hasattr(function.__self__, "marked"):
        return out
    with torch.no_grad():
        off = torch.nextafter(out, torch.full_like(out, torch.inf)) - out
    return out + off  # <- one ulp


def gradient_twice(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds one gradient of one block twice."""
    module = function.__self__
    if hasattr(module, "marked"):

        def double(parameter: torch.Tensor) -> None:
            handle.remove()
            parameter.grad.add_(parameter.grad)  # <- gradient twice

        handle = module.linear.weight.register_post_accumulate_grad_hook(double)
    return torchs(function, *args, **kwargs)


KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "torch random": (lambda m: torch.get_rng_state(), lambda m, s: torch.set_rng_state(s)),
    "python random": (lambda m: random.getstate(), lambda m, s: random.setstate(s)),
    "numpy random": (lambda m: np.random.get_state(), lambda m, s: np.random.set_state(s)),
    "numpy generator": (
        lambda m: copy.deepcopy(m.rng.bit_generator.state),
        lambda m, s: setattr(m.rng.bit_generator, "state", s),
    ),
    "torch generator": (lambda m: m.gen.get_state(), lambda m, s: m.gen.set_state(s)),
    "running_mean": (lambda m: m.norm.running_mean.clone(), lambda m, s: m.norm.running_mean.data.copy_(s)),
    "running_var": (lambda m: m.norm.running_var.clone(), lambda m, s: m.norm.running_var.data.copy_(s)),
    "batches": (lambda m: m.norm.num_batches_tracked.clone(), lambda m, s: m.norm.num_batches_tracked.data.copy_(s)),
    "queue": (lambda m: m.queue.clone(), lambda m, s: m.queue.data.copy_(s)),
    "carry": (lambda m: m.carry.clone(), lambda m, s: m.carry.data.copy_(s)),
    "calls": (lambda m: m.calls, lambda m, s: setattr(m, "calls", s)),
    "seen": (lambda m: list(m.seen), lambda m, s: m.seen.__setitem__(slice(None), s)),
    "table": (lambda m: dict(m.table), lambda m, s: m.table.update(s)),
    "window": (lambda m: list(m.window), lambda m, s: (m.window.clear(), m.window.extend(s))),
    "kinds": (lambda m: set(m.kinds), lambda m, s: (m.kinds.clear(), m.kinds.update(s))),
}


def careful(forgotten: str | None) -> Engine:
    """Written for :class:`Everything`: brings back every kind of its state but one."""

    def engine(function: Any, *args: Any, **kwargs: Any) -> Any:
        module = function.__self__
        if not hasattr(module, "kinds"):
            return torchs(function, *args, **kwargs)
        known = {kind: how for kind, how in KINDS.items() if kind != forgotten}
        entry = {kind: take(module) for kind, (take, _) in known.items()}

        def again(run: Callable[[], Any]) -> Any:
            present = {kind: take(module) for kind, (take, _) in known.items()}
            for kind, (_, put) in known.items():
                put(module, entry[kind])
            result = run()
            for kind, (_, put) in known.items():
                put(module, present[kind])
            return result

        runs = [0]

        def body(*inner: Any) -> Any:
            runs[0] += 1
            return function(*inner, **kwargs) if runs[0] == 1 else again(lambda: function(*inner, **kwargs))

        return checkpoint(
            body, *args, use_reentrant=False, early_stop=False, preserve_rng_state=False, determinism_check="none"
        )

    return engine
