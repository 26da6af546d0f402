"""Bytes: snapshot replay and region undo bring back every byte and every generator, of programs of any types."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.replay.engines.journal import Journal
from regrad.replay.engines.snapshot import Snapshot
from regrad.verify.checks import Expectation, judge_bytes
from regrad.verify.faults import FAULTS, FORGOTTEN_GENERATOR
from regrad.verify.programs import Flavour, random_job
from regrad.verify.records import Summary
from regrad.verify.suite import ENGINE_BOUND, Progress, Sink, Suite, is_caught, is_caught_by_bytes, lacking, run_of

SEED = 2
NO_BYTES = ("replays on consumed state", "never fires")  # what bytes of a sound replay cannot show


@dataclass(frozen=True, slots=True)
class Bytes(Suite):
    """Programs in which bytes are also read and moved as other types. No gradient is taken, nothing but bytes and
    generators is looked at: at the entry and the exit of each replayed segment, and when the present is back.

    The control replays every program from a generator that is where the present left it.
    """

    @property
    def name(self) -> str:
        """``bytes``."""
        return "bytes"

    @property
    def bound(self) -> None:
        """No gradient is taken."""
        return None

    def programs(self, full: bool) -> int:
        """1,024, or 96."""
        return 1024 if full else 96

    def execute(self, full: bool, summary: Summary, add: Sink, progress: Progress) -> None:
        """Run it."""
        count, planted = self.programs(full), 64 if full else 6
        for number in range(count):
            expectation = Expectation.of(random_job(SEED, number, Flavour(single=True, raw=True)))
            lacking(expectation, summary, number)
            for engine in (Snapshot(), Journal()):
                outcome = judge_bytes(expectation, engine)
                add(run_of(self.name, number, outcome, engine=engine.label, **expectation.shape.record()))
            caught = is_caught_by_bytes(expectation, FORGOTTEN_GENERATOR)
            summary.plant("control: replays from another generator state", caught)
            if number < planted:
                self._plant(expectation, number, summary)
            progress((number + 1) / count)

    def _plant(self, expectation: Expectation, number: int, summary: Summary) -> None:
        plain = Expectation.of(random_job(SEED, number, Flavour()))
        for fault in FAULTS:
            if fault.name in NO_BYTES:
                summary.plant(fault.name, is_caught(plain, fault, ENGINE_BOUND))
            else:
                summary.plant(fault.name, is_caught_by_bytes(expectation, fault))
