"""What a module call does besides computing tensors: attributes that it changes, objects among its arguments that it
changes, numbers that it draws from Python's or NumPy's generator. Found by comparing before and after one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regrad.torch.store import python_draws

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODULE_INTERNALS = {
    "_parameters", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook", "forward",
    *_HOOK_TABLES, "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
}  # fmt: skip
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


def _attributes(module: nn.Module) -> dict[str, Any]:
    found = {}
    for path, inner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(inner).items():
            if name == "_buffers":
                found.update({prefix + key: id(buffer) for key, buffer in value.items()})
            elif name not in _MODULE_INTERNALS:
                found[prefix + name] = token(value)
    return found


def _objects(args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments that are neither tensors nor plain values: caches and other holders of state."""
    named = {f"argument {i}": value for i, value in enumerate(args)} | {f"argument {k!r}": v for k, v in kwargs.items()}
    return {
        f"{name} ({type(value).__name__})": token(value)
        for name, value in named.items()
        if not isinstance(value, (torch.Tensor, nn.Module, *_PLAIN)) and not callable(value)
    }


class EffectWatch:
    """Watches the calls of some modules; ``found`` maps (module name, which call) to the first effect, in words."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.found: dict[tuple[str, int], str] = {}
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
        self._open.append((_attributes(module), _objects(args, kwargs), python_draws()))

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            attributes, objects, draws = self._open.pop()
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            effect = _first_change("it changes the attribute", attributes, _attributes(module))
            effect = effect or _first_change("it changes its", objects, _objects(args, kwargs))
            for which, old, new in zip(("Python", "NumPy"), draws, python_draws(), strict=True):
                if not effect and old != new:
                    effect = f"it draws from {which}'s random generator"
            if effect:
                self.found[name, count] = effect

        return leave


def _first_change(words: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    for name in [*after, *(name for name in before if name not in after)]:
        if before.get(name) != after.get(name):
            return f"{words} {name}"
    return ""


def inner_hooks(module: nn.Module) -> str:
    """The first module inside ``module`` with a hook of the user's, which would fire again in a replay; "" if none."""
    for name, inner in module.named_modules():
        if name and any(getattr(inner, table) for table in _HOOK_TABLES):
            return f"a hook is registered on {name} inside it, which would fire again"
    return ""
