"""Learns a :class:`WorkspaceTable` on this machine: small real steps are recorded, and every kernel in them is run alone.

Cost: about 20 s and some hundred MiB on one thread (``quick``: about 4 s); more where threads wait for shared cores.
Workspace depends on the number of threads, so calibrate with the number that trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from regrad.torch.calibration_steps import cases
from regrad.torch.clock import Clock
from regrad.torch.dryrun import Rehearsal
from regrad.torch.record import Signature, TensorSpec
from regrad.torch.workspace_table import Entry, WorkspaceTable, describe

_LEAST_BYTES = 4096
"""Operations that never hold as much for themselves are left out: no plan turns on them."""
_NO_LIMIT_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Change:
    """How the entries of one operation compare with another table's.

    entries  how many there are now; of these ``same`` are equal, ``changed`` differ, ``new`` are not in the other table
    largest_change_bytes   the workspace now less that before, where that is largest either way; ``arguments`` says where
    """

    operation: str
    entries: int
    same: int
    changed: int
    new: int
    largest_change_bytes: int
    arguments: str


def learn(*, quick: bool = False, progress: Callable[[str, float], None] | None = None) -> WorkspaceTable:
    """Measure workspace and results of common CPU operations. The caller's generators are left as they were."""
    clock = Clock(limit_seconds=_NO_LIMIT_SECONDS, table=WorkspaceTable())
    found: dict[str, dict[str, Entry]] = {}
    decided: set[str] = set()
    chosen = cases(quick=quick)
    for done, case in enumerate(chosen):
        if progress is not None:
            progress("measuring workspace", done / len(chosen))
        record = Rehearsal(case.step()).record()
        clock.read(record)
        for signature in record.signatures:
            reading = clock.readings[signature.key]
            if not reading.measured or reading.made_bytes is None:
                continue
            name, arguments = str(signature.func), describe(signature)
            held = reading.workspace_bytes or 0
            found.setdefault(name, {})[arguments] = Entry(
                arguments, _argument_bytes(signature), held, reading.made_bytes
            )
            if _decides(signature, reading.made_bytes):
                decided.add(name)
    kept = {
        name: entries
        for name, entries in found.items()
        if name in decided or max(entry.workspace_bytes for entry in entries.values()) >= _LEAST_BYTES
    }
    return WorkspaceTable.of((name, entry) for name, entries in kept.items() for entry in entries.values())


def _argument_bytes(signature: Signature) -> int:
    specs = [leaf for leaf in signature.leaves if isinstance(leaf, TensorSpec)]
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def _decides(signature: Signature, made: tuple[int, ...]) -> bool:
    """Whether the kernel itself decides how large a result is: fake tensors give it no bytes."""
    results = signature.result if isinstance(signature.result, (tuple, list)) else (signature.result,)
    specs = [item for item in results if isinstance(item, TensorSpec)]
    return len(specs) == len(made) and any(0 in s.shape and size > 0 for s, size in zip(specs, made, strict=True))


def compare(table: WorkspaceTable, before: WorkspaceTable) -> list[Change]:
    """What ``table`` says otherwise than ``before``, a row for each of its operations."""
    changes = []
    for name, entries in table.operations.items():
        old = before.operations.get(name, {})
        gaps = {a: e.workspace_bytes - old[a].workspace_bytes for a, e in entries.items() if a in old}
        differing = [a for a in gaps if gaps[a] or entries[a].made_bytes != old[a].made_bytes]
        at = max(differing, key=lambda a: abs(gaps[a]), default="")
        changes.append(
            Change(
                name, len(entries), len(gaps) - len(differing), len(differing), len(entries) - len(gaps),
                gaps.get(at, 0), at,
            )
        )  # fmt: skip
    return changes
