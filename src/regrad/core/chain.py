"""Options, segments, chains and problems: what a planner chooses from. Symbols: docs/concepts/cost-model.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from regrad.core.errors import InvalidPlan, PlannerMismatch
from regrad.core.state import StateUse, StateVariable

if TYPE_CHECKING:
    from regrad.core.graph import Graph

KEEP = "keep"
RECOMPUTE = "recompute"
RANGES = "ranges"
"""What a segment does whose torch calls are recomputed in stretches, none of which need be the segment."""
MOVED = "moved"
"""What a segment does that is kept, with some of its saved tensors in fewer bytes or in another place."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to carry a segment from its forward to its backward.

    retained_bytes   r: held from the moment the forward leaves the segment until its backward ends
    transient_bytes  t: the most above everything then retained while its backward runs, replay and own gradients too
    forward_bytes    f: the most above what is retained at its entry while its forward runs
    added_seconds    time added over the eager step
    holds_input      whether retained_bytes counts the segment's boundary, its kept input (``Segment.boundary_bytes``)
    engine           the retention engine of its state, where it has any
    recomputes       whether its forward runs a second time
    states           how it brings back the state that its replay needs; what that costs this segment alone stands in
                     the figures above as well
    """

    name: str
    retained_bytes: int
    transient_bytes: int
    forward_bytes: int = 0
    added_seconds: float = 0.0
    holds_input: bool = False
    engine: str | None = None
    recomputes: bool = False
    states: tuple[StateUse, ...] = ()

    def __post_init__(self) -> None:
        if self.forward_bytes < 0:
            raise InvalidPlan(f"option {self.name!r} has a negative forward_bytes: {self.forward_bytes}")

    @property
    def logs(self) -> tuple[StateUse, ...]:
        """The uses among ``states`` that need a log which segments share."""
        return tuple(use for use in self.states if use.needs_log)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the forward pass that can be run again from its boundary: on PyTorch one call of a module.

    gradient_bytes   g: gradients of weights that come into being in its backward
    forward_seconds  one run of its forward
    boundary_bytes   b: the values that enter it and must stay alive for it to be run again
    tail_seconds     one run of its forward up to the last operation that its own backward needs; ``None`` means all of
                     it. A span runs its segments' forwards again, of its last segment only this tail
    replay_bytes     the most above its entry while its forward runs with nothing kept for a backward (inside a span)
    reason           why it can only be kept, where that is so
    """

    name: str
    options: tuple[Option, ...]
    gradient_bytes: int = 0
    forward_seconds: float = 0.0
    boundary_bytes: int = 0
    tail_seconds: float | None = None
    replay_bytes: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.options:
            raise InvalidPlan(f"segment {self.name!r} has no option")
        names = [option.name for option in self.options]
        if len(set(names)) != len(names):
            raise InvalidPlan(f"segment {self.name!r} has two options of one name: {names}")

    def option(self, name: str) -> Option:
        """The option called ``name``; raises :class:`InvalidPlan` if there is none."""
        for option in self.options:
            if option.name == name:
                return option
        known = ", ".join(option.name for option in self.options)
        raise InvalidPlan(f"segment {self.name!r} has no option {name!r}; it has {known}")

    def can(self, name: str) -> bool:
        """Whether it has an option called ``name``."""
        return any(option.name == name for option in self.options)


@dataclass(frozen=True)
class Chain:
    """Segments that run one after the other.

    persistent_bytes  P: there whatever the plan (weights, buffers, inputs, optimizer state; gradients only if kept)
    optimizer_bytes   o: the most above P and all gradients while the optimizer steps
    eager_seconds     one eager step, forward, backward and optimizer
    """

    segments: tuple[Segment, ...]
    persistent_bytes: int = 0
    optimizer_bytes: int = 0
    eager_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.segments:
            raise InvalidPlan("a chain needs at least one segment")

    def __len__(self) -> int:
        return len(self.segments)

    @cached_property
    def gradient_bytes(self) -> int:
        """Σ g."""
        return sum(segment.gradient_bytes for segment in self.segments)

    @cached_property
    def later_gradient_bytes(self) -> tuple[int, ...]:
        """For each i the gradients that exist when its backward starts: Σ_{j>i} g_j."""
        later, total = [], 0
        for segment in reversed(self.segments):
            later.append(total)
            total += segment.gradient_bytes
        return tuple(reversed(later))


@dataclass(frozen=True)
class Problem:
    """What a planner is given: a shape, and the trace and state variables behind it where there are any.

    ``rule`` is ``"timeline"`` (the default) or ``"static"``. ``states`` holds at least the state variables whose
    shared log an option needs (:mod:`regrad.core.state_options` makes such options).
    """

    shape: Chain | Graph
    rule: str = "timeline"
    trace: object = None
    states: tuple[StateVariable, ...] = ()

    def __post_init__(self) -> None:
        known = {variable.name for variable in self.states}
        for segment in self.shape.segments if isinstance(self.shape, Chain) else ():
            for use in (use for option in segment.options for use in option.states):
                if use.needs_log and use.state not in known:
                    raise InvalidPlan(
                        f"segment {segment.name!r} has an option that needs the log of state {use.state!r}, which is not "
                        "among the problem's states"
                    )

    @property
    def chain(self) -> Chain:
        """The shape as a chain; raises :class:`PlannerMismatch` if it is a graph, which a planner of chains refuses."""
        if isinstance(self.shape, Chain):
            return self.shape
        raise PlannerMismatch(
            f"this planner takes a chain, and the problem is a graph of {len(self.shape)} nodes: take Milp, which plans "
            "graphs, or cut the model at places where one value crosses"
        )

    @property
    def shares_log(self) -> bool:
        """Whether an option needs a log that segments share: then what one costs depends on what others choose."""
        return isinstance(self.shape, Chain) and any(o.logs for s in self.shape.segments for o in s.options)
