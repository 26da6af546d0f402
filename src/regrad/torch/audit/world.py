"""Everything that a step can reach, kept as it is and put back: the user's own objects are what an audit runs on.

Copies would not do: state in closures and globals is shared between an object and its copy. So before the first run all
that the walk of :mod:`regrad.torch.regions.discover` reaches is copied (one copy of every reachable byte), and after each
run it is put back, by the same boxes that put a replay's state back.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from typing import Any

import torch

from regrad.torch.regions import ambient
from regrad.torch.regions.discover import boxes as bx
from regrad.torch.regions.discover import sources
from regrad.torch.regions.discover.names import Reach
from regrad.torch.regions.discover.tensors import set_versions
from regrad.torch.regions.discover.walk import Found, walk
from regrad.torch.regions.effects import file_position, position
from regrad.torch.regions.entry import fill, plain_array, version_of
from regrad.torch.regions.watch import storage_key
from regrad.torch.step import Step


class NoSnapshot(Exception):
    """Something of the step cannot be copied and put back; the message names it."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage as a tensor with a version counter of its own."""
    with ambient.unseen(), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def digest_of(data: torch.Tensor) -> str:
    """A digest of the elements, one by one in order: equal only if every bit is (up to a chance of 2**-128)."""
    with ambient.unseen(), torch.no_grad():
        plain = data.detach()
        if plain.layout != torch.strided:
            plain = plain.to_dense()
        plain = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        raw: Any = memoryview(plain.view(torch.uint8).numpy()) if plain.numel() else b""  # type: ignore[arg-type]
        return hashlib.blake2b(raw, digest_size=16).hexdigest()


def generators(found: Found) -> list[sources.Source]:
    """The process's own generators and those that the walk found."""
    own: list[sources.Source] = [sources.CPU, sources.PYTHON]
    if torch.cuda.is_initialized():
        own.append(sources.CUDA)
    if "numpy" in sys.modules:
        own.append(sources.NUMPY)
    return own + [sources.source_of(one) for one in found.generators]


def hook_tables(step: Step) -> list[Any]:
    """The tables of hooks of every module: some libraries fill them at the first call, and keep a flag of it."""
    return [
        table
        for module in step.model.modules()
        for name, table in vars(module).items()
        if name.startswith(("_forward_", "_backward_")) and isinstance(table, OrderedDict)
    ]


class _Tensor:
    """One tensor object: where its data lie, its flags and its ``.grad``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        with ambient.unseen(), torch.no_grad():
            self.data = tensor.data
        self.place = _place(tensor)
        self.requires_grad, self.leaf = tensor.requires_grad, tensor.is_leaf
        self.gradient = tensor.grad if tensor.is_leaf else None

    def put(self) -> None:
        tensor = self.tensor
        with ambient.unseen(), torch.no_grad():
            if self.leaf and not tensor.is_leaf:
                tensor.detach_()
            if _place(tensor) != self.place:
                tensor.data = self.data
        if tensor.is_leaf and tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if tensor.is_leaf and tensor.grad is not self.gradient:
            tensor.grad = self.gradient


def _place(tensor: torch.Tensor) -> Any:
    if tensor.layout != torch.strided:
        return id(tensor)
    return storage_key(tensor), tensor.storage_offset(), tensor.size(), tensor.stride()


class World:
    """The reachable state of one step. ``hidden`` is what only operations showed (see :mod:`tape`)."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.reach = Reach()
        self.hidden: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        found = self.find()
        _check(found)
        self.found = found
        self.tensors = [_Tensor(tensor) for tensor in found.tensors if tensor.layout == torch.strided]
        gradients = [one.gradient for one in self.tensors if one.gradient is not None]
        self.tensors += [_Tensor(gradient) for gradient in gradients]
        self.bytes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for one in self.tensors:
            key = storage_key(one.tensor)
            if key is not None and key not in self.bytes:
                alias = flat(one.tensor)
                self.bytes[key] = (alias, alias.clone())
        self.versioned = [one.tensor for one in self.tensors if version_of(one.tensor) >= 0]
        self.versions = [version_of(tensor) for tensor in self.versioned]
        self.hooks = [(table, bx.ORDERED.take(table)) for table in hook_tables(step)]
        self.arrays = [(array, array.tobytes()) for array in found.arrays if plain_array(array)]
        self.generators = [(source, source.get()) for source in generators(found)]
        self.iterators = [(one, position(one)) for one in found.iterators]
        self.files = [(one, file_position(one)) for one in found.files]
        self.caches = [(one, one.cache_info()) for one in found.caches]
        self.switches = [get() for get in ambient.GETTERS]
        self.grad_mode = torch.is_grad_enabled()
        self.autocast = ambient.autocast()

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that are held."""
        return sum(copy.nbytes for _, copy in self.bytes.values()) + sum(len(data) for _, data in self.arrays)

    def find(self) -> Found:
        """What can be reached now."""
        step = self.step
        optimizer = step.optimizer
        state = () if optimizer is None else (optimizer.state, optimizer.param_groups, optimizer)
        return walk(self.reach, (step.model, step.batch, step.loss, *state))

    def hide(self, key: int, slot: str, alias: torch.Tensor, before: torch.Tensor) -> None:
        """A storage that the walk does not reach is written by the step; ``before`` is what stood there at the start."""
        if key not in self.bytes:
            self.hidden[key] = (slot, alias, before)

    def put_back(self) -> str:
        """Bring everything to the start; returns what could not be brought back, "" if all was."""
        for how, box, token in self.found.boxes:
            if not how.same(box, token):
                how.put(box, token)
        for table, token in self.hooks:
            if not bx.ORDERED.same(table, token):
                bx.ORDERED.put(table, token)
        for one in self.tensors:
            one.put()
        with ambient.unseen(), torch.no_grad():
            for alias, copy in [*self.bytes.values(), *((alias, copy) for _, alias, copy in self.hidden.values())]:
                if alias.untyped_storage().nbytes() != copy.nbytes:
                    alias.untyped_storage().resize_(copy.nbytes)
                if not torch.equal(alias, copy):
                    alias.copy_(copy)
        for array, data in self.arrays:
            if array.tobytes() != data:
                fill(array, data)
        for source, state in self.generators:
            source.bring(state)
        set_versions(self.versioned, self.versions)
        for (_, get, put), wanted in zip(ambient.SWITCHES, self.switches, strict=True):
            if get() != wanted:
                put(wanted)
        torch.set_grad_enabled(self.grad_mode)
        for device, (enabled, dtype) in zip(ambient.DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        return self._lost()

    def _lost(self) -> str:
        for iterator, before in self.iterators:
            if position(iterator) != before:
                return f"it consumes an iterator ({type(iterator).__name__}), which cannot be wound back"
        for file, at in self.files:
            if file_position(file) != at:
                return f"it uses the file {getattr(file, 'name', file)!r}, which cannot be put back"
        return ""

    def filled_caches(self) -> list[str]:
        """Functions whose cache the runs filled; the entries stay."""
        return [one.__wrapped__.__qualname__ for one, info in self.caches if one.cache_info().misses != info.misses]


def _check(found: Found) -> None:
    if found.lazy:
        raise NoSnapshot("it has lazy parameters without a shape; run it once before the audit")
    for tensor in found.tensors:
        if storage_key(tensor) is None or tensor.device.type == "meta":
            raise NoSnapshot(
                f"it holds a {type(tensor).__name__} with layout {tensor.layout} on {tensor.device}, whose bytes cannot "
                "be copied and put back"
            )
