"""All state at one moment as a table of comparable values: two steps are the same there if and only if the tables are.

A key is (slot, aspect). The aspect "value" is numbers, contents, shapes; "bytes" a digest of a whole storage; "identity"
is which object stands there and which storage it shares, told by names that both steps have in common: "what
`buffer a.scale` was at the start", or "new".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from regrad.torch.audit.names import Named, Names, object_word
from regrad.torch.audit.world import World, digest_of, generators
from regrad.torch.regions import ambient
from regrad.torch.regions.discover import boxes as bx
from regrad.torch.regions.discover import sources
from regrad.torch.regions.entry import plain_array, version_of
from regrad.torch.regions.watch import storage_key

Key = tuple[str, str]
Table = dict[Key, Any]
VALUE, IDENTITY, BYTES = "value", "identity", "bytes"
_PLAIN = (type(None), bool, int, str, bytes, complex, range, slice, torch.dtype, torch.device, torch.Size, torch.layout)
GENERATOR_NAMES = {
    id(sources.CPU): "torch's CPU generator",
    id(sources.CUDA): "torch's CUDA generators",
    id(sources.PYTHON): "Python's random generator",
    id(sources.NUMPY): "NumPy's random generator",
}


class _Part:
    """What one box says: plain entries, and (slot, tensor) of the tensors in it."""

    __slots__ = ("named", "tensors", "values")

    def __init__(self, named: Named, name_of: Callable[[Any], str]) -> None:
        self.named = named
        self.say(name_of)

    def say(self, name_of: Callable[[Any], str]) -> None:
        """Look at the box again."""
        self.values: Table = {}
        self.tensors: list[tuple[str, torch.Tensor]] = []
        named, how = self.named, self.named.how
        if named.kind == "module":
            return
        if how.keyed or isinstance(how, bx.SlotsBox) or how in (bx.CELL, bx.NAME, bx.CLASS):
            for slot, value in named.elements():
                if value is not bx.MISSING:
                    self.values[slot, VALUE], self.values[slot, IDENTITY] = self._describe(slot, value, name_of)
            if how.keyed and named.kind == "entry":
                path = f"dict {named.path}"
                self.values[path, VALUE] = tuple(self._describe(path, key, name_of) for key in named.token[0])
            return
        slot = f"{how.word} {named.path}"
        values = how.values(named.token) if how is not bx.BYTES else (bytes(named.token),)
        said = [self._describe(f"tensor {named.path}[{i}]", value, name_of) for i, value in enumerate(values)]
        if how is bx.SET:
            said.sort(key=repr)
        self.values[slot, VALUE] = tuple(value for value, _ in said)
        self.values[slot, IDENTITY] = tuple(same for _, same in said)

    def _describe(self, slot: str, value: Any, name_of: Callable[[Any], str]) -> tuple[Any, Any]:
        """(value, identity) of an element; a tensor is told apart, since it changes without its box."""
        if isinstance(value, _PLAIN):
            return (type(value).__name__, repr(value)), None
        if isinstance(value, float):
            return ("float", value.hex()), None
        if isinstance(value, torch.Tensor):
            self.tensors.append((slot, value))
            return "tensor", name_of(value)
        if type(value) is tuple:
            parts = [self._describe(f"{slot}[{i}]", part, name_of) for i, part in enumerate(value)]
            return tuple(part for part, _ in parts), tuple(same for _, same in parts)
        return type(value).__qualname__, name_of(value)


class Surveyor:
    """Makes tables of one world. Storages and objects of the start keep their names; what comes later is "new".

    Between two surveys little changes. So the boxes of the last one are compared by identity first, and the walk is
    done again only if another object than a plain value or a tensor came or went.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        names = Names(world.step, world.found)
        self.paths = names.paths
        self.storages: dict[int, str] = {}
        for slot, tensor in names.tensors:
            key = storage_key(tensor)
            if key is not None:
                self.storages.setdefault(key, slot)
        alive = _alive(names)
        self._objects = {id(value): path for value, path in alive}
        self._keep = [value for value, _ in alive]  # an id stands for its object as long as that lives
        self._digests: dict[int, tuple[Any, str]] = {}
        self._thorough = True
        self._parts: list[_Part] | None = None
        self._loose: list[tuple[str, torch.Tensor]] = []
        self._rest: list[tuple[Key, Callable[[], Any]]] = []

    def table(self, *, thorough: bool = False) -> Table:
        """Everything now. If ``thorough`` the walk is done, and parameters are read whatever their version counter says."""
        self._thorough = thorough
        if thorough or not self._refreshed():
            self._walked()
        assert self._parts is not None
        table: Table = {}
        tensors: list[tuple[str, torch.Tensor]] = []
        for part in self._parts:
            table.update(part.values)
            tensors += part.tensors
        self._tensors(tensors + self._loose, table)
        for key, look in self._rest:
            table[key] = look()
        for slot, alias, _ in self.world.hidden.values():
            table[slot, BYTES] = digest_of(alias)
        table.update(ambient_table())
        for index, (hooks, _) in enumerate(self.world.hooks):
            if hooks:
                table[f"hooks, table {index}", VALUE] = len(hooks)
        return table

    def _walked(self) -> None:
        found = self.world.find()
        names = Names(self.world.step, found)
        self._parts = [_Part(named, self._name) for named in names.boxes]
        boxed = {id(tensor) for part in self._parts for _, tensor in part.tensors}
        self._loose = [(slot, tensor) for slot, tensor in names.tensors if id(tensor) not in boxed]
        self._rest = [
            ((f"array {names.paths.get(id(one), 'without a name')}", VALUE), partial(_array_digest, one))
            for one in found.arrays
            if plain_array(one)
        ]
        self._rest += [
            ((generator_slot(one, names.paths), VALUE), partial(_generator_digest, one)) for one in generators(found)
        ]

    def _refreshed(self) -> bool:
        """Bring the parts up to date without a walk, if that can be."""
        if self._parts is None:
            return False
        moved = [part for part in self._parts if not part.named.how.same(part.named.box, part.named.token)]
        tokens = [part.named.how.take(part.named.box) for part in moved]
        for part, token in zip(moved, tokens, strict=True):
            how = part.named.how
            before, after = how.values(part.named.token), how.values(token)
            kept = {id(value) for value in before} & {id(value) for value in after}
            if any(id(value) not in kept and not _is_leaf(value) for value in (*before, *after)):
                return False
        for part, token in zip(moved, tokens, strict=True):
            part.named.token = token
            part.say(self._name)
        return True

    def forget(self) -> None:
        """Let go of what the last survey saw."""
        self._parts, self._loose, self._rest = None, [], []

    def _name(self, value: Any) -> str:
        return self._objects.get(id(value), "new")

    def _tensors(self, tensors: list[tuple[str, torch.Tensor]], table: Table) -> None:
        first: dict[int, str] = {}
        for slot, tensor in tensors:
            owner = storage_key(tensor) or id(tensor)
            first[owner] = min(slot, first.get(owner, slot))
        present: dict[int, torch.Tensor] = {}
        for slot, tensor in tensors:
            key = storage_key(tensor)
            shape = (str(tensor.dtype), tuple(tensor.shape), str(tensor.device), tensor.requires_grad, tensor.is_leaf)
            table[slot, VALUE] = shape
            where = self.storages.get(key or 0)
            if where is None or key not in self.world.bytes:
                table[slot, IDENTITY] = (self._name(tensor), f"new, of {first[key or id(tensor)]}", tensor.stride())
                table[slot, BYTES] = digest_of(tensor)
            else:
                table[slot, IDENTITY] = (self._name(tensor), where, tensor.stride(), tensor.storage_offset())
                present.setdefault(key or 0, tensor)
        for key, tensor in present.items():
            table[self.storages[key], BYTES] = self._digest(key, tensor)

    def _digest(self, key: int, tensor: torch.Tensor) -> str:
        """Of the whole storage of a tensor that was there at the start: a view of it may show less."""
        alias = self.world.bytes[key][0]
        if not (tensor.requires_grad and tensor.is_leaf):
            return digest_of(alias)
        sign = (version_of(tensor), tensor.data_ptr())
        known = self._digests.get(key)
        if known is None or known[0] != sign or self._thorough:
            known = self._digests[key] = (sign, digest_of(alias))
        return known[1]


