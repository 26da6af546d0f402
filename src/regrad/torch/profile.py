"""A profile: what one step costs, in every way that a plan could run it. One profile serves every budget."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Problem
from regrad.core.errors import InvalidPolicy, PlanMismatch
from regrad.core.levels import Levels
from regrad.core.simulate_trace import Range, StateCopy, TraceArithmetic
from regrad.core.trace import Call, Trace
from regrad.memory.devices import Device
from regrad.planners.tape_search import TapeSearch
from regrad.torch import execute
from regrad.torch.chain import Piece, build_chain
from regrad.torch.clock import Clock
from regrad.torch.dryrun import Rehearsal
from regrad.torch.fingerprint import fingerprint, step_fingerprint
from regrad.torch.merge import merge_lifetimes
from regrad.torch.on_device import device_form, on_device
from regrad.torch.policy import DEFAULT, Policy
from regrad.torch.recompute import rehearse
from regrad.torch.record import Record
from regrad.torch.room import available_bytes
from regrad.torch.segment_options import Parts, parts_of, restricted
from regrad.torch.spans import nested_seeds
from regrad.torch.state import States
from regrad.torch.state_costs import StateCosts, measured, of_device
from regrad.torch.stateful import stateful
from regrad.torch.step import Step
from regrad.torch.store import untouched
from regrad.torch.tape.overhead import seconds_per_call
from regrad.torch.tape_plan import make_search
from regrad.torch.translate import NOT_VALIDATED, DeviceClock
from regrad.torch.watch import border_problem, container_children, find_candidates, given, matches

Progress = Callable[[str, float], None]
SEARCH_SECONDS = 2.0
"""Of local search for ranges and moves, for one budget."""


@dataclass
class Profile:
    """What planning needs to know of a step.

    eager       the eager step in its steady state, as the user's model runs it
    base        the step that plans start from: the eager one, or the one with its cache off
    arithmetic  trace arithmetic on the step that plans start from: the eager one, or the one with its cache off
    ranges_of   for each call that can be recomputed the operations that are run again
    problem     the chain of segments with their options
    pieces      for each segment of the chain the module call that it is, and why it can only be kept where that is so
    states      what state each module call finds, and what its engine copies of it
    cache_off   the module whose cache is turned off under a plan; None if none
    device      the device that need not be here that the figures are for; None: where the step is
    policy      what plans may do; see :meth:`under`
    """

    rehearsal: Rehearsal
    clock: Clock | DeviceClock
    eager: Record
    base: Record
    arithmetic: TraceArithmetic
    ranges_of: dict[tuple[str, int], Range]
    problem: Problem
    pieces: tuple[Piece, ...]
    states: States
    fingerprint: str
    step_fingerprint: str
    training: bool
    cache_off: str | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    named_segments: bool = False
    device: Device | None = None
    policy: Policy = DEFAULT
    _under: dict[Policy, Profile] = field(default_factory=dict)
    _levels: dict[tuple[str, ...], Levels] = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        """The eager step in its steady state (step 2 and later), as the user's model runs it."""
        return self.eager.trace

    @property
    def chain(self) -> Chain:
        """The chain of the problem."""
        return self.problem.chain

    @cached_property
    def stateful(self) -> Problem:
        """The problem with an option for each way to bring large state back: for planners of one level, which choose."""
        return stateful(self.problem, self.arithmetic, self.pieces, self.ranges_of, self.states)

    @cached_property
    def search(self) -> TapeSearch | None:
        """The search for stretches of torch calls to recompute; None if the step's torch calls cannot be numbered, if
        the user named the segments, or if a part is compiled, which a function mode would compile anew."""
        return self._search(masks=False)

    @cached_property
    def masked_search(self) -> TapeSearch | None:
        """The same search with dropout's draws kept as bits; None also where there are none, or by the policy."""
        return self._search(masks=True) if self.policy.pack and self.policy.recompute else None

    @cached_property
    def parts(self) -> tuple[Parts, ...]:
        """The chain with the finer options of its segments: packed, moved elsewhere, ranges of their calls; once with draws
        kept as bits and once without, where there are any."""
        found = [parts_of(self, search) for search in (self.search, self.masked_search) if search is not None]
        return tuple(parts for parts in found if parts is not None)

    def under(self, policy: Policy) -> Profile:
        """This profile for plans under ``policy``. Raises :class:`InvalidPolicy` and :class:`InvalidPlace`."""
        policy.check(self.base.calls, self.rehearsal.step.device.type)
        if self.device is not None and policy.offload is not None:
            raise InvalidPolicy(
                f"offload={policy.offload!r} is priced by measuring it, and {self.device.title} is not here. Leave it out."
            )
        if policy == self.policy:
            return self
        if policy not in self._under:
            self._under[policy] = replace(self, policy=policy, problem=restricted(self, policy))
        return self._under[policy]

    def _search(self, *, masks: bool) -> TapeSearch | None:
        compiled = any(type(module).__name__ == "OptimizedModule" for module in self.rehearsal.step.model.modules())
        if self.named_segments or compiled:
            return None
        calls = {(call.module, call.count): call for call in self.arithmetic.trace.calls}
        blocks = [calls[piece.module, piece.call] for piece in self.pieces if piece.module]
        intervals = [(call.start, call.stop) for call in blocks]
        call = seconds_per_call() if self.device is None else 0.0
        made = make_search(
            self.base, self.arithmetic, intervals, masks=masks, policy=self._policy_here, call_seconds=call
        )
        if made is not None:
            made.limit_seconds = SEARCH_SECONDS
            made.proposals = lambda: nested_seeds(self, made)
        return made

    @property
    def _policy_here(self) -> Policy:
        """Packing is measured on this machine and runs on its kernels: not for a device that is not here."""
        return self.policy if self.device is None else replace(self.policy, pack=False)

    def problem_of(self, call: Call) -> str:
        """Why a call of any module could not be recomputed, as far as its operations tell; "" if it could."""
        copied = self.states.reached(call.module).small
        return border_problem(self.arithmetic.trace, call, self.eager.names, copied, self.states.logged)

    def range_of(self, call: Call, inner: tuple[Range, ...] = ()) -> Range:
        """The range of operations that a call of any module is, with the copies of state that its engine takes."""
        return Range(call.start, call.stop, given(self.arithmetic.trace, call), inner, self.states.copies(call))

    def ranges(self, options: tuple[str, ...]) -> list[Range]:
        """The ranges of operations that are recomputed when each segment takes the option named."""
        return [
            self.range_by(index, option)
            for index, (piece, option) in enumerate(zip(self.pieces, options, strict=True))
            if piece.module and option != KEEP
        ]

    def range_by(self, index: int, option: str) -> Range:
        """The range that segment ``index`` is when it takes ``option``, with the copies of the engines chosen in it."""
        piece = self.pieces[index]
        one = self.ranges_of[piece.module, piece.call]
        engines = self.engines(index, option)
        call = self.states.call(piece.module, piece.call) if engines and option != RECOMPUTE else None
        return one if call is None else replace(one, state=self.states.copies(call, engines))

    def engines(self, index: int, option: str) -> dict[str, str]:
        """By the name of each large state for which there is a choice, the engine by which ``option`` brings it back."""
        segment = self.stateful.chain.segments[index]
        return {use.state: use.engine for use in segment.option(option).states} if segment.can(option) else {}

    def logs_of(self, index: int, options: tuple[str, ...]) -> tuple[StateCopy, ...]:
        """What segment ``index`` must log, under these options, for the replays of segments before it."""
        piece = self.pieces[index]
        call = self.states.call(piece.module, piece.call) if piece.module else None
        if call is None:
            return ()
        found = {
            copy.key: copy
            for one in self.ranges(options)
            for copy in one.state
            if one.start < call.start and copy.key[0] == "log" and copy.key[2] == call.start
        }
        return tuple(found.values())

    def levels(self, options: tuple[str, ...]) -> Levels:
        """The levels of a step in which each segment takes the option named, by trace arithmetic."""
        if options not in self._levels:
            self._levels[options] = self.arithmetic.levels(self.ranges(options))
        return self._levels[options]

    def stateless(self, options: tuple[str, ...]) -> Levels:
        """:meth:`levels` as if no state were copied."""
        return self.arithmetic.levels([replace(one, state=()) for one in self.ranges(options)])

    def dry_run(self, options: tuple[str, ...], taped: execute.Taped | None = None) -> Trace:
        """The record of a step on copies without bytes in which each segment takes the option named."""
        flags = execute.call_options(
            (p.module, p.call, KEEP if o == KEEP else RECOMPUTE) for p, o in zip(self.pieces, options, strict=True)
        )
        with on_device(self.device):
            record = self.rehearsal.record(
                lambda model: execute.install_plan(
                    model, flags, training=self.training, cache_off=self.cache_off, engine=rehearse, taped=taped
                ),
                number=False,
            )
        self.clock.read(record)
        return record.trace


