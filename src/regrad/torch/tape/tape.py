"""The executor: puts a recording mode around a forward, and counts what becomes of its ranges."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._device import DeviceContext

from regrad.core.errors import UsageError
from regrad.torch.offload import Place
from regrad.torch.on_device import Kernels
from regrad.torch.regions.frames import LOCK
from regrad.torch.regions.region import RegionKept
from regrad.torch.tape.calls import Kind, Numbering
from regrad.torch.tape.mover import Mover
from regrad.torch.tape.moves import Move, MoveReport, Moves, MoveTally
from regrad.torch.tape.ranges import Range, Ranges
from regrad.torch.tape.recording import Recording
from regrad.torch.tape.setting import Settings
from regrad.torch.tape.writer import Writer

_C: Any = torch._C
_top_hooks = _C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True, slots=True)
class RangeReport:
    """What became of one range: how often it ran and was replayed, and how many recorded calls the replays ran again.

    ``kept`` counts, by reason, the forwards in which it was not recorded, or not as a range of its own.
    """

    range: Range
    forwards: int
    replays: int
    calls_replayed: int
    kept: tuple[tuple[str, int], ...]


class _Tally:
    """Counts of all ranges of a tape."""

    def __init__(self) -> None:
        self.forwards: Counter[Range] = Counter()
        self.replays: Counter[Range] = Counter()
        self.calls: Counter[Range] = Counter()
        self.reasons: dict[Range, Counter[str]] = {}
        self.right: set[Range] = set()

    def opened(self, one: Range) -> None:
        self.forwards[one] += 1
        self.reasons.setdefault(one, Counter())

    def replayed(self, one: Range, calls: int) -> None:
        self.replays[one] += 1
        self.calls[one] += calls

    def checked(self, one: Range) -> None:
        self.right.add(one)

    def kept(self, one: Range, reason: str) -> None:
        """Count a range that is not recorded; the first for each reason is told."""
        told = any(reason in reasons for reasons in self.reasons.values())
        self.reasons.setdefault(one, Counter())[reason] += 1
        if not told:
            warnings.warn(
                f"range {one.title} is not recomputed as planned: {reason}. The result is exact and this forward saves "
                "less memory.",
                RegionKept,
                stacklevel=2,
            )


class Tape:
    """Recomputes ranges of torch calls in the backward, and moves what other calls save.

    ``guard`` is "first" (the first replay of each range is compared with its forward, bit by bit by digests), "always"
    or "off". With ``masks`` what dropout draws in a range is kept as bits and not drawn again. ``place`` is where offloaded
    tensors go (None: a file among the system's temporary ones). One tape may serve many forwards; each numbers its calls
    from 0.
    """

    def __init__(self, *, guard: str = "first", masks: bool = False, place: Place | None = None) -> None:
        if guard not in ("first", "always", "off"):
            raise UsageError(f'guard={guard!r} is not known; it is "first", "always" or "off"')
        self.guard, self.masks, self.place = guard, masks, place
        self._tally = _Tally()
        self._moved = MoveTally()

    @contextmanager
    def forward(self, ranges: Ranges | Iterable[Range], moves: Moves | Iterable[Move] = ()) -> Iterator[None]:
        """Context: the torch calls inside are one forward, numbered from 0, in which ``ranges`` are recorded and what calls
        save is held as ``moves`` say.

        Between forward and backward a range holds the tensors from outside that its replay needs, and none of its own
        beyond what the caller's Python holds. Without gradients, under a tracer, or where saved-tensor hooks are
        switched off nothing is recorded; a call that writes what was there before the range, and one under
        saved-tensor hooks of other code, is left as eager runs it. A :class:`RegionKept` warning tells once of each
        reason for which a range is kept.

        What cannot be moved exactly is held as eager holds it, counted, and told once for each reason. If there is no room
        for what is to be offloaded, :class:`PlaceFailed` is raised before anything of the forward has run.

        Replays raise :class:`ReplayDivergence` where they do not reproduce the forward, :class:`ModifiedArgument` where
        what a range read has been changed; the present is then as it was.

        Cost: 3 µs a call outside ranges, 20 µs inside and as much in the replay, 60 µs a saved tensor that is moved;
        5,056 bytes for each call that draws; in the first forward and replay of a range 0.2 ms a MiB that it saves.

        Not for: forwards with parts under ``torch.compile``, which are compiled anew under the tape.

        Raises :class:`InvalidPlan` for ranges that cross, and for two moves of one saved tensor.
        """
        plan = ranges if isinstance(ranges, Ranges) else Ranges(ranges)
        moved = moves if isinstance(moves, Moves) else Moves(moves, plan)
        empty = not (plan.ranges or moved.moves)
        if empty or not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or _is_traced():
            yield
            return
        mover = Mover(moved, self._moved, self.place) if moved.moves else None
        mode = _Taping(plan, self._tally, self.guard, masks=self.masks, mover=mover)
        with LOCK, mode:
            try:
                yield
            finally:
                mode.end()

    def report(self) -> tuple[RangeReport, ...]:
        """One report a range, in the order of the ranges."""
        tally = self._tally
        return tuple(
            RangeReport(one, tally.forwards[one], tally.replays[one], tally.calls[one], tuple(reasons.items()))
            for one, reasons in sorted(tally.reasons.items(), key=lambda item: (item[0].start, -item[0].stop))
        )

    def report_moves(self) -> tuple[MoveReport, ...]:
        """One report a move, in the order of their first calls."""
        return self._moved.report()


def _is_traced() -> bool:
    key = torch._C._TorchDispatchModeKey.PROXY
    return torch._C._get_dispatch_mode(key) is not None or torch._C._get_tracing_state() is not None


class _Taping(Numbering):
    """Opens and closes ranges as their calls come, and passes calls inside to a :class:`Writer`.

    Calls under saved-tensor hooks that were not there when the forward began are left to whoever put those on.
    """

    def __init__(self, plan: Ranges, tally: _Tally, guard: str, *, masks: bool, mover: Mover | None = None) -> None:
        super().__init__()
        self.mover = mover
        self.moved: Container[int] = () if mover is None else mover.moves.by_call
        self.plan, self.tally, self.guard, self.masks = plan, tally, guard, masks
        self.settings = Settings()
        self.writer: Writer | None = None
        self.open: list[Range] = []
        self.event = plan.first
        self.names = plan.names
        self.lost = False
        self.hooks = _top_hooks(True)

    def call(self, ordinal: int, kind: Kind, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run call number ``ordinal``, recorded if a range is open, with what it saves moved if a move says so."""
        if self.names and not self.lost and (ordinal >= len(self.names) or self.names[ordinal] != kind.name):
            self._lose(ordinal, kind)
        if ordinal == self.event:
            self._advance(ordinal)
        if (
            self.writer is None
            or ordinal in self.plan.keep
            or _top_hooks(True) != self.hooks
            or types not in ((), (torch.Tensor,))
            or _is_transformed()
        ):
            if ordinal in self.moved:
                assert self.mover is not None
                return self.mover.run(ordinal, func, args, kwargs, self._obstacle(types))
            return func(*args, **kwargs)
        return self.writer.run(ordinal, kind, func, args, kwargs)

    def _advance(self, ordinal: int) -> None:
        while self.open and self.open[-1].stop <= ordinal:
            self._close()
        for one in self.plan.opens.get(ordinal, ()):
            self._enter(one)
        nexts = [one.start for one in self.plan.ranges if one.start > ordinal]
        if self.open:
            nexts.append(self.open[-1].stop)
        self.event = min(nexts, default=-1)

    def _enter(self, one: Range) -> None:
        self.tally.opened(one)
        reason = self._obstacle()
        if reason:
            self.tally.kept(one, reason)
            return
        if self.writer is None:
            self.writer = Writer(Recording(self.tally, self.below), self.settings, masks=self.masks)
        check = self.guard == "always" or (self.guard == "first" and one not in self.tally.right)
        self.writer.enter(one, check=check)
        self.open.append(one)

    def _obstacle(self, types: Any = None) -> str:
        """Why a range cannot begin now; with the ``types`` of a call, why what that saves cannot be moved."""
        if not _C._autograd._saved_tensors_hooks_is_enabled():
            return "saved-tensor hooks are switched off"
        if _top_hooks(True) != (self.hooks if types is None else None):
            return "it begins inside a part whose saved tensors other code takes (a checkpoint, save_on_cpu)"
        if types is not None and (types not in ((), (torch.Tensor,)) or _is_transformed()):
            return "its call is given a tensor subclass, or runs under a transform of torch.func"
        if any(not isinstance(mode, (DeviceContext, Kernels)) for mode in self.below):
            return "another function mode is active, which may change what calls do"
        return ""

    def _close(self) -> None:
        assert self.writer is not None
        self.open.pop()
        if self.writer.leave():
            self.writer = None

    def _lose(self, ordinal: int, kind: Kind) -> None:
        expected = self.names[ordinal] if ordinal < len(self.names) else "the end"
        reason = f"call {ordinal} of the forward is {kind.name} where the plan has {expected}: it took another path"
        self.lost, self.event = True, -1
        for one in self.plan.ranges:
            if one.stop > ordinal:
                self.tally.kept(one, reason)
        self._stop_moving(ordinal, reason)
        while self.open:
            self._close()

    def end(self) -> None:
        """The forward has ended, one way or another."""
        while self.open:
            self._close()
        self._stop_moving()
        # A module that is run again in the backward may bring this mode back: then it only looks on.
        self.names, self.event = (), -1

    def _stop_moving(self, lost_from: int | None = None, reason: str = "") -> None:
        if self.mover is not None:
            self.mover.end(lost_from=lost_from, reason=reason)
            self.mover, self.moved = None, ()


def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None
