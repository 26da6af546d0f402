"""Settings of regions: which state is looked for, how replays are checked, how large state is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from regrad.core.errors import InvalidRegion

GUARDS = ("first", "always", "off")
ENGINES = ("auto", "snapshot", "journal", "read_set", "guarded")


@dataclass(frozen=True)
class StateSpec:
    """The state of a region, declared. It replaces discovery: what is not named is not brought back.

    tensors     tensors by any name; their whole storages are state, with all aliases
    objects     lists, dicts, sets, deques, arrays, or objects whose attributes are state
    generators  ``torch.Generator``, ``numpy.random.Generator``, ``random.Random``

    torch's own generators are always state. Raises :class:`InvalidRegion` for values of other types. Not for: regions
    whose state one does not know; ``state="auto"`` finds it.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    objects: Sequence[Any] = ()
    generators: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.tensors, Mapping):
            raise InvalidRegion("StateSpec(tensors=...) must be a mapping from names to tensors")
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise InvalidRegion(f"StateSpec names {name!r}, which is a {type(tensor).__name__} and not a tensor")
        for value in self.objects:
            if isinstance(value, (bool, int, float, str, bytes, tuple, type(None))):
                raise InvalidRegion(
                    f"StateSpec names the object {value!r}, a {type(value).__name__} that nothing can change: name "
                    "what holds it"
                )


@dataclass(frozen=True)
class Settings:
    """See :class:`regrad.torch.Checkpoint`."""

    state: str | StateSpec | None = "auto"
    guard: str = "first"
    engine: str = "auto"

    def __post_init__(self) -> None:
        if not (self.state is None or self.state == "auto" or isinstance(self.state, StateSpec)):
            raise InvalidRegion(f'state={self.state!r} is not known; it is "auto", a StateSpec or None')
        if self.guard not in GUARDS:
            raise InvalidRegion(f"guard={self.guard!r} is not known; it is one of {', '.join(GUARDS)}")
        if self.engine not in ENGINES:
            raise InvalidRegion(f"engine={self.engine!r} is not known; it is one of {', '.join(ENGINES)}")
        if self.state is None and self.engine != "auto":
            raise InvalidRegion(
                f"state=None keeps no state, so engine={self.engine!r} has nothing to do: leave out one of the two"
            )
        if self.engine == "guarded" and self.guard == "off":
            raise InvalidRegion('engine="guarded" checks what it restores and guard="off" checks nothing: choose one')


AUTO = Settings()
