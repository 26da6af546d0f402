"""The arguments of a call, held so that a replay gets what the call got."""

from __future__ import annotations

from typing import Any

import torch

from regrad.core.errors import InvalidRegion, ModifiedArgument
from regrad.torch.regions.ambient import modes_active, unseen
from regrad.torch.regions.discover.tensors import memory_of
from regrad.torch.regions.entry import signature
from regrad.torch.regions.frames import Frame
from regrad.torch.regions.old import Old
from regrad.torch.regions.watch import has_memory, storage_key


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """The same data with no graph behind it, sharing the version counter: what may be held without a cycle."""
    kind = type(tensor)
    if kind is torch.nn.Parameter or (kind is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)):
        return tensor
    if kind is torch.Tensor and modes_active():
        with unseen():
            return tensor.detach()
    return tensor.detach()


class _Adopt(torch.autograd.Function):
    """Makes a tensor one that is no leaf, so that a region may change it in place as it changed its own argument."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


class Held:
    """One tensor argument that requires a gradient. Others are state like any other (see ``entry``)."""

    __slots__ = ("frame", "geometry", "key", "lent", "name", "old", "original", "requires_grad", "signature", "tensor")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.name = name
        self.original = tensor if tensor.is_leaf else None
        self.tensor: torch.Tensor | None = hold(tensor)
        self.requires_grad = tensor.requires_grad
        self.signature = signature(tensor)
        self.key = storage_key(tensor)
        self.old: Old | None = None
        self.lent: Any = None
        self.geometry: Any = None

    def copy_before(self) -> None:
        """The region is known to change it in place: keep what it is now."""
        if self.tensor is not None and has_memory(self.tensor):
            self.old = Old(self.tensor, whole=True)

    def changed(self) -> bool:
        """After the body: whether the region changed it."""
        assert self.tensor is not None
        now, before = signature(self.tensor), self.signature
        self.signature = now
        return now != before

    def settle(self, frame: Frame | None, key: tuple[int, int]) -> None:
        """The body has ended: let the enclosing region hold the tensor if there is one, and drop it here.

        A replay lends whatever its forward lent: there an argument may be a leaf that was none before.
        """
        assert self.tensor is not None
        tensor, wanted = self.tensor, frame is not None and frame.wants(key)
        if self.old is not None:
            self.geometry = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
            self.tensor = self.original = None
            if wanted:
                tensor = self._private_data({})
        if frame is not None and (wanted or (self.tensor is not None and self.original is None)):
            lent = frame.lend(key, tensor)
            if self.tensor is not None and self.original is None:
                self.lent, self.tensor = lent, None

    def give(self, region: str, privates: dict[int | None, torch.Tensor]) -> torch.Tensor:
        """The argument for a replay. ``privates`` shares one private storage between arguments that shared one."""
        if self.old is not None:
            return self._private(privates)
        if self.original is not None:
            tensor = self.original
        elif self.lent is not None:
            tensor = self.lent.borrow()
        else:
            assert self.tensor is not None
            tensor = self.tensor
        if self.lent is None:
            self._check(region, tensor)
        if self.original is None:
            tensor = hold(tensor)
            if tensor.requires_grad != self.requires_grad:
                tensor = tensor.detach().requires_grad_(self.requires_grad)
        return tensor

    def _check(self, region: str, tensor: torch.Tensor) -> None:
        if signature(tensor) == self.signature:
            return
        memory = memory_of(tensor)
        freed = memory.nbytes == 0 and tensor.numel() > 0
        what = "was freed" if freed else "was modified in place"
        raise ModifiedArgument(
            f"{self.name} {what} after it was kept for the replay",
            segment=region,
            thing=self.name,
            hint="Pass a copy (clone()), or change it after the backward.",
        )

    def _private_data(self, privates: dict[int | None, torch.Tensor]) -> torch.Tensor:
        assert self.old is not None
        offset, size, stride, dtype = self.geometry
        with unseen(), torch.no_grad():
            flat = privates.get(self.key)
            if flat is None:
                flat = privates[self.key] = self.old.kept.data.clone()
            return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), offset, size, stride)

    def _private(self, privates: dict[int | None, torch.Tensor]) -> torch.Tensor:
        data = self._private_data(privates)
        with unseen(), torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True)
            return _Adopt.apply(anchor, data)  # type: ignore[no-any-return, no-untyped-call]


class Arguments:
    """All arguments of a call, with the tensors that require gradients taken out into :class:`Held`.

    A tensor that is given twice is held once, and one object in the replay too: code may ask whether a query *is* its key.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.held: list[Held] = []
        seen: dict[int, Held] = {}
        self.args = tuple([self._take(value, f"argument {i}", seen) for i, value in enumerate(args)])
        self.kwargs = {name: self._take(value, f"argument `{name}`", seen) for name, value in kwargs.items()}

    def _take(self, value: Any, name: str, seen: dict[int, Held]) -> Any:
        if isinstance(value, torch.Tensor):
            _check_alive(value, name)
            if value.requires_grad:
                held = seen.get(id(value))
                if held is None:
                    held = seen[id(value)] = Held(value, name)
                    self.held.append(held)
                return held
            return value
        if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
            parts = [self._take(part, f"{name}[{i}]", seen) for i, part in enumerate(value)]
            if any(a is not b for a, b in zip(parts, value, strict=True)):
                return _Pack(type(value), tuple(parts))
        return value

    def roots(self) -> tuple[Any, ...]:
        """What the walk starts from: everything that is not held here."""
        found = [*self.args, *self.kwargs.values()]
        flat: list[Any] = []
        while found:
            value = found.pop()
            if isinstance(value, _Pack):
                found.extend(value.parts)
            elif not isinstance(value, Held):
                flat.append(value)
        return tuple(flat)

    def give(self, region: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for one replay."""
        given = _Given(region)
        return tuple(map(given.back, self.args)), {name: given.back(value) for name, value in self.kwargs.items()}

    def signature(self) -> tuple[Any, ...]:
        """What kind of call it is: types and plain values, not sizes."""
        return (*map(_kind, self.args), *((name, _kind(value)) for name, value in self.kwargs.items()))


class _Given:
    """The arguments of one replay: each held tensor is one object there, however often it was given."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.tensors: dict[int, torch.Tensor] = {}
        self.privates: dict[int | None, torch.Tensor] = {}

    def back(self, value: Any) -> Any:
        """``value`` with the tensors in place of what holds them."""
        if isinstance(value, Held):
            if id(value) not in self.tensors:
                self.tensors[id(value)] = value.give(self.region, self.privates)
            return self.tensors[id(value)]
        if isinstance(value, _Pack):
            parts = tuple(map(self.back, value.parts))
            return parts if value.kind is tuple else value.kind._make(parts)
        return value


class _Pack:
    """A tuple with tensors that are held."""

    __slots__ = ("kind", "parts")

    def __init__(self, kind: Any, parts: tuple[Any, ...]) -> None:
        self.kind, self.parts = kind, parts


def _kind(value: Any) -> Any:
    if isinstance(value, Held):
        assert value.tensor is not None
        return (value.tensor.dtype, value.tensor.dim(), True)
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.dim(), False)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return type(value)


def _check_alive(tensor: torch.Tensor, name: str) -> None:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
        return
    need = 0
    if tensor.numel():
        last = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
        need = int(tensor.storage_offset() + last + 1) * tensor.element_size()
    have = tensor.untyped_storage().nbytes()
    if have < need:
        raise InvalidRegion(
            f"{name} needs {need:,} bytes of its storage, which has {have:,}: it was freed or resized before the call"
        )
