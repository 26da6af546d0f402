"""Memory that a caching allocator holds in pieces too small for what was asked for: read off its statistics."""

from __future__ import annotations

from collections.abc import Mapping

from regrad.core.advice import Trap
from regrad.core.units import format_bytes

FRAGMENTATION = "fragmentation"
LEAST_SHARE = 0.1
"""Of what is reserved: below this, pieces are what every allocator has."""


def fragmentation(stats: Mapping[str, int], asked_bytes: int | None = None) -> Trap | None:
    """The trap, or None, from ``torch.cuda.memory_stats()`` as it is when an allocation has failed.

    Bytes that the allocator reserved and nobody uses would have served: they are more than was asked for (or, where
    that is not known, than a tenth of what is reserved), they are at least a tenth of what is reserved, and they lie in
    pieces of blocks that are in use (``inactive_split_bytes``), so that they cannot be given back to the device either.
    """
    reserved = stats.get("reserved_bytes.all.current", 0)
    unused = reserved - stats.get("allocated_bytes.all.current", 0)
    split = stats.get("inactive_split_bytes.all.current", 0)
    if not reserved or min(unused, split) < LEAST_SHARE * reserved:
        return None
    if asked_bytes is not None and unused < asked_bytes:
        return None
    served = "" if asked_bytes is None else f"; {format_bytes(asked_bytes)} were asked for"
    return Trap(
        name=FRAGMENTATION,
        what=f"the allocator holds {format_bytes(unused)} of {format_bytes(reserved)} that no tensor uses, "
        f"{format_bytes(split)} of them in pieces between tensors{served}",
        modules=(),
        bytes=unused,
        cure="set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts (PYTORCH_CUDA_ALLOC_CONF in "
        "older releases); pad sequences to a few fixed lengths, so that blocks can be used again",
    )
