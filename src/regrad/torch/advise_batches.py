"""The same step in micro-batches and in mixed precision: steps to be recorded, and the ways that their records make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from regrad.core.advice import MICRO_BATCH, MIXED, OTHER_ROUNDING, OTHER_TRAINING, SAME_BUT_ROUNDING
from regrad.core.trace import Trace
from regrad.memory.advice import Way
from regrad.torch.advise_ways import way_of
from regrad.torch.step import KEPT, Step


def batch_size(batch: Any) -> int | None:
    """The first dimension, where all tensors of a batch that have one share it; else None."""
    sizes = {leaf.shape[0] for leaf in _leaves(batch) if leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _leaves(batch: Any) -> list[torch.Tensor]:
    plain = dict(batch) if isinstance(batch, Mapping) else batch
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in _leaves(batch)]


def batch_bytes(batch: Any) -> int:
    """Bytes of the tensors of a batch."""
    return sum(leaf.nbytes for leaf in _leaves(batch))


def sliced(batch: Any, size: int) -> Any:
    """The first ``size`` examples of a batch whose tensors share their first dimension, as tensors of their own."""
    plain = dict(batch) if isinstance(batch, Mapping) else batch
    return pytree.tree_map(lambda x: x[:size].clone() if isinstance(x, torch.Tensor) and x.dim() else x, plain)


@dataclass(frozen=True)
class Micro:
    """A step on part of the batch, whose gradients are summed; ``extra_bytes`` of the batch are there beside its part."""

    size: int
    parts: int
    step: Step
    extra_bytes: int


def micro_steps(step: Step) -> list[Micro] | str:
    """Micro-batches of half the batch, a quarter, … one example; or why there are none."""
    whole = batch_size(step.batch)
    if whole is None:
        return "the batch has no dimension that all of its tensors share; give Step(…, make_batch=…) and one that has"
    if whole == 1:
        return "the batch is one example already"
    sizes: list[int] = []
    while whole > 1 and (not sizes or sizes[-1] > 1):
        sizes.append((sizes[-1] if sizes else whole) // 2)
    found = []
    for size in sizes:
        part = sliced(step.batch, size)
        made = part if step.make_batch is None else step.make_batch(size)
        extra = 0
        if step.make_batch is None or _shapes(made) != _shapes(part):  # examples of another length are another step
            made, extra = part, batch_bytes(step.batch) - batch_bytes(part)
        # From the second part on the gradients of the first are there: the dearest of the parts is that of kept ones.
        changed = Step(step.model, made, step.loss, step.optimizer, gradients=KEPT)
        found.append(Micro(size, -(-whole // size), changed, extra))
    return found


def micro_way(micro: Micro, trace: Trace, body_seconds: float | None = None, *, timed: bool = True) -> Way:
    """Micro-batches as a way, from the record of one of them; ``body_seconds`` is its time where that is not the
    record's."""
    found = way_of(trace)
    floor = found.floor
    normed = _has_batch_norm(micro.step)
    warning = ", and batch norm sees the smaller batch" if normed else ""
    return Way(
        kinds=(MICRO_BATCH,),
        what=f"{micro.parts} micro-batches of {micro.size}, gradients summed",
        how=f"for part in parts: (loss(model, part) / {micro.parts}).backward(); then optimizer.step()",
        floor=replace(
            floor,
            working_bytes=floor.working_bytes + micro.extra_bytes,
            others_bytes=floor.others_bytes + micro.extra_bytes,
        ),
        body_seconds=micro.parts * (found.body_seconds if body_seconds is None else body_seconds),
        by="trace",
        result=OTHER_TRAINING if normed else SAME_BUT_ROUNDING,
        not_fixed="weights, gradients and optimizer state. Scaling the loss by the number of parts is up to you; a mean "
        f"over unequal parts needs their weights, a loss across examples (contrastive) is another one on parts{warning}",
        timed=timed,
    )


def _has_batch_norm(step: Step) -> bool:
    return any("BatchNorm" in type(module).__name__ and module.training for module in step.model.modules())


def mixed(step: Step) -> Step:
    """The step with its forward under autocast to bf16."""
    given, kind = step.loss, step.device.type

    def under_autocast(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(kind, dtype=torch.bfloat16):
            return Step(model, batch, given).compute_loss()

    return Step(step.model, step.batch, under_autocast, step.optimizer, gradients=step.gradients)


def mixed_words(step: Step) -> dict[str, Any]:
    """What a suggestion of autocast says."""
    return {
        "kinds": (MIXED,),
        "what": "forward under autocast to bf16",
        "how": f'with torch.autocast("{step.device.type}", dtype=torch.bfloat16): loss = …',
        "result": OTHER_ROUNDING,
        "not_fixed": "weights, gradients and optimizer state stay in FP32",
    }