def _is_leaf(value: Any) -> bool:
    """Whether nothing is behind a value: a plain one, or a tensor without attributes."""
    return isinstance(value, (*_PLAIN, float)) or (isinstance(value, torch.Tensor) and not value.__dict__)


def _alive(names: Names) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    for named in names.boxes:
        for value in named.how.values(named.token):
            if id(value) in names.paths:
                found.append((value, names.paths[id(value)]))
    return found + [(tensor, slot) for slot, tensor in names.tensors]


def generator_slot(source: sources.Source, paths: dict[int, str]) -> str:
    """What a generator is called."""
    if id(source) in GENERATOR_NAMES:
        return GENERATOR_NAMES[id(source)]
    one = source.generator  # type: ignore[attr-defined]
    return f"{object_word(one)} {paths.get(id(one), 'that no name leads to')}"


def frozen(state: Any) -> str:
    """A digest of a generator's state."""
    if isinstance(state, torch.Tensor):
        return digest_of(state)
    if isinstance(state, list):
        return ",".join(map(frozen, state))
    raw = state if isinstance(state, bytes) else repr(state).encode()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def _array_digest(array: Any) -> str:
    return frozen(array.tobytes())


def _generator_digest(source: sources.Source) -> str:
    return frozen(source.get())


def ambient_table() -> Table:
    """The modes of the process."""
    values = {word: repr(get()) for word, get, _ in ambient.SWITCHES}
    values["grad mode"] = repr(torch.is_grad_enabled())
    values["deterministic algorithms"] = repr(ambient.deterministic())
    for device, state in zip(ambient.DEVICES, ambient.autocast(), strict=True):
        values[f"autocast on {device}"] = repr(state)
    return {(word, VALUE): value for word, value in values.items()}


def gradients(world: World) -> Table:
    """``.grad`` of every leaf that has a name."""
    names = Names(world.step, world.find())
    table: Table = {}
    for slot, tensor in names.tensors:
        if tensor.is_leaf and tensor.requires_grad:
            gradient = tensor.grad
            said = None if gradient is None else (str(gradient.dtype), tuple(gradient.shape), digest_of(gradient))
            table[f"gradient of {slot.removeprefix('parameter ')}", VALUE] = said
    return table


def show(value: Any) -> str:
    """A value of a table, short."""
    if value is None:
        return "none"
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], str):
        return value[1] if value[0] != "float" else repr(float.fromhex(value[1]))
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
