"""What engines hold for one large buffer: write fraction × live versions × workload, in bytes that they counted.

    python -m regrad.bench.state_costs [--out FILE] [--quick]

Real engines on real bytes, no model of them: a buffer of 2 MiB in rows of 1 KiB, one segment a live version, each of
which reads a row and overwrites a share of the rows: the next ones of a ring (queue), random ones (scatter), or every
k-th one (strided). Then the backward replays all segments, newest first. Peaks include the live buffer. Percentages do
not depend on the buffer's size as long as a row is large against a header (32 bytes).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import regrad
from regrad.replay.engines.journal import Accounting, Journal
from regrad.replay.engines.snapshot import Snapshot
from regrad.replay.machine.memory import Memory
from regrad.replay.ranges import ByteRange, Ranges, RangeSet
from regrad.replay.retention import Engine, Retention, Subject
from regrad.replay.spec import StateSpec

ROW_BYTES = 1024
ROWS = 2048
BUFFER_BYTES = ROW_BYTES * ROWS
FRACTIONS = (0.001, 0.01, 0.1, 1.0)
LIVE_VERSIONS = (1, 4, 16, 64)
ENGINES: dict[str, Engine] = {
    "snapshot": Snapshot(),
    "union": Journal(Accounting.UNION),
    "shared log": Journal(),
}
BOUNDS = {"sparse_ratio": 0.02}  # write fraction 0.001, 64 live versions: shared log over whole snapshots


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine at one point. ``snapshot_ratio`` is its peak, live buffer included, over that of whole snapshots."""

    workload: str
    write_fraction: float
    live_versions: int
    engine: str
    retained_bytes: int
    transient_bytes: int
    peak_bytes: int
    header_bytes: int
    moved_bytes: int
    seconds: float
    snapshot_ratio: float
    exact: bool


def _queue(rows: int, segment: int, random: np.random.Generator) -> NDArray[np.int64]:
    return (segment * rows + np.arange(rows)) % ROWS


def _scatter(rows: int, segment: int, random: np.random.Generator) -> NDArray[np.int64]:
    return np.sort(random.permutation(ROWS)[:rows])


