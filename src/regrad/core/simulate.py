"""The only place where peaks are computed: walks a schedule, judges whether it is legal and prices it.

Two rules (docs/concepts/cost-model.md, in exact integer bytes):

    timeline   forward of i   P + Σ_{j<i} r_j + f_i
               backward of i  P + Σ_{j<=i} r_j + t_i + Σ_{j>i} g_j
               optimizer      P + Σ g + o
    static     P + Σ g + Σ r_i + max t_i

The static rule charges what has long been freed; every backward that it admits the timeline rule admits too. A log
that segments share counts as retained from the birth to the death of each entry, what a replay puts aside as transient
(:mod:`regrad.core.rollback`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from regrad.core.chain import Chain, Option
from regrad.core.errors import IllegalSchedule, InvalidPlan
from regrad.core.plan import Choices
from regrad.core.rollback import Rollback
from regrad.core.schedule import (
    Action,
    Backward,
    Drop,
    Forward,
    PutBack,
    Recompute,
    Restore,
    Save,
    Schedule,
    schedule_of,
)
from regrad.core.state import Moves, StateUse, StateVariable

RULES = ("timeline", "static")
NOTHING = Moves()


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule costs.

    peak_bytes    the highest moment of the step, by the rule asked for
    moment        (phase, segment) of that peak; the optimizer's segment is -1
    added_seconds over the eager step
    recomputes    for each segment how many times its forward runs again; an empty tail is no run
    levels        bytes at each moment that was looked at, in the order of the schedule
    moves         bytes of state that shared logs moved; their seconds are in ``added_seconds``
    """

    peak_bytes: int
    moment: tuple[str, int]
    added_seconds: float
    recomputes: tuple[int, ...]
    levels: tuple[int, ...]
    moves: Moves = NOTHING

    @property
    def total_recomputes(self) -> int:
        """Extra forwards of the step."""
        return sum(self.recomputes)


def simulate(
    choices: Choices, chain: Chain, rule: str = "timeline", states: Iterable[StateVariable] = ()
) -> Simulation:
    """Price ``choices`` on ``chain`` under ``rule``. Raises :class:`InvalidPlan` or :class:`IllegalSchedule`.

    ``states`` are the variables of the problem, which are needed where an option uses a shared log.
    """
    return walk(schedule_of(choices, chain), chain, rule, states)


def walk(schedule: Schedule, chain: Chain, rule: str = "timeline", states: Iterable[StateVariable] = ()) -> Simulation:
    """Price any schedule. Raises :class:`IllegalSchedule` where it uses what is not there or leaves a thing undone."""
    if rule not in RULES:
        raise InvalidPlan(f"there is no rule {rule!r}; the rules are {' and '.join(RULES)}")
    walker = _Walker(chain, states)
    for position, action in enumerate(schedule.actions):
        walker.act(position, action)
    walker.finish(len(schedule.actions))
    return walker.result(rule)


