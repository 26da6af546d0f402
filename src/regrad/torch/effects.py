"""Which module calls change an object that they are given, such as a cache that grows. Found by comparing before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_DEPTH = 4


def token(value: Any, depth: int = _DEPTH) -> Any:
    """A comparable summary of ``value``: tensors and modules by identity, containers and plain objects by content.

    It holds no reference to a tensor: a watch must not keep alive what it watches.
    """
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    if isinstance(value, (torch.Tensor, nn.Module)) or callable(value) or depth == 0:
        return id(value)
    if isinstance(value, Mapping):
        return (type(value).__name__, tuple((repr(k)[:80], token(v, depth - 1)) for k, v in list(value.items())[:256]))
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        return (type(value).__name__, len(value), tuple(token(item, depth - 1) for item in list(value)[:256]))
    attributes = getattr(value, "__dict__", None)
    if attributes:
        return (id(value), tuple((name, token(item, depth - 1)) for name, item in attributes.items()))
    return id(value)


def _objects(args: Any, kwargs: Any) -> list[Any]:
    """Summaries of the arguments that are neither tensors nor plain values: caches and other holders of state."""
    return [
        token(value)
        for value in (*args, *kwargs.values())
        if not isinstance(value, (torch.Tensor, nn.Module, *_PLAIN)) and not callable(value)
    ]


class ArgumentWatch:
    """Watches the calls of some modules; ``changed`` holds (module name, which call) of those that change an argument."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.changed: set[tuple[str, int]] = set()
        self._counts: dict[str, int] = {}
        self._open: list[Any] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch while entered."""
        handles = []
        for name, module in model.named_modules():
            if name in self.names:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(self._leaving(name), with_kwargs=True, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open.append(_objects(args, kwargs))

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            before = self._open.pop()
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            if before != _objects(args, kwargs):
                self.changed.add((name, count))

        return leave
