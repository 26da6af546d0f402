"""What each segment touches in the eager step, from a tape; and which hooks stand inside it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from regrad.core.audit import ASSUMED, DECLARED, DISCOVERED, SegmentState, SlotUse
from regrad.torch.audit.probe import FORWARD, Call
from regrad.torch.audit.runs import Auditor, Run
from regrad.torch.audit.survey import GENERATOR_NAMES
from regrad.torch.audit.tape import Change, Op, Tape

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def changed_slots(run: Run) -> dict[Call, list[str]]:
    """For each call the slots that its forward changed, by the surveys at its borders; tensors' bytes are left out."""
    found: dict[Call, list[str]] = {}
    for (step, call), entry in run.borders.entries.items():
        after = next(
            t for m, t in run.borders.moments.items() if m.step == step and m.call == call and "forward" in m.kind
        )
        keys = [key for key in {**entry, **after} if entry.get(key) != after.get(key)]
        slots = [slot for slot, _ in keys if not slot.startswith(("argument ", "output "))]
        found.setdefault(call, []).extend(slots)
    return {call: list(dict.fromkeys(slots)) for call, slots in found.items()}


def segment_table(
    auditor: Auditor, eager: Run, tape: Tape, planned: Run | None, recomputed: set[Call]
) -> tuple[SegmentState, ...]:
    """One row a call, in the order of the calls."""
    changed = changed_slots(eager)
    modules = dict(auditor.world.step.model.named_modules())
    rows = []
    for call in dict.fromkeys(call for _, call in eager.borders.entries):
        ops = [op for op in tape.ops if op.call == call and op.role == FORWARD]
        changes = [change for change in tape.changes if change.call == call and change.role == FORWARD]
        uses = _uses(auditor, ops, changes, changed.get(call, []))
        uses += _untouched(auditor, modules[call.module], call.module, {use.slot for use in uses})
        ran = planned.borders if planned is not None else eager.borders
        rows.append(
            SegmentState(
                name=str(call), module=call.module, call=call.number, recomputed=call in recomputed,
                forwards=ran.forwards[call], replays=ran.replays[call], state=tuple(uses),
                hooks=tuple(_hooked(modules[call.module], call.module)),
            )
        )  # fmt: skip
    return tuple(rows)


def _uses(auditor: Auditor, ops: list[Op], changes: list[Change], changed: Iterable[str]) -> list[SlotUse]:
    reads: dict[str, str] = {}
    writes: dict[str, str] = {}
    drawn: dict[str, str] = {}
    for op in ops:
        for slot in op.reads:
            reads.setdefault(slot, op.line)
        writes.update(dict.fromkeys(op.writes, op.line))
        if op.draws:
            drawn[op.draws] = op.line
    lines = {change.slot: change.line for change in changes}
    for slot in changed:
        # The same memory can change under a slot of its own, or be another tensor that was put in its place.
        writes.setdefault(slot, lines.get(slot, ""))
    sizes = _sizes(auditor)
    found = []
    for slot in dict.fromkeys([*reads, *writes, *drawn]):
        if slot in drawn or _is_generator(slot):
            found.append(SlotUse(slot, 0, "drawn", DISCOVERED, "", drawn.get(slot) or writes.get(slot, "")))
        elif slot in writes or not slot.startswith("parameter "):
            use = "read and written" if slot in reads and slot in writes else "written" if slot in writes else "read"
            use = "changed" if use == "written" and slot not in sizes else use
            how = DECLARED if slot.startswith(("buffer ", "parameter ")) else DISCOVERED
            if not slot.startswith("tensor batch"):
                found.append(SlotUse(slot, sizes.get(slot, 0), use, how, reads.get(slot, ""), writes.get(slot, "")))
    return found


def _is_generator(slot: str) -> bool:
    return slot in GENERATOR_NAMES.values() or slot.startswith(("torch.Generator ", "numpy.", "random.Random "))


def _sizes(auditor: Auditor) -> dict[str, int]:
    world = auditor.world
    sizes = {slot: world.bytes[key][1].nbytes for key, slot in auditor.surveyor.storages.items() if key in world.bytes}
    return sizes | {slot: before.nbytes for slot, _, before in world.hidden.values()}


def _untouched(auditor: Auditor, module: nn.Module, path: str, seen: set[str]) -> list[SlotUse]:
    found = []
    for name, buffer in module.named_buffers(path):
        slot = f"buffer {name}"
        if slot not in seen and buffer.numel():
            found.append(SlotUse(slot, buffer.untyped_storage().nbytes(), "untouched", ASSUMED))
    return found


def _hooked(module: nn.Module, path: str) -> list[str]:
    return [
        f"{path}.{name}".rstrip(".")
        for name, inner in module.named_modules()
        if name and any(getattr(inner, table) for table in _HOOKS)
    ]
