"""The modes around a call: what a replay must run under, wherever and whenever the backward runs."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch

_C: Any = torch._C
DEVICES = ("cpu", "cuda")


def _switches() -> list[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    pairs: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
        ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        ("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        ("number of threads", torch.get_num_threads, torch.set_num_threads),
    ]
    for word, getter, setter in (
        ("math attention backend", "_get_math_sdp_enabled", "_set_sdp_use_math"),
        ("flash attention backend", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
        ("memory-efficient attention backend", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
        ("cuDNN attention backend", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
        ("overridable attention backend", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
        ("cuDNN", "_get_cudnn_enabled", "_set_cudnn_enabled"),
        ("cuDNN benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
        ("cuDNN determinism", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
        ("oneDNN", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ):
        if hasattr(_C, getter) and hasattr(_C, setter):
            pairs.append((word, getattr(_C, getter), getattr(_C, setter)))
    return pairs


SWITCHES = _switches()
"""Settings of torch: a word, what reads it, what sets it."""
GETTERS = tuple(get for _, get, _ in SWITCHES)


class Ambient:
    """The modes as they are now."""

    __slots__ = ("autocast", "context", "deterministic", "dispatch_modes", "function_modes", "switches")

    def __init__(self) -> None:
        self.switches = tuple([get() for get in GETTERS])
        self.deterministic = deterministic()
        self.autocast = autocast()
        self.context = contextvars.copy_context()
        self.function_modes = tuple(_get_current_function_mode_stack())
        self.dispatch_modes: tuple[Any, ...] = ()
        if _C._len_torch_dispatch_stack():
            self.dispatch_modes = tuple(dispatch._get_current_dispatch_mode_stack())

    @property
    def modes(self) -> tuple[Any, ...]:
        """The mode objects that were active: they may hold state themselves."""
        return self.function_modes + self.dispatch_modes

    def run(self, body: Callable[[], Any]) -> Any:
        """Call ``body`` with these modes and gradients on, and leave the present's modes as they were."""

        def inside() -> Any:
            with self._entered():
                return body()

        return self.context.copy().run(inside)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            enter(stack, self.switches, self.deterministic, self.autocast)
            stack.enter_context(function_modes(self.function_modes))
            stack.enter_context(dispatch_modes(self.dispatch_modes))
            stack.enter_context(torch.enable_grad())
            yield


def enter(stack: ExitStack, switches: Any, determinism: Any, casts: Any) -> None:
    """Put switches, determinism and autocast in force until ``stack`` ends, as :data:`GETTERS`, :func:`deterministic` and
    :func:`autocast` gave them. Autocast's cache of weights stays off: what is cast in a replay is not the user's."""
    for (_, get, put), wanted in zip(SWITCHES, switches, strict=True):
        now = get()
        if now != wanted:
            put(wanted)
            stack.callback(put, now)
    if deterministic() != determinism:
        stack.callback(set_deterministic, deterministic())
        set_deterministic(determinism)
    for (enabled, dtype), (active, _), device in zip(casts, autocast(), DEVICES, strict=True):
        if enabled or active:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))


def autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    """Whether autocast is on and to which type, for each of ``DEVICES``."""
    return tuple([(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES])


def deterministic() -> tuple[bool, bool]:
    """Whether deterministic algorithms are asked for, and whether only with a warning."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def set_deterministic(wanted: tuple[bool, bool]) -> None:
    """Ask for what :func:`deterministic` gave."""
    torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])


@contextmanager
def function_modes(wanted: tuple[Any, ...]) -> Iterator[None]:
    """Exactly these function modes, in place of those that are active."""
    now = tuple(_get_current_function_mode_stack())
    if len(now) == len(wanted) and all(a is b for a, b in zip(now, wanted, strict=True)):
        yield
        return
    for _ in now:
        _pop_mode()
    for mode in wanted:
        _push_mode(mode)
    try:
        yield
    finally:
        while _get_current_function_mode_stack():
            _pop_mode()
        for mode in now:
            _push_mode(mode)


@contextmanager
def dispatch_modes(wanted: tuple[Any, ...]) -> Iterator[None]:
    """Exactly these dispatch modes, in place of those that are active."""
    now = tuple(dispatch._get_current_dispatch_mode_stack()) if _C._len_torch_dispatch_stack() else ()
    if len(now) == len(wanted) and all(a is b for a, b in zip(now, wanted, strict=True)):
        yield
        return
    for _ in now:
        dispatch._pop_mode()
    for mode in wanted:
        dispatch._push_mode(mode)
    try:
        yield
    finally:
        while _C._len_torch_dispatch_stack():
            dispatch._pop_mode()
        for mode in now:
            dispatch._push_mode(mode)


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the library's own operations from the user's modes."""
    with _C.DisableTorchFunction(), _C._DisableTorchDispatch():
        yield


def modes_active() -> bool:
    """Whether some mode would see an operation now."""
    return bool(_C._len_torch_dispatch_stack() or _C._len_torch_function_stack())