def _strided(rows: int, segment: int, random: np.random.Generator) -> NDArray[np.int64]:
    return np.sort((segment + np.arange(rows) * (ROWS // rows)) % ROWS)


WORKLOADS: dict[str, Callable[..., NDArray[np.int64]]] = {
    "queue": _queue,
    "scatter": _scatter,
    "strided": _strided,
}


def writes_of(workload: str, fraction: float, versions: int) -> list[Ranges]:
    """For each segment the ranges that it overwrites."""
    random = np.random.default_rng(0)
    rows = max(1, round(fraction * ROWS))
    found = []
    for segment in range(versions):
        chosen = WORKLOADS[workload](rows, segment, random)
        found.append(tuple(RangeSet(ByteRange("buffer", int(r) * ROW_BYTES, (int(r) + 1) * ROW_BYTES) for r in chosen)))
    return found


def measure(workload: str, fraction: float, versions: int, engine: Engine) -> tuple[Retention, bool, float]:
    """Run the forward and all replays; the retention with its meter, whether all bytes were right, and seconds."""
    memory = Memory({"buffer": BUFFER_BYTES}, {})
    whole = ByteRange("buffer", 0, BUFFER_BYTES)
    memory.write(whole, np.random.default_rng(1).integers(0, 256, BUFFER_BYTES, np.uint8))
    names = tuple(f"segment {index}" for index in range(versions))
    retention = engine.open(Subject(memory, StateSpec.declared(memory.sizes()), names))
    writes, sums, exact = writes_of(workload, fraction, versions), [], True
    begin = time.perf_counter()
    for segment, ranges in enumerate(writes):
        sums.append(_sum(memory))
        retention.enter(segment)
        retention.before_read((ByteRange("buffer", 0, ROW_BYTES),))
        retention.before_write(ranges)
        _overwrite(memory, ranges, segment)
        retention.leave()
    present = _sum(memory)
    for segment in reversed(range(versions)):
        with retention.replaying(segment):
            exact &= _sum(memory) == sums[segment]
            retention.before_write(writes[segment])
            _overwrite(memory, writes[segment], segment)
            exact &= _sum(memory) == (sums[segment + 1] if segment + 1 < versions else present)
        retention.release(segment)
    seconds = time.perf_counter() - begin
    return retention, exact and _sum(memory) == present, seconds


def _overwrite(memory: Memory, ranges: Ranges, segment: int) -> None:
    random = np.random.default_rng([2, segment])
    for where in ranges:
        memory.write(where, random.integers(0, 256, where.nbytes, np.uint8))


def _sum(memory: Memory) -> int:
    """A sum over the buffer in which every byte's place counts."""
    words = memory.read(ByteRange("buffer", 0, BUFFER_BYTES)).view(np.uint64)
    weights = np.arange(1, 2 * words.size, 2, dtype=np.uint64)
    return int(np.sum(words * weights, dtype=np.uint64))


def cells(
    fractions: Sequence[float] = FRACTIONS, versions: Sequence[int] = LIVE_VERSIONS, workloads: Sequence[str] = ()
) -> list[Cell]:
    """The table, row by row."""
    found = []
    for workload in workloads or WORKLOADS:
        for fraction in fractions:
            for live in versions:
                headers = 32 * sum(map(len, writes_of(workload, fraction, live)))
                whole = None
                for name, engine in ENGINES.items():
                    retention, exact, seconds = measure(workload, fraction, live, engine)
                    meter = retention.meter
                    peak = BUFFER_BYTES + meter.peak_retained_bytes
                    whole = whole or peak
                    found.append(
                        Cell(
                            workload=workload,
                            write_fraction=fraction,
                            live_versions=live,
                            engine=name,
                            retained_bytes=meter.peak_retained_bytes,
                            transient_bytes=meter.peak_transient_bytes,
                            peak_bytes=BUFFER_BYTES + meter.peak_bytes,
                            header_bytes=headers if name == "shared log" else 0,
                            moved_bytes=meter.gathered_bytes + meter.scattered_bytes,
                            seconds=seconds,
                            snapshot_ratio=peak / whole,
                            exact=exact,
                        )
                    )
    return found


def check(table: Sequence[Cell]) -> list[str]:
    """What in ``table`` is not as it must be; empty if all is."""
    found = [f"{c.engine} on {c.workload} restores other bytes" for c in table if not c.exact]
    for cell in table:
        if cell.engine != "shared log":
            continue
        if (cell.write_fraction, cell.live_versions) == (0.001, 64) and cell.snapshot_ratio > BOUNDS["sparse_ratio"]:
            found.append(f"{cell.workload} at 0.001 × 64: {cell.snapshot_ratio:.2%} of whole snapshots, more than 2 %")
        if cell.write_fraction == 1.0:
            whole = next(
                c
                for c in table
                if (c.engine, c.workload, c.write_fraction, c.live_versions)
                == ("snapshot", cell.workload, 1.0, cell.live_versions)
            )
            if cell.retained_bytes - cell.header_bytes != whole.retained_bytes:
                found.append(f"{cell.workload} at 1 × {cell.live_versions}: not equal to snapshots within its headers")
    return found


def _lines(table: Sequence[Cell]) -> list[str]:
    """The table as text: buffers held at the end of the forward, at the peak, and the share of whole snapshots."""
    found = [
        f"{'workload':9} {'fraction':>8} {'versions':>8}  {'engine':10} {'retained':>9} {'peak':>9} {'of snapshots':>13}"
    ]
    for c in table:
        held, peak = c.retained_bytes / BUFFER_BYTES, c.peak_bytes / BUFFER_BYTES
        point = f"{c.workload:9} {c.write_fraction:8g} {c.live_versions:8}"
        found.append(f"{point}  {c.engine:10} {held:9.3f} {peak:9.3f} {c.snapshot_ratio:13.2%}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table as JSON and say what is wrong with it, if anything."""
    parser = argparse.ArgumentParser(
        prog="python -m regrad.bench.state_costs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/state-costs_HARDWARE_DATE.json")
    parser.add_argument("--quick", action="store_true", help="the corners only")
    asked = parser.parse_args(arguments)
    table = cells((0.001, 1.0), (1, 64)) if asked.quick else cells()
    wrong = check(table)
    hardware = f"cpu-{platform.machine()}"
    out = asked.out or Path("benchmarks/results") / f"state-costs_{hardware}_{time.strftime('%Y-%m-%d')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "regrad": regrad.__version__,
        "theme": "state-costs",
        "hardware": hardware,
        "buffer_bytes": BUFFER_BYTES,
        "row_bytes": ROW_BYTES,
        "cells": [asdict(cell) for cell in table],
        "failures": wrong,
    }
    out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    for line in [*_lines(table), f"written to {out}", *(f"FAILED {text}" for text in wrong)]:
        print(line)  # noqa: T201 - the answer of a command
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
