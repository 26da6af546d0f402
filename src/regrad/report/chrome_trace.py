"""A timeline in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from regrad.core.timeline import Slot, Timeline
from regrad.core.trace import CATEGORIES, PHASES

UNTIMED_SECONDS = 1e-6
"""What an operation is drawn as if the step was not timed."""


def chrome_trace(timeline: Timeline) -> str:
    """JSON with ``traceEvents``: a row of operations for each phase, and counters of live bytes by category.

    Times are microseconds. Where operations were not timed each lasts one.
    """
    events: list[dict[str, Any]] = [_named("process_name", 0, "training step")]
    for row, phase in enumerate(PHASES, start=1):
        events.append(_named("thread_name", row, phase))
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": row, "args": {"sort_index": row}})
    timed = timeline.seconds > 0
    for number, slot in enumerate(timeline.slots):
        start = slot.start_seconds if timed else number * UNTIMED_SECONDS
        events.append(_operation(slot, start * 1e6, (slot.seconds if timed else UNTIMED_SECONDS) * 1e6))
        levels = {category: timeline.category_bytes[category][number] for category in CATEGORIES}
        events.append({"name": "live bytes", "ph": "C", "pid": 1, "tid": 0, "ts": start * 1e6, "args": levels})
        if number == timeline.peak_slot:
            name = f"peak: {timeline.peak_bytes:,} bytes"
            events.append({"name": name, "ph": "i", "s": "p", "pid": 1, "tid": 0, "ts": start * 1e6})
    figures = {
        "peak_bytes": timeline.peak_bytes,
        "eager_peak_bytes": timeline.eager_peak_bytes,
        "budget_bytes": timeline.budget_bytes,
        "device": timeline.device,
        "timed": timed,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": figures})


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}


def _operation(slot: Slot, start: float, length: float) -> dict[str, Any]:
    said = {"module": slot.module, "where": slot.where, "replayed": slot.replayed}
    event = {
        "name": slot.operation,
        "cat": "replay" if slot.replayed else slot.phase,
        "ph": "X",
        "pid": 1,
        "tid": 1 + PHASES.index(slot.phase),
        "ts": start,
        "dur": length,
        "args": said,
    }
    return event | ({"cname": "terrible"} if slot.replayed else {})
