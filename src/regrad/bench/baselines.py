"""What is done without a planner: torch's checkpoint around blocks, chosen by a rule with one number in it.

Each setting is put on a model in place; the model is thrown away afterwards. Settings of a method are tried from the
least work on, where work is the forward seconds of what runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from regrad.bench.blocks import Block

Install = Callable[[nn.Module], None]
Span = tuple[str, ...]

FIRST_K, EVERY_K, SEGMENTS, EVERY_BLOCK, SELECTIVE = METHODS = (
    "first k blocks",
    "every k-th block",
    "best segment count",
    "every block",
    "torch selective",
)

LINEAR = ("aten::mm", "aten::addmm", "aten::convolution")
FUSED_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
)
POLICIES = {
    "products": (*LINEAR, *FUSED_ATTENTION, "aten::bmm", "aten::baddbmm"),
    "linear": (*LINEAR, *FUSED_ATTENTION),
}
"""Selective policies by the kernels whose results they save; without fused attention batched products are its scores."""


@dataclass(frozen=True)
class Setting:
    """One way to run a model. ``work_seconds`` are forward seconds that run again; ``install`` changes a model in place."""

    method: str
    label: str
    work_seconds: float
    install: Install


class _Again:
    """In place of a block's ``forward``: torch's checkpoint around it, or around it and the blocks after it."""

    def __init__(self, forwards: Sequence[Callable[..., Any]], **options: Any) -> None:
        self.forwards, self.options = tuple(forwards), options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._run, *args, use_reentrant=False, **self.options, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        result = self.forwards[0](*args, **kwargs)
        for forward in self.forwards[1:]:
            result = forward(result)
        return result


def _hand_on(value: Any) -> Any:
    """The ``forward`` of a block that has run already, as part of the span that the block before it opened."""
    return value


def install_spans(spans: Sequence[Span], model: nn.Module, **options: Any) -> None:
    """Put torch's checkpoint around each span of consecutive blocks, ``options`` as of ``torch.utils.checkpoint``."""
    modules = dict(model.named_modules())
    for span in spans:
        forwards = [modules[name].forward for name in span]
        object.__setattr__(modules[span[0]], "forward", _Again(forwards, **options))
        for name in span[1:]:
            object.__setattr__(modules[name], "forward", _hand_on)


def _around(blocks: Sequence[Block]) -> Install:
    return partial(install_spans, [(block.name,) for block in blocks])


def _selective(blocks: Sequence[Block], saved: Sequence[str]) -> Install:
    def policy(context: Any, kernel: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = kernel._schema.name if isinstance(kernel, torch._ops.OpOverload) else ""
        return CheckpointPolicy.MUST_SAVE if name in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda model: install_spans([(block.name,) for block in blocks], model, context_fn=contexts)


def cut_spans(blocks: Sequence[Block], count: int) -> list[list[Block]]:
    """``blocks`` in ``count`` parts whose lengths differ by one at most; parts are cut where no hand-off is proved."""
    spans: list[list[Block]] = []
    part = -1
    for position, block in enumerate(blocks):
        if not block.follows or position * count // len(blocks) != part:
            spans.append([])
        part = position * count // len(blocks)
        spans[-1].append(block)
    return spans


def _work(blocks: Sequence[Block]) -> float:
    return sum(block.forward_seconds for block in blocks)


def _settings(blocks: Sequence[Block]) -> Iterator[Setting]:
    count = len(blocks)
    for k in range(1, count + 1):
        yield Setting(FIRST_K, f"k = {k}", _work(blocks[:k]), _around(blocks[:k]))
        yield Setting(EVERY_K, f"k = {k}", _work(blocks[::k]), _around(blocks[::k]))
        for policy, saved in POLICIES.items():
            # What is saved is not run again: this orders the settings, it does not price them.
            yield Setting(SELECTIVE, f"{policy}, k = {k}", _work(blocks[:k]), _selective(blocks[:k], saved))
    known = set()
    for segments in range(1, count + 1):
        spans = cut_spans(blocks, segments)
        # As torch's checkpoint_sequential: the last one's backward comes first, nothing is gained by running it twice.
        names = tuple(tuple(block.name for block in span) for span in spans[:-1])
        if names and names not in known:
            known.add(names)
            yield Setting(
                SEGMENTS, f"{len(spans)} segments", sum(map(_work, spans[:-1])), partial(install_spans, names)
            )
    yield Setting(EVERY_BLOCK, f"{count} blocks", _work(blocks), _around(blocks))


def settings_of(blocks: Sequence[Block]) -> dict[str, list[Setting]]:
    """The settings of each method, those with the least work first."""
    found: dict[str, list[Setting]] = {method: [] for method in METHODS}
    for setting in _settings(blocks):
        found[setting.method].append(setting)
    return {method: sorted(settings, key=lambda one: one.work_seconds) for method, settings in found.items()}