def make_profile(
    step: Step, *, segments: str | None = None, progress: Progress | None = None, device: Device | None = None
) -> Profile:
    """Profile ``step``: a few fake steps and one run of every distinct operation. The step is left as it was.

    Takes seconds for a model of a dozen blocks; memory for the arguments and results of one operation at a time.
    ``segments`` is a glob over module names that replaces the search for repeated blocks, ``device`` one that need not be
    here, for which the record is translated. Raises what the model raises,
    and :class:`regrad.core.errors.CannotTrace` where neither a fake nor a real step can be run.
    """
    began = time.monotonic()
    say = progress or (lambda stage, done: None)
    with untouched(step), on_device(device):
        say("running a fake step", 0.0)
        rehearsal = Rehearsal(step)
        if device is not None:
            device_form(rehearsal.step.optimizer)
        names = container_children(step.model)
        if segments is not None:
            names = {name for name, _ in step.model.named_modules() if matches(name, segments)}
        eager = rehearsal.record(watch=names)
        clock = Clock(largest_bytes=available_bytes() // 4) if device is None else DeviceClock(device)
        clock.read(eager, progress=lambda done: say("timing operations", done))
        candidates, cache_off, notes = _choose(step, rehearsal, eager, names, segments)
        say("following lifetimes", 0.0)
        base = eager
        if cache_off is not None:
            base = rehearsal.record(_caching_off(step, cache_off))
            clock.read(base)
        bare = rehearsal.record_lifetimes(_caching_off(step, cache_off))
        merge_lifetimes(base.trace, bare)
    arithmetic = TraceArithmetic(base.trace)
    calls = {(call.module, call.count): call for call in base.trace.calls}

    def costs() -> StateCosts:
        return measured(step.device) if device is None else of_device(device)

    states = States(rehearsal.step.model, base, [calls[module, count] for module, count, _ in candidates], costs)
    ranges_of = {}
    for module, count, reason in candidates:
        if not reason:
            call = calls[module, count]
            ranges_of[module, count] = Range(call.start, call.stop, given(base.trace, call), state=states.copies(call))
    chain, pieces = build_chain(arithmetic, candidates, ranges_of)
    if rehearsal.why_real:
        notes = (*notes, f"the step was run for real on a copy: fake tensors do not carry it ({rehearsal.why_real})")
    if device is not None:
        notes = (*notes, NOT_VALIDATED.format(title=device.title))
    return Profile(
        rehearsal, clock, eager, base, arithmetic, ranges_of, Problem(chain, trace=base.trace), pieces, states,
        fingerprint(step.model), step_fingerprint(step), step.model.training, cache_off, notes, time.monotonic() - began,
        named_segments=segments is not None, device=device,
    )  # fmt: skip


def profile_of(step: Step, known: Profile | None, segments: str | None, progress: Progress | None) -> Profile:
    """The profile ``known`` if it is one of ``step``, or a new one. Raises :class:`PlanMismatch` if it is of another."""
    if known is None:
        return make_profile(step, segments=segments, progress=progress)
    found = step_fingerprint(step)
    if known.step_fingerprint != found:
        detail = "the profile is of another model, of other shapes of the batch, or of another optimizer"
        raise PlanMismatch(known.step_fingerprint, found, detail)
    return known


def _caching_off(step: Step, module: str | None) -> Callable[[nn.Module], None]:
    """What turns the cache of ``module`` off on a copy of the model; None turns nothing off."""
    return lambda model: execute.install_plan(model, {}, training=step.model.training, cache_off=module)


def _choose(
    step: Step, rehearsal: Rehearsal, eager: Record, names: set[str], segments: str | None
) -> tuple[list[tuple[str, int, str]], str | None, tuple[str, ...]]:
    """The candidates with the reasons against them, the module whose cache must be off, and notes for the user."""
    candidates = _judge(step, rehearsal, eager, segments)
    caching = _caching_module(step) if eager.changing else None
    if caching is None:
        return candidates, None, ()
    try:
        off = rehearsal.record(_caching_off(step, caching), watch=names)
    except Exception as error:  # noqa: BLE001 - the loss reads the cache: the user's own code fails without it
        note = f"the cache of {_shown(caching)} is used by the loss ({type(error).__name__}), so it stays on"
        return candidates, None, (note,)
    without = _judge(step, rehearsal, off, segments)
    if off.changing or sum(not reason for *_, reason in without) < sum(not reason for *_, reason in candidates):
        return candidates, None, ()
    note = (
        f"use_cache is False in {_shown(caching)} while the plan is applied: nothing in this step reads the cache again"
    )
    return without, caching, (note,)


def _shown(module: str) -> str:
    return module or "the model"


def _judge(step: Step, rehearsal: Rehearsal, record: Record, segments: str | None) -> list[tuple[str, int, str]]:
    """Every candidate call with the reason why it cannot be recomputed, "" if it can."""
    trace = record.trace
    candidates = find_candidates(step.model, trace, segments)
    states = States(rehearsal.step.model, record, [trace.calls[candidate.call] for candidate in candidates])
    root_is_called = any(call.module == "" for call in trace.calls)
    counts: dict[str, int] = {}
    for call in trace.calls:
        counts[call.module] = max(counts.get(call.module, 0), call.count + 1)
    judged = []
    for candidate in candidates:
        call = trace.calls[candidate.call]
        reason = ""
        if counts[call.module] > 1 and not root_is_called:
            reason = "it is called several times in a step, and the model itself is not called, so calls cannot be told apart"
        reason = reason or border_problem(trace, call, record.names, states.reached(call.module).small, states.logged)
        judged.append((call.module, call.count, reason))
    return judged


def _caching_module(step: Step) -> str | None:
    """The outermost module whose forward takes ``use_cache`` and whose config turns it on, unless the batch gives one."""
    batch = step.batch if isinstance(step.batch, Mapping) else {}
    if batch.get("use_cache") is not None or batch.get("past_key_values") is not None:
        return None
    name: str
    for name, module in step.model.named_modules():
        config = getattr(module, "config", None)
        takes = "use_cache" in inspect.signature(module.forward).parameters
        if takes and getattr(config, "use_cache", False):
            return name
    return None
