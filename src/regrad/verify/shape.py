"""What a program must have for a threshold to mean something, counted off its access log, not off its source."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from regrad.replay.machine.program import Affine, Copy, IntegerWrite, Operation, Scatter, Unannounced
from regrad.replay.machine.step import Job
from regrad.replay.machine.views import View

LEAST_WRITES = 16
LEAST_SEGMENTS = 3
LEAST_MEDIAN_GRADIENT = 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """Counts over one program.

    old_versions: versions that a segment found and read, and whose bytes are others at the end of the program.
    """

    writes: int
    segments: int
    overlapping_copies: int
    draws: int
    views_of_one_storage: int
    old_versions: int

    def missing(self) -> list[str]:
        """What it lacks; empty if it is as it should be."""
        found = []
        if self.writes < LEAST_WRITES:
            found.append(f"{self.writes} writes, not {LEAST_WRITES}")
        if self.segments < LEAST_SEGMENTS:
            found.append(f"{self.segments} segments, not {LEAST_SEGMENTS}")
        for name in ("overlapping_copies", "draws", "old_versions"):
            if not getattr(self, name):
                found.append(f"no {name.replace('_', ' ')}")
        if self.views_of_one_storage < 2:
            found.append("no two views of one storage")
        return found

    def record(self) -> dict[str, int]:
        """For a run's record."""
        return asdict(self)


def views_of(operation: Operation) -> tuple[View, ...]:
    """The views that an operation names."""
    if isinstance(operation, Unannounced):
        operation = operation.operation
    if isinstance(operation, Affine):
        return (operation.target, *(view for view, _ in operation.terms))
    if isinstance(operation, Scatter):
        return operation.target, operation.index, operation.source
    return operation.target, operation.source


def shape_of(job: Job, final: dict[str, bytes], entries: list[dict[str, bytes]]) -> Shape:
    """Count. ``final`` are the bytes at the end, ``entries`` those at the entry of each segment."""
    operations = [operation for segment in job.program.segments for operation in segment.operations]
    copies = [op for op in operations if isinstance(op, Copy) and op.target.overlaps(op.source)]
    views: dict[str, set[View]] = {}
    for operation in operations:
        for view in views_of(operation):
            views.setdefault(view.storage, set()).add(view)
    old = 0
    for log, entry in zip(job.log.segments, entries, strict=True):
        for where in log.read_at_entry():
            cut = slice(where.start, where.stop)
            old += entry[where.storage][cut] != final[where.storage][cut]
    return Shape(
        writes=sum(isinstance(op, (Affine, Copy, Scatter, IntegerWrite)) for op in operations),
        segments=len(job.program.segments),
        overlapping_copies=len(copies),
        draws=sum(len(log.draws) for log in job.log.segments),
        views_of_one_storage=max(map(len, views.values())),
        old_versions=old,
    )
