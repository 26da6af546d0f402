"""The modes that one recorded call ran under, shared by all calls that ran under the same ones; and generators."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from regrad.torch.regions.ambient import GETTERS, autocast, deterministic, dispatch_modes, enter, unseen

_C: Any = torch._C
_dispatch_depth, _any_autocast = _C._len_torch_dispatch_stack, _C._is_any_autocast_enabled
_READ = (
    torch.is_grad_enabled, _C._get_deterministic_algorithms, *GETTERS, _C._get_deterministic_algorithms_warn_only,
)  # fmt: skip


class Setting:
    """What was in force: grad mode, switches, determinism, autocast, dispatch modes."""

    __slots__ = ("autocast", "deterministic", "grad", "modes", "switches")

    def __init__(self, switches: Any, deterministic: Any, autocast: Any, grad: bool, modes: tuple[Any, ...]) -> None:
        self.switches, self.deterministic, self.autocast = switches, deterministic, autocast
        self.grad, self.modes = grad, modes

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put it in force, and bring the present back."""
        with ExitStack() as stack:
            enter(stack, self.switches, self.deterministic, self.autocast)
            stack.enter_context(dispatch_modes(self.modes))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


class Settings:
    """Gives the :class:`Setting` of now; the last one again while nothing changed."""

    def __init__(self) -> None:
        self._key: Any = None
        self._few: Any = None
        self._last: Setting | None = None

    def now(self, *, few: bool = False) -> Setting:
        """What is in force now. ``few``: the call that asks heeds only the grad mode, default dtype and threads."""
        plain = not (_dispatch_depth() or _any_autocast())
        heeded = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(), plain)
        last = self._last
        if few and plain and last is not None and heeded == self._few:
            return last
        key = [get() for get in _READ]
        modes = tuple(dispatch._get_current_dispatch_mode_stack()) if _dispatch_depth() else ()
        if _any_autocast():
            key += autocast()
        if last is None or key != self._key or modes or last.modes:
            self._key = key
            last = self._last = Setting(tuple(key[2 : len(_READ) - 1]), deterministic(), autocast(), key[0], modes)
        self._few = heeded
        return last


_GENERATOR = torch.default_generator


def generator_state(generators: list[torch.Generator]) -> tuple[Any, ...]:
    """The states of torch's global generators and of ``generators``, comparable by ``==``."""
    cuda = None
    if torch.cuda.is_initialized():
        cuda = tuple([_bytes(state) for state in torch.cuda.get_rng_state_all()])
    return (_bytes(_GENERATOR.get_state()), cuda, *[_bytes(one.get_state()) for one in generators])


def set_generator_state(state: tuple[Any, ...], generators: list[torch.Generator]) -> None:
    """Bring back what :func:`generator_state` gave for the same ``generators``."""
    _GENERATOR.set_state(_tensor(state[0]))
    if state[1] is not None:
        torch.cuda.set_rng_state_all([_tensor(one) for one in state[1]])
    for generator, one in zip(generators, state[2:], strict=True):
        generator.set_state(_tensor(one))


def state_bytes(state: tuple[Any, ...]) -> int:
    """Bytes of a state."""
    return len(state[0]) + sum(map(len, state[1] or ())) + sum(map(len, state[2:]))


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(state: bytes) -> torch.Tensor:
    with unseen():
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)
