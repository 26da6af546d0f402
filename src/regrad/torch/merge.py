"""One trace from two records: the eager step, and a forward pass in which autograd kept nothing."""

from __future__ import annotations

from regrad.core.errors import CannotTrace
from regrad.core.trace import ACTIVATIONS, BACKWARD, Storage, Trace


def merge_lifetimes(eager: Trace, bare: Trace) -> None:
    """Give the storages of ``eager`` what ``bare`` knows: which nodes saved them, and when Python dropped them.

    Operations are compared by name. Raises :class:`CannotTrace` where the two forwards differ: such a model does not
    take the same path twice, and no recorded step would tell what the next one does.
    """
    stop = eager.phase_starts[BACKWARD]
    mine, theirs = eager.operations[:stop], bare.operations[: bare.phase_starts[BACKWARD]]
    for index, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one.name != other.name:
            raise CannotTrace(_differs(f"operation {index} is {one.name} in one run and {other.name} in the other"))
    if len(mine) != len(theirs):
        raise CannotTrace(_differs(f"one run has {len(mine)} operations, the other {len(theirs)}"))
    known: dict[int, int] = {}
    for one, other in zip(mine, theirs, strict=True):
        known.update(zip(other.makes + other.reads, one.makes + one.reads, strict=True))
    # Sequence numbers go on from run to run, so those of the bare pass are moved to where the eager one began.
    shift = mine[0].sequence - theirs[0].sequence if mine else 0
    for index, storage in enumerate(bare.storages):
        saves = tuple(save._replace(node=save.node + shift) for save in storage.saved_by)
        drop = storage.death if storage.death is not None and storage.death <= stop else None
        if index in known:
            target = eager.storages[known[index]]
            target.saved_by = saves
            target.drop = drop if target.birth >= 0 else None
        elif saves and storage.birth >= 0:
            # A Python number that became a tensor: seen by autograd alone, held by it alone.
            target = Storage(storage.bytes, ACTIVATIONS, storage.birth, storage.birth + 1, storage.birth, saves)
            target.drop = storage.birth + 1
            eager.storages.append(target)


def _differs(detail: str) -> str:
    return (
        f"the forward pass is not the same twice: {detail}. A step whose path depends on a counter, the time or the "
        "system's entropy cannot be planned; fix the path (or its seed) for the plan."
    )
