"""From what was found to the plan that a user gets: every segment with its figures and the reason for its option."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core import trace as tr
from regrad.core.chain import KEEP, MOVED, RANGES, RECOMPUTE, Chain
from regrad.core.levels import Levels
from regrad.core.plan import Plan, SegmentPlan, one_level
from regrad.core.simulate_moves import ELSEWHERE, Movable
from regrad.core.simulate_tape import TapeRange
from regrad.core.simulate_trace import live_levels
from regrad.core.timeline import peak_moment
from regrad.core.units import format_bytes
from regrad.planners.tape_search import TapeSearch
from regrad.torch.chain import cut, read_levels
from regrad.torch.improve import Options
from regrad.torch.move_plan import move_plans, moved_in
from regrad.torch.profile import Profile
from regrad.torch.state_text import engines_of, journal_notes, state_plans
from regrad.torch.tape_plan import range_plans

BAND_RATIO = {"fake": 0.01, "real": 0.01}
"""How far predicted and measured peaks lie apart, by the method of the prediction; measured in benchmarks/."""
UNSEEN_BYTES = 256
"""On top of every prediction: Python numbers in the formulas of a backward, which no record shows. 48 were seen."""


@dataclass(frozen=True)
class Found:
    """One way to run the step: an option for each segment, or ranges of torch calls and moves that ``search`` found; with
    the trace's figures for it."""

    options: Options
    levels: Levels
    ranges: tuple[TapeRange, ...] = ()
    search: TapeSearch | None = None
    moves: tuple[Movable, ...] = ()

    @property
    def taped(self) -> bool:
        """Whether it is more than options of segments."""
        return bool(self.ranges or self.moves)

    @property
    def masks(self) -> bool:
        """Whether dropout's draws are kept as bits."""
        return self.search is not None and bool(self.search.tape.draws)

    @property
    def peak_bytes(self) -> int:
        """Peak of a step, by trace arithmetic."""
        return self.levels.peak_bytes + UNSEEN_BYTES

    @property
    def rank(self) -> tuple[float, int]:
        """Faster first; among equally fast ones the lower peak."""
        return self.levels.added_seconds, self.peak_bytes


def describe(
    source: Profile, found: Found, *, budget_bytes: int, least_bytes: int, planner: str, notes: tuple[str, ...]
) -> Plan:
    """The plan that a user gets, without the seconds of planning."""
    trace, recorded = source.arithmetic.trace, live_levels(source.trace)
    segments = _taped_segments(source, found) if found.taped else _segments(source, found.options)
    return Plan(
        fingerprint=source.fingerprint,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=found.peak_bytes,
        predicted_by="trace" if trace.source == "real" else "fake trace",
        band_ratio=BAND_RATIO[trace.source],
        peak_moment=peak_moment(trace, found.levels),
        eager_peak_bytes=recorded.peak_bytes + UNSEEN_BYTES,
        eager_peak_moment=peak_moment(source.trace, recorded),
        persistent_bytes=source.chain.persistent_bytes,
        least_bytes=least_bytes,
        added_seconds=found.levels.added_seconds,
        eager_seconds=source.chain.eager_seconds,
        planner=planner,
        device=trace.device,
        gradients=trace.gradients,
        segments=segments,
        choices=one_level(tuple(segment.option for segment in segments) if found.taped else found.options),
        ranges=() if found.search is None else range_plans(found.search, found.ranges, source.base.calls),
        masks=found.masks,
        calls=source.base.calls if found.taped else (),
        moves=move_plans(source.arithmetic, found.moves, source.base.calls),
        notes=(*source.notes, *_notes(source, found), *journal_notes(source, found, budget_bytes), *notes),
        cache_off=source.cache_off,
        offload=source.policy.offload if any(one.how == ELSEWHERE for one in found.moves) else None,
        training=source.training,
    )


def _segments(source: Profile, options: Options) -> tuple[SegmentPlan, ...]:
    chain = source.stateful.chain
    return tuple(_segment_plan(chain, source, index, options) for index in range(len(options)))


def _taped_segments(source: Profile, found: Found) -> tuple[SegmentPlan, ...]:
    """Segments of a plan of ranges: figures are read off its levels, since ranges may cross their borders."""
    trace = source.arithmetic.trace
    cuts = cut(trace, [(piece.module, piece.call, piece.reason) for piece in source.pieces if piece.module])
    kept, _ = read_levels(source.arithmetic, source.arithmetic.levels(), cuts)
    readings, _ = read_levels(source.arithmetic, found.levels, cuts)
    segments = []
    for part, eager, now in zip(cuts, kept, readings, strict=True):
        inside = sum(one.start < part.stop and part.start < one.stop for one in found.ranges)
        moved = moved_in(source.arithmetic, found.moves, part.start, part.stop)
        saved = eager.retained - now.retained
        what = [f"{inside} ranges"] if inside else []
        if moved.count:
            what.append(f"{moved.count} moved, {format_bytes(moved.bytes)} as {format_bytes(moved.held_bytes)}")
        option = RANGES if inside else MOVED if moved.count else KEEP
        what.append(f"frees {format_bytes(saved)} until its backward" if what else "there is room for it")
        segments.append(
            SegmentPlan(
                name=part.piece.name, option=option, retained_bytes=now.retained,
                transient_bytes=now.transient, added_seconds=now.seconds + moved.seconds,
                reason="; ".join(what), module=part.piece.module, call=part.piece.call, moved_bytes=moved.bytes,
                held_bytes=moved.held_bytes, moved_seconds=moved.seconds,
            )
        )  # fmt: skip
    return tuple(segments)


def _segment_plan(chain: Chain, source: Profile, index: int, options: Options) -> SegmentPlan:
    segment, piece, option = chain.segments[index], source.pieces[index], options[index]
    chosen, state = segment.option(option), state_plans(source, index, options)
    if segment.reason:
        reason = segment.reason
    elif option == KEEP:
        reason = "there is room for it"
    else:
        saved = segment.option(KEEP).retained_bytes - chosen.retained_bytes
        reason = f"frees {format_bytes(saved)} until its backward"
    return SegmentPlan(
        name=segment.name, option=RECOMPUTE if chosen.recomputes else option, retained_bytes=chosen.retained_bytes,
        transient_bytes=chosen.transient_bytes, added_seconds=chosen.added_seconds, reason=reason,
        engine=engines_of(state), module=piece.module, call=piece.call, state=state,
    )  # fmt: skip


def _notes(source: Profile, found: Found) -> tuple[str, ...]:
    notes = []
    if peak_moment(source.trace, live_levels(source.trace)).phase == tr.OPTIMIZER:
        notes.append("the optimizer's step is the peak of the eager step: no plan goes below it")
    left_out = [
        segment
        for segment, piece in zip(source.chain.segments, source.pieces, strict=True)
        if piece.module and piece.reason
    ]
    if left_out and not found.taped:
        notes.append(f"{len(left_out)} segments can only be kept, {left_out[0].name} for one: {left_out[0].reason}")
    if not any(piece.module for piece in source.pieces) and not found.taped:
        notes.append('no repeated blocks were found in ModuleList or Sequential; name them with segments="…"')
    return tuple(notes)
