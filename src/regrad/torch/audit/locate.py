"""Where two runs parted: both are done again with a tape, and what the tapes say is put beside each other."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from regrad.core.audit import Divergence
from regrad.torch.audit.compare import Difference, first_difference
from regrad.torch.audit.probe import BACKWARD, FORWARD, OUTSIDE, REPLAY, Borders, Call
from regrad.torch.audit.runs import Auditor, Run, Under
from regrad.torch.audit.survey import BYTES, IDENTITY, Key, show
from regrad.torch.audit.suspects import suspects
from regrad.torch.audit.tape import SILENT, Change, Op, Tape

_COMPUTED = re.compile(r"(output \d+ of|gradient of argument \d+ of|gradient of|loss|argument \d+ of)\b")
_GRADIENT = "gradient of "


@dataclass(frozen=True)
class Lead:
    """One explanation: since when (position on the tape), which slot, what did it."""

    at: int
    slot: str
    name: str
    line: str
    call: Call | None
    how: str


def taped(auditor: Auditor, under: Under, slots: list[str], *, digests: bool = True) -> tuple[Run, Tape]:
    """A run with a tape that looks at ``slots``."""
    tapes: list[Tape] = []

    def watch(borders: Borders) -> object:
        looked_at = suspects(auditor.surveyor, slots)
        tapes.append(Tape(borders, auditor.surveyor, looked_at, digests=digests, lines=bool(looked_at)))
        return tapes[0].recording()

    run = auditor.run(under, watch)  # type: ignore[arg-type]
    tapes[0].finish()
    return run, tapes[0]


def divergence(auditor: Auditor, found: Difference, reference: Under, under: Under) -> Divergence:
    """Name the first difference between a run under ``reference`` and one under ``under``. Runs the step twice more."""
    slots = [slot for slot, _ in found.keys]
    eager, eager_tape = taped(auditor, reference, slots)
    other, tape = taped(auditor, under, slots)
    again = first_difference(eager, other)
    if again is None or again.moment != found.moment:
        return _described(found, None, auditor.names)
    leads = [*_replay_leads(again, other, tape), *_change_leads(again, eager_tape, tape)]
    leads += _computed_lead(again, other, eager_tape, tape)
    return _described(again, min(leads, key=lambda lead: lead.at, default=None), auditor.names)


def _described(found: Difference, lead: Lead | None, names: list[str]) -> Divergence:
    key = _key_of(found, lead)
    slot = lead.slot if lead is not None and key is None else (key or found.keys[0])[0]
    call = lead.call if lead is not None and lead.call is not None else found.moment.call
    segment = str(call) if call else next((name for name in names if f" {name}." in slot), "")
    eager, other = found.values(key) if key is not None else (None, None)
    aspect = "identity" if key is not None and key[1] == IDENTITY else "value"
    shown = ("", "") if key is None or key[1] == BYTES or eager == other else (show(eager), show(other))
    unseen = "it did not come again while operations were recorded"
    return Divergence(
        moment=str(found.moment), step=found.moment.step, segment=segment, slot=slot, aspect=aspect,
        operation="" if lead is None else lead.name, line="" if lead is None else lead.line,
        how=unseen if lead is None else lead.how, eager=shown[0], found=shown[1],
    )  # fmt: skip


def _key_of(found: Difference, lead: Lead | None) -> Key | None:
    """The key of the lead's slot, values before identities."""
    slot = lead.slot if lead is not None else found.keys[0][0]
    keys = [key for key in found.keys if key[0] == slot]
    return min(keys, key=lambda key: key[1] == IDENTITY, default=None)


def _window(found: Difference, tape: Tape) -> tuple[int, int]:
    """The part of a tape between the last moment without a difference and the first with one."""
    start = tape.marks.get(found.before, 0) if found.before is not None else 0
    return start, tape.marks.get(found.moment, tape.end)


def _begin_of_step(found: Difference, tape: Tape) -> int:
    marks = [at for moment, at in tape.marks.items() if moment.step < found.moment.step]
    return max(marks, default=0)


# -- a replay that computes something else than its forward ---------------------------------------------------------------


def _replay_leads(found: Difference, other: Run, tape: Tape) -> Iterator[Lead]:
    start, stop = _window(found, tape)
    if any(_COMPUTED.match(slot) for slot, _ in found.keys):
        start = _begin_of_step(found, tape)
    step = found.moment.step
    replays = [op for op in tape.ops if op.role == REPLAY and op.step == step and start <= op.at < stop]
    for call in dict.fromkeys(op.call for op in replays):
        if call is None:
            continue
        again = [op for op in replays if op.call == call and op.name not in SILENT]
        first = [
            op
            for op in tape.ops
            if op.call == call and op.step == step and op.role == FORWARD and op.name not in SILENT
        ]
        for one, two in zip(first, again, strict=False):
            if one.name != two.name or one.outs != two.outs:
                yield _replay_lead(one, two, other.borders.stale.get((step, call), []), tape)
                break