class _Walker:
    """The state of a step on a chain: what is held, where the replay stands, which backwards are done."""

    def __init__(self, chain: Chain, states: Iterable[StateVariable]) -> None:
        self.chain = chain
        self.logs = {variable.name: Rollback(variable) for variable in states}
        self.moves = NOTHING
        self._by_kind: dict[type[Action], Callable[[Any], str]] = {
            Forward: self._forward,
            Save: self._save,
            Restore: self._restore,
            Recompute: self._recompute,
            Backward: self._backward,
            Drop: self._drop,
            PutBack: self._putback,
        }
        self.held: dict[int, tuple[Option, int]] = {}
        self.saved: set[int] = set()
        self.bytes = chain.persistent_bytes
        self.at = 0
        self.ran_forward = 0
        self.next_backward = len(chain) - 1
        self.recomputes = [0] * len(chain)
        self.seconds = 0.0
        self.levels: list[int] = []
        self.moments: list[tuple[str, int]] = []
        self.retained = self.most_retained = 0
        self.most_transient = 0

    def act(self, position: int, action: Action) -> None:
        segment = action.segment
        if not 0 <= segment < len(self.chain):
            raise IllegalSchedule(position, action, f"there is no such segment; the chain has {len(self.chain)}")
        problem = self._by_kind[type(action)](action)
        if problem:
            raise IllegalSchedule(position, action, problem)

    def _mark(self, phase: str, segment: int, above: int) -> None:
        self.levels.append(self.bytes + above)
        self.moments.append((phase, segment))

    def _hold(self, count: int) -> None:
        self.bytes += count
        self.retained += count
        self.most_retained = max(self.most_retained, self.retained)

    def _enter(self, segment: int, option: str | None, phase: str) -> None:
        if option is None:
            self._mark(phase, segment, self.chain.segments[segment].replay_bytes)
        else:
            chosen = self.chain.segments[segment].option(option)
            shared = self.chain.segments[segment].boundary_bytes if chosen.holds_input and segment in self.saved else 0
            self._mark(phase, segment, chosen.forward_bytes)
            self._hold(chosen.retained_bytes - shared)
            self.held[segment] = (chosen, chosen.retained_bytes - shared)
        self.at = segment + 1

    def _forward(self, action: Forward) -> str:
        if action.segment != self.ran_forward:
            return f"the forward pass stands at segment {self.ran_forward}"
        if self.at != action.segment:
            return f"the boundary at hand is that of segment {self.at}"
        if action.segment in self.held:
            return "its activations are held already"
        uses = {} if action.option is None else self._uses(self.chain.segments[action.segment].option(action.option))
        for name, log in self.logs.items():
            born, moves = log.forward(action.segment, uses.get(name))
            self._move(log, moves)
            self._hold(born)
        self._enter(action.segment, action.option, "forward")
        self.ran_forward += 1
        return ""

    def _uses(self, option: Option) -> dict[str, StateUse]:
        """By state the option's use of its shared log."""
        found = {use.state: use for use in option.states if use.needs_log}
        for state in found.keys() - self.logs.keys():
            raise InvalidPlan(f"option {option.name!r} needs the log of {state!r}, of which nothing is known")
        return found

    def _move(self, log: Rollback, moves: Moves) -> None:
        self.moves += moves
        self.seconds += log.variable.bandwidth.seconds(moves)

    def _save(self, action: Save) -> str:
        if self.at != action.segment:
            return f"the boundary at hand is that of segment {self.at}"
        if action.segment in self.saved:
            return "this boundary is saved already"
        self.saved.add(action.segment)
        self._hold(self.chain.segments[action.segment].boundary_bytes)
        return ""

    def _restore(self, action: Restore) -> str:
        if action.segment not in self.saved:
            return "this boundary was not saved, or was dropped"
        self.at = action.segment
        return ""

    def _recompute(self, action: Recompute) -> str:
        if self.ran_forward < len(self.chain):
            return f"the forward pass has only reached segment {self.ran_forward}"
        if self.at != action.segment:
            return f"the boundary at hand is that of segment {self.at}"
        if action.segment > self.next_backward:
            return "its backward has run already"
        if action.segment in self.held:
            return "its activations are held already"
        segment = self.chain.segments[action.segment]
        if action.option is not None and segment.option(action.option).states:
            return "the state that it needs is not brought back inside a span"
        self._enter(action.segment, action.option, "backward")
        tail = segment.tail_seconds if action.tail else None
        self.recomputes[action.segment] += tail != 0
        self.seconds += segment.forward_seconds if tail is None else tail
        return ""

    def _backward(self, action: Backward) -> str:
        segment = action.segment
        if segment != self.next_backward:
            return f"the backward pass stands at segment {self.next_backward}"
        if segment not in self.held:
            return "its activations are not held"
        option, counted = self.held.pop(segment)
        uses, aside, standing = self._uses(option), 0, 0
        for name, log in self.logs.items():
            refusal = log.refusal(segment, uses.get(name))
            if refusal:
                return refusal
            standing += log.aside_bytes
            aside += log.peak_aside(segment, uses.get(name))
        self._mark("backward", segment, option.transient_bytes + aside - standing)
        self.most_transient = max(self.most_transient, option.transient_bytes + aside)
        for name, log in self.logs.items():
            before = log.aside_bytes
            died, moves = log.backward(segment, uses.get(name))
            self._move(log, moves)
            self._hold(-died)
            self.bytes += log.aside_bytes - before
        self.bytes += self.chain.segments[segment].gradient_bytes - counted
        self.retained -= counted
        self.seconds += option.added_seconds
        self.recomputes[segment] += option.recomputes
        self.next_backward -= 1
        return ""

    def _putback(self, action: PutBack) -> str:
        log = self.logs.get(action.state)
        if log is None or not log.is_back:
            return f"{action.state!r} does not stand rolled back"
        freed, moves = log.put_back()
        self.bytes -= freed
        self._move(log, moves)
        return ""

    def _drop(self, action: Drop) -> str:
        if action.segment not in self.saved:
            return "this boundary is not saved"
        if action.segment in self.held and self.held[action.segment][0].holds_input:
            return "the activations of its segment, still held, include it"
        self.saved.discard(action.segment)
        self.bytes -= self.chain.segments[action.segment].boundary_bytes
        self.retained -= self.chain.segments[action.segment].boundary_bytes
        return ""

    def finish(self, position: int) -> None:
        if self.next_backward >= 0:
            raise IllegalSchedule(position, "end", f"the backward of segment {self.next_backward} never ran")
        back = [name for name, log in self.logs.items() if log.is_back]
        if back:
            raise IllegalSchedule(position, "end", f"the present of {', '.join(map(repr, back))} never returned")
        if self.saved:
            raise IllegalSchedule(
                position, "end", f"the boundaries of segments {sorted(self.saved)} were never dropped"
            )
        self._mark("optimizer", -1, self.chain.optimizer_bytes)

    def result(self, rule: str) -> Simulation:
        peak = max(self.levels)
        moment = self.moments[self.levels.index(peak)]
        if rule == "static":
            chain = self.chain
            static = chain.persistent_bytes + chain.gradient_bytes + self.most_retained + self.most_transient
            optimizer = self.levels[-1]
            peak, moment = (static, ("backward", -1)) if static >= optimizer else (optimizer, ("optimizer", -1))
        return Simulation(peak, moment, self.seconds, tuple(self.recomputes), tuple(self.levels), self.moves)
