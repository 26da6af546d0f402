"""What every condition must come to under every mode, and whether a run did."""

from __future__ import annotations

from typing import Any

CONDITIONS = {
    "A": "local view, read",
    "B": "local view, write",
    "C": "hidden buffer, overwrite",
    "D": "hidden buffer, accumulate",
    "E": "raw overlapping copy",
}
NOT_PRESERVED = ", no generator"
PLAIN = ("torch reentrant", "torch non-reentrant")
TORCH = tuple(name + more for name in (*PLAIN, "torch selective") for more in ("", NOT_PRESERVED))
ENGINES = ("snapshot", "journal", "read_set", "guarded")
OURS = tuple(f"regrad {engine} {state}" for engine in ENGINES for state in ("declared", "discovered"))
MODES = TORCH + OURS
STEPS = 3

EXACT, DIVERGED, REFUSED = "exact", "diverged", "refused"


def expected(condition: str, mode: str) -> str:
    """The verdict that must come out: the published one for torch's modes, the contract's for ours."""
    if condition == "E":
        return REFUSED  # eager refuses, so refusing is right
    if mode in TORCH and (mode.endswith(NOT_PRESERVED) or condition in "CD"):
        return DIVERGED
    return EXACT


def wrong(found: dict[str, Any]) -> str:
    """What is wrong with a run's record, in words; empty if it is as it must be.

    An exact run that did not run its segments again, or held what they made, is worthless and so wrong; and one of ours
    must have replayed every step by the engine's own count and kept nothing.
    """
    condition, mode, verdict = found["condition"], found["mode"], found["verdict"]
    wanted = expected(condition, mode)
    if verdict != wanted:
        return f"{verdict}, not {wanted}: {found.get('why', '')}"
    if wanted == REFUSED and not found["as_eager"]:
        return f"refused with another error than eager's: {found.get('why', '')}"
    if wanted == EXACT and not found["recomputed"]:
        return (
            f"exact and not recomputed: {found['bodies']} runs of the body in {found['steps']} steps, "
            f"{found['storages_alive']} of its storages held"
        )
    if wanted == EXACT and mode in OURS and (found["replays"] != STEPS or found["kept"]):
        return f"{found['replays']} replays in {STEPS} steps, kept: {found['kept']}"
    return ""


def caught(found: dict[str, Any]) -> bool:
    """Whether the record of a planted fault is told from a sound run's; some must be refused by the engine itself."""
    if found["refused_for"]:
        return found["verdict"] == REFUSED and found["refused_for"] in found["why"]
    sound = REFUSED if found["condition"] == "E" else EXACT
    right = found["verdict"] == sound and (found["as_eager"] if sound == REFUSED else found["recomputed"])
    return not right