def _replay_lead(first: Op, again: Op, stale: list[Key], tape: Tape) -> Lead:
    """Which state the replay found otherwise than its forward did, where it shows first."""
    assert again.call is not None
    line = again.line or first.line
    slot = ""
    for one, two in zip(first.inputs, again.inputs, strict=False):
        if first.name == again.name and one[1] != two[1]:
            slot = two[0] or one[0]
            break
    if not slot and first.name == again.name and again.draws:
        slot = again.draws
    if not slot:
        slot = _likely(stale, again)
    if not slot:
        how = "the replay computes another value from what it was given; no state that was found explains it"
        return Lead(again.at, f"result of {again.name}", again.name, line, again.call, how)
    how = "the replay finds it as it is now, and its forward found it as it was then"
    writer = next((op for op in reversed(tape.ops) if op.at < again.at and slot in op.writes), None)
    if writer is not None:
        how += f"; {writer.name} wrote it" + (f" at {writer.line}" if writer.line else "")
    return Lead(again.at, slot, again.name, line, again.call, how)


def _likely(stale: list[Key], op: Op) -> str:
    """Of what a replay found changed, what an operation most likely read: named on its line, inside its segment."""
    assert op.call is not None
    file, _, number = op.line.rpartition(":")
    source = linecache.getline(file, int(number)) if file and number.isdigit() else ""

    def rank(key: Key) -> tuple[bool, bool, bool]:
        slot = key[0]
        name = re.split(r"[. \[]", slot.partition("[")[0])[-1]
        inside = f" {op.call.module}." in slot or slot.endswith(f" of {op.call}")  # type: ignore[union-attr]
        return not (bool(name) and name in source), not inside, key[1] == IDENTITY

    return min(stale, key=rank)[0] if stale else ""


# -- state that was written otherwise -------------------------------------------------------------------------------------


def _change_leads(found: Difference, eager_tape: Tape, tape: Tape) -> Iterator[Lead]:
    start, stop = _window(found, tape)
    eager_start, eager_stop = _window(found, eager_tape)
    for slot in dict.fromkeys(slot for slot, _ in found.keys):
        if slot.startswith(_GRADIENT):
            begin, eager_begin = _begin_of_step(found, tape), _begin_of_step(found, eager_tape)
            lead = _gradient_lead(
                slot, _changes(eager_tape, slot, eager_begin, eager_stop), _changes(tape, slot, begin, stop)
            )
            if lead is not None:
                yield lead
            continue
        here = _changes(tape, slot, start, stop)
        if here:
            yield replace(_change_lead(here[-1], found), at=here[0].at)
            continue
        there = _changes(eager_tape, slot, eager_start, eager_stop)
        if there:
            lead = _change_lead(there[-1], found)
            yield replace(lead, at=stop, how="the eager step changes it here, and this one does not")


def _changes(tape: Tape, slot: str, start: int, stop: int) -> list[Change]:
    return [change for change in tape.changes if change.slot == slot and start <= change.at < stop]


def _change_lead(change: Change, found: Difference) -> Lead:
    where = {
        REPLAY: "its replay wrote it, and it was not put back",
        FORWARD: "the forward wrote another value",
        OUTSIDE: "it was written outside the body of a segment",
        BACKWARD: "the backward wrote it",
    }[change.role]
    call = change.call or found.moment.call
    return Lead(change.at, change.slot, change.name, change.line, call, where)


def _gradient_lead(slot: str, eager: list[Change], here: list[Change]) -> Lead | None:
    """A gradient that a different number of writes went into; wrong values alone come from elsewhere."""
    if len(here) == len(eager):
        return None
    extra = next((c for i, c in enumerate(here) if i >= len(eager) or c.value != eager[i].value), None)
    if extra is None:
        return None
    how = f"{len(here)} writes went into it, and {len(eager)} in the eager step"
    return Lead(extra.at, slot, extra.name, extra.line, extra.call, how)


# -- values that came out otherwise ---------------------------------------------------------------------------------------


def _computed_lead(found: Difference, other: Run, eager_tape: Tape, tape: Tape) -> list[Lead]:
    """The first operation, replays aside, that gives another result than in the eager step.

    Operations that an engine adds between a border and the body are no difference until their results are used.
    """
    stop = _window(found, tape)[1]
    slots = [slot for slot, _ in found.keys if _COMPUTED.match(slot)]
    if not slots:
        return []
    eager = [op for op in eager_tape.ops if op.name not in SILENT]
    added: list[Op] = []
    at = 0
    for op in tape.ops:
        if op.at >= stop or at >= len(eager):
            break
        if op.name in SILENT or op.role == REPLAY:
            continue
        if op.name == eager[at].name and op.outs == eager[at].outs:
            at += 1
        elif op.name != eager[at].name or (op.role == OUTSIDE and op.call is not None):
            added.append(op)
        else:
            used = {one for _, one in op.inputs}
            cause = next((one for one in added if one.outs and one.outs[0] in used), None)
            altered = [] if op.call is None else other.borders.altered.get((op.step, op.call), [])
            if altered and op.role == FORWARD:
                return [_lead_of(_likely(altered, op), op, "the engine changed it before it ran the body")]
            if cause is None:
                return [_lead_of(slots[0], op, "it gives another value than in the eager step")]
            return [_lead_of(slots[0], cause, _ADDED)]
    values = [found.values(key)[1] for key in found.keys if key[0] == slots[0]]
    given = {value[-1] for value in values if isinstance(value, tuple)}
    return [_lead_of(slots[0], op, _ADDED) for op in added if op.outs and op.outs[0][-1] in given][-1:]


_ADDED = "the engine computes it, and the eager step does not"


def _lead_of(slot: str, op: Op, how: str) -> Lead:
    return Lead(op.at, slot, op.name, op.line, op.call, how)
