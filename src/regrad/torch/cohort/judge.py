"""What a run came to beside the eager run of the same program, as one record."""

from __future__ import annotations

from typing import Any

import torch

from regrad.torch.cohort.modes import Mode
from regrad.torch.cohort.trial import Outcome

MOST_TEXT = 240


def compare(eager: Outcome, other: Outcome, mode: Mode) -> dict[str, Any]:
    """The verdict on ``other``, and what stands behind it.

    verdict     "exact": every slot has eager's bits; "diverged": one has not, or it ran where eager refuses, or it
                refused and left other bytes than eager's refusal; "refused": it raised
    as_eager    for a refusal: with eager's own error, and eager refuses too
    recomputed  the body ran twice a step, and nothing that it made was held in between (which a mode that selects may)
    differs     kinds of slots that differ, the first one first; ``gradient_difference`` is |a - b| / max(1, |b|)
    """
    wrong = differing(eager, other)
    as_eager = other.raised is not None and other.raised == eager.raised
    if other.raised is not None and (eager.raised is None or not wrong):
        verdict = "refused"
    else:
        verdict = "diverged" if wrong or eager.raised else "exact"
    found: dict[str, Any] = {
        "mode": mode.name,
        "verdict": verdict,
        "as_eager": as_eager,
        "recomputed": other.bodies == 2 * other.steps > 0 and (mode.selects or not other.alive),
        "bodies": other.bodies,
        "steps": other.steps,
        "storages_alive": other.alive,
        "differs": list(dict.fromkeys(what.rstrip(" 0123456789") for _, what in wrong)),
        "gradient_difference": gradient_difference(eager, other),
    }
    if other.replays is not None:
        found["retained_bytes"] = other.retained_bytes
        found |= {"replays": other.replays, "kept": [list(entry) for entry in other.kept]}
    if other.raised:
        found["why"] = other.raised[:MOST_TEXT]
    elif wrong:
        found["why"] = f"step {wrong[0][0]}: {wrong[0][1]}"
    return found


def differing(eager: Outcome, other: Outcome) -> list[tuple[int, str]]:
    """(step, what) of all slots that only one run has or that have other bits, in eager's order."""
    missing = object()
    keys = dict.fromkeys([*eager.slots, *other.slots])
    return [key for key in keys if eager.slots.get(key, missing) != other.slots.get(key, missing)]


def gradient_difference(eager: Outcome, other: Outcome) -> float:
    """The largest difference of gradients, relative to eager's where those are above 1."""
    largest = 0.0
    for key, b in eager.gradients.items():
        a = other.gradients.get(key)
        if a is not None:
            largest = max(largest, float(((a - b).abs() / b.abs().clamp(min=1)).max()))
    return largest if torch.isfinite(torch.tensor(largest)) else 1e300
