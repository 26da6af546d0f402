"""Ways to run a step's forward and backward, each recorded on a copy or computed on the record: what advice is made of."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from regrad.core import trace as tr
from regrad.core.advice import (
    CHUNKED,
    OFFLOAD,
    SAME_BUT_ROUNDING,
    SAME_BYTES,
    NoUse,
)
from regrad.core.errors import UsageError
from regrad.core.plan import Plan
from regrad.core.simulate_trace import live_levels
from regrad.core.trace import Trace
from regrad.core.units import format_bytes
from regrad.memory import chunked
from regrad.memory.advice import Way, link_bytes_per_second
from regrad.memory.offloading import offload
from regrad.torch.clock import Clock, roofline
from regrad.torch.describe import UNSEEN_BYTES
from regrad.torch.dryrun import Rehearsal
from regrad.torch.floor import floor_of
from regrad.torch.on_device import device_form, on_device
from regrad.torch.profile import Profile
from regrad.torch.record import Record, TensorSpec
from regrad.torch.step import Step
from regrad.torch.store import untouched
from regrad.torch.translate import DeviceClock

MOST_CHUNKS = 64
CLOCK_SECONDS = 1.0
"""Kernels of a changed step that no clock has met are timed for so long; the rest is estimated from those that were."""
LEAST_TIMED_SHARE = 0.7
"""Of a step's seconds so much must be measured; of a changed one's half of that, since it shares kernels with the step."""
SAMPLE_BYTES = 1 << 25
"""Written to a file and read back, to learn how fast that is."""


def phase_seconds(trace: Trace) -> tuple[float, float]:
    """Seconds of forward and backward, and of the optimizer's step."""
    body = sum(operation.seconds for operation in trace.operations if operation.phase != tr.OPTIMIZER)
    return body, sum(operation.seconds for operation in trace.operations if operation.phase == tr.OPTIMIZER)


def way_of(trace: Trace, **words: Any) -> Way:
    """A recorded step as a way."""
    facts: dict[str, Any] = {
        "kinds": (), "what": "", "how": "", "by": "trace", "result": SAME_BYTES, "not_fixed": "",
        "body_seconds": phase_seconds(trace)[0],
    }  # fmt: skip
    return Way(floor=floor_of(trace, live_levels(trace)), **(facts | words))


@dataclass
class Workshop:
    """Records changed copies of one step, each once. ``profile`` is of the step as it is.

    timed  for each record whether its seconds, and those of the step as it is, can be compared
    """

    step: Step
    profile: Profile
    records: dict[str, Record] = field(default_factory=dict)
    timed: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._eager_timed = well_timed(self.profile.eager, self.profile.clock)

    def record(self, key: str, changed: Step) -> Record:
        """The record of a changed step, timed as far as the clock's time goes."""
        if key not in self.records:
            clock = self.profile.clock
            if isinstance(clock, Clock):
                clock.limit_seconds = CLOCK_SECONDS
            with untouched(self.step), on_device(self.profile.device):
                rehearsal = Rehearsal(changed)
                if self.profile.device is not None:
                    device_form(rehearsal.step.optimizer)
                record = rehearsal.record()
                clock.read(record)
            self.records[key] = record
            self.timed[key] = self._eager_timed and well_timed(record, clock, LEAST_TIMED_SHARE / 2)
        return self.records[key]

    def body_by_roofline(self, key: str) -> float:
        """Seconds of a recorded step's forward and backward, from those of the step as it is and a roofline of both."""
        eager = self.profile.eager
        share = roofline_seconds(self.records[key]) / max(roofline_seconds(eager), 1e-9)
        return phase_seconds(eager.trace)[0] * share

    def attempt(self, key: str, kind: str, what: str, changed: Step) -> Record | NoUse:
        """:meth:`record`, or why the changed step does not run."""
        try:
            return self.record(key, changed)
        except Exception as error:  # noqa: BLE001 - whatever stops the changed step, the advice says so and goes on
            text = str(error).strip().split("\n")[0]
            return NoUse(kind, what, None, f"such a step does not run ({type(error).__name__}: {text[:160]})")


def well_timed(record: Record, clock: Clock | DeviceClock, least_share: float = LEAST_TIMED_SHARE) -> bool:
    """Whether most of a record's seconds were measured.

    The rest are guesses from other kernels and sizes; where there was no room to run the large ones, two records of
    different sizes would be compared by guesses alone.
    """
    if isinstance(clock, DeviceClock):
        return True
    measured = [clock.readings[signature.key].measured for signature in record.signatures]
    seconds = [(o.seconds, i) for o, i in zip(record.trace.operations, record.signature_of, strict=True)]
    return sum(one for one, index in seconds if measured[index]) >= least_share * sum(one for one, _ in seconds)


def roofline_seconds(record: Record) -> float:
    """Forward and backward at round figures for every kernel: good for the proportion between two steps of one model."""
    guesses = [roofline(signature) for signature in record.signatures]
    operations = zip(record.trace.operations, record.signature_of, strict=True)
    return sum(guesses[index] for operation, index in operations if operation.phase != tr.OPTIMIZER)


def plan_words(plan: Plan) -> str:
    """What a plan does, in words."""
    done = []
    if plan.ranges:
        done.append(f"{len(plan.ranges)} range{'s' * (len(plan.ranges) > 1)} of torch calls recomputed in the backward")
    elif plan.recomputed:
        done.append(f"{len(plan.recomputed)} segment{'s' * (len(plan.recomputed) > 1)} recomputed in the backward")
    if plan.moves:
        done.append(f"{len(plan.moves)} saved tensor{'s' * (len(plan.moves) > 1)} held in fewer bytes")
    return ", ".join(done) or "everything kept"


# -- chunks of the loss -----------------------------------------------------------------------------------------------


def chunked_ways(record: Record, start: Way, extra_bytes: int = 0) -> tuple[list[Way], str]:
    """Head and loss in 2, 4, … chunks, from the record that ``start`` is of; or why not. ``extra_bytes`` are beside it."""
    trace = record.trace
    part = chunked.find_loss(trace)
    if part is None:
        return [], "no product whose result goes through a log-softmax was found at the end of the forward"
    rows, floor = _rows(record, part.softmax), start.floor
    found, chunks = [], 2
    while chunks <= min(MOST_CHUNKS, rows):
        working = chunked.chunked_peak(trace, part, chunks) + UNSEEN_BYTES + extra_bytes
        how = (
            "sum rt.checkpoint(lambda h, t: F.cross_entropy(head(h), t, reduction='sum'), h, t) over "
            f"hidden.chunk({chunks}) and targets.chunk({chunks}), divided by the number of targets"
        )
        fixed = "what the layers before the head keep; the loss has to be rewritten"
        way = replace(
            start,
            kinds=(*start.kinds, CHUNKED),
            what=_joined(start.what, f"head and loss in {chunks} chunks of rows"),
            how=_joined(start.how, how),
            floor=replace(floor, working_bytes=working),
            body_seconds=start.body_seconds + chunked.added_seconds(trace, part),
            by="estimate",
            result=start.result if start.kinds else SAME_BUT_ROUNDING,
            not_fixed=_joined(start.not_fixed, fixed),
        )
        found.append(way)
        chunks *= 2
    return found, "" if found else "the loss has one row"


def _joined(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second


def _rows(record: Record, softmax: int) -> int:
    made = pytree.tree_leaves(record.signatures[record.signature_of[softmax]].result)
    spec = next(leaf for leaf in made if isinstance(leaf, TensorSpec))
    rows = 1
    for size in spec.shape[:-1]:
        rows *= size
    return rows


# -- offload ----------------------------------------------------------------------------------------------------------


def rates(profile: Profile, folder: Path | None) -> tuple[float, float]:
    """Bytes per second out of memory and back: of the link to the host for a device, else of a file here."""
    if profile.device is None:
        return file_bandwidth(folder)
    link = link_bytes_per_second(profile.device.name)
    return link, link


def offload_way(profile: Profile, limit_bytes: int, rates: tuple[float, float]) -> Way:
    """As few saved activations as it takes, moved to a file (here) or to the host (for a device)."""
    moved = offload(profile.arithmetic, limit_bytes - UNSEEN_BYTES)
    trace = profile.arithmetic.trace
    floor = floor_of(trace, profile.arithmetic.levels())
    out, back = rates
    where = "a file" if profile.device is None else "the host"
    return Way(
        kinds=(OFFLOAD,),
        what=f"{moved.storages} saved activations ({format_bytes(moved.moved_bytes)}) to {where} until their backward",
        how="rt.plan(…, policy=rt.Policy(offload=FOLDER))",
        floor=replace(floor, working_bytes=moved.working_bytes + UNSEEN_BYTES),
        body_seconds=phase_seconds(trace)[0] + moved.moved_bytes / out + moved.moved_bytes / back,
        by="trace arithmetic",
        result=SAME_BYTES,
        not_fixed="weights, gradients and optimizer state; what is fetched ahead of its use is here earlier",
        moved_bytes=2 * moved.moved_bytes,
        at_most=True,
    )


def file_bandwidth(folder: Path | None = None) -> tuple[float, float]:
    """Bytes per second written to and read from a file in ``folder`` (the system's folder for temporary files unless
    given), by one write of 32 MiB that is synced and one read that no cache serves. The file is removed.

    Raises :class:`UsageError` where nothing can be written there.
    """
    data = os.urandom(SAMPLE_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            writing = _timed(lambda: _write(file, data))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            reading = _timed(file.read)
    except OSError as error:
        raise UsageError(
            f"offload to {folder or tempfile.gettempdir()} cannot be priced: {error}. Name another folder."
        ) from None
    return SAMPLE_BYTES / writing, SAMPLE_BYTES / reading


def _write(file: Any, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return max(time.perf_counter() - began, 1e-6)
