"""The blocks of a recorded step: what each is made of and keeps, and one of them beside the formula for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch.utils import _pytree as pytree

from regrad.core.errors import UsageError
from regrad.core.trace import BACKWARD, Storage, Trace
from regrad.memory.compare import Comparison, Kept, compare
from regrad.memory.estimate import Block
from regrad.memory.transformer import Layer
from regrad.torch.record import Record, TensorSpec
from regrad.torch.step import Step
from regrad.torch.translate import COUNTER_BYTES
from regrad.torch.watch import find_candidates

OUTSIDE = "loss and the rest"
_HIDDEN, _HEADS = ("hidden_size", "n_embd", "d_model"), ("num_attention_heads", "n_head", "num_heads")
_INNER, _GROUPS = ("intermediate_size", "n_inner", "ffn_dim"), ("num_key_value_heads",)
_GATED = {"silu", "swish"}


def _owner(names: list[str]) -> Callable[[str], str]:
    """From a module's name to the block that it lies in, or to itself if it lies in none."""
    known = sorted(names, key=len, reverse=True)

    def find(module: str) -> str:
        return next((one for one in known if module == one or module.startswith(one + ".")), module or OUTSIDE)

    return find


def _block_names(step: Step, trace: Trace) -> list[str]:
    found = [trace.calls[candidate.call].module for candidate in find_candidates(step.model, trace)]
    return list(dict.fromkeys(found))


def kept_by(trace: Trace, owner: Callable[[str], str]) -> dict[str, list[Storage]]:
    """What the forward made and is alive as the backward begins, by block."""
    stop = trace.phase_starts[BACKWARD]
    found: dict[str, list[Storage]] = {}
    for storage in trace.storages:
        if 0 <= storage.birth < stop and (storage.death is None or storage.death > stop):
            call = trace.operations[storage.birth].call
            module = trace.calls[call].module if call >= 0 else ""
            found.setdefault(owner(module), []).append(storage)
    return found


def blocks_of(step: Step, trace: Trace) -> tuple[Block, ...]:
    """Every block, and every module outside the blocks that has parameters or keeps something; neighbours that cost the
    same are folded. A weight that several share counts where it comes first."""
    owner = _owner(_block_names(step, trace))
    rows: dict[str, list[int]] = {}
    for call in trace.calls:
        rows.setdefault(owner(call.module), [0] * 5)
    seen: set[int] = set()
    for name, parameter in step.model.named_parameters():
        row = rows.setdefault(owner(name.rpartition(".")[0]), [0] * 5)
        storage = parameter.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        row[0] += parameter.numel()
        row[1] += storage.nbytes()
        row[2] += parameter.nbytes if parameter.requires_grad else 0
        row[3] += _state_bytes(step, parameter)
    for name, storages in kept_by(trace, owner).items():
        rows.setdefault(name, [0] * 5)[4] += sum(storage.bytes for storage in storages)
    rows[OUTSIDE] = rows.pop(OUTSIDE, [0] * 5)  # last, wherever it came up
    ordered = [(name, tuple(row)) for name, row in rows.items() if any(row)]
    blocks = []
    for figures, members in groupby(ordered, key=lambda row: row[1]):
        names = [name for name, _ in members]
        title = names[0] if len(names) == 1 else f"{names[0]} … {names[-1].rpartition('.')[2]}"
        blocks.append(Block(title, len(names), *figures))
    return tuple(blocks)


def _state_bytes(step: Step, parameter: torch.nn.Parameter) -> int:
    state = step.optimizer.state.get(parameter, {}) if step.optimizer is not None else {}
    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.nbytes > COUNTER_BYTES)


# -- one block beside the formula ---------------------------------------------------------------------------------


def beside_formula(step: Step, record: Record, plain: Trace, layer: Layer | None) -> Comparison | None:
    """One of the blocks beside the formula for a transformer layer; None where the model is not known to be one.

    ``plain`` is the record's trace before it was translated: its storages still have the sizes of their tensors.
    """
    size = _tokens(step.batch)
    names = _block_names(step, plain)
    if size is None or not names or (layer is None and getattr(step.model, "config", None) is None):
        return None
    block = names[len(names) // 2]
    stored = kept_by(record.trace, _owner(names)).get(block, [])
    kept = [_kept(record, plain, storage) for storage in stored]
    shape = layer or _layer(step.model.config)
    if shape is None:
        return None
    fused = any(
        "scaled_dot_product" in operation.name and operation.call >= 0
        for operation in plain.operations[: plain.phase_starts[BACKWARD]]
    )
    drawn = [one for one in kept if one.drawn]
    own = Layer(
        shape.hidden, shape.heads, shape.groups, shape.inner, shape.gated, shape.norm,
        "fused" if fused else "unfused", bool(drawn), next(step.model.parameters()).element_size(),
        max((one.element_bytes for one in drawn), default=1),
    )  # fmt: skip
    return compare(block, kept, own, batch=size[0], sequence=size[1])


def _kept(record: Record, plain: Trace, storage: Storage) -> Kept:
    """What a kept storage is: the tensor among its operation's results that has its size."""
    index = next(i for i, one in enumerate(record.trace.storages) if one is storage)
    size = plain.storages[index].bytes
    result = record.signatures[record.signature_of[storage.birth]].result
    specs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, TensorSpec)]
    spec = next((spec for spec in specs if math.prod(spec.shape) * spec.dtype.itemsize == size), None)
    width = spec.dtype.itemsize if spec is not None else 1
    draws = any(
        operation.draws and (index in operation.writes or index in operation.makes)
        for operation in plain.operations[storage.birth : storage.birth + 3]
    )
    is_mask = draws and (spec is None or spec.dtype == torch.bool or index not in plain.operations[storage.birth].makes)
    filled = draws and not plain.operations[storage.birth].draws
    return Kept(storage.bytes, size // width, width, is_mask or filled)


def _tokens(batch: Any) -> tuple[int, int] | None:
    """Batch and sequence: the shape of the first tensor of two dimensions and integers, which are tokens."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.dtype.is_floating_point:
            return int(leaf.shape[0]), int(leaf.shape[1])
    return None


def _layer(config: Any) -> Layer | None:
    """The shape of a layer as a configuration of transformers gives it; None where it does not."""

    def first(names: tuple[str, ...]) -> int:
        return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), 0)

    hidden, heads = first(_HIDDEN), first(_HEADS)
    if not hidden or not heads or getattr(config, "is_encoder_decoder", False):
        return None
    rms = hasattr(config, "rms_norm_eps")
    try:
        return Layer(
            hidden,
            heads,
            first(_GROUPS),
            first(_INNER),
            gated=rms and str(getattr(config, "hidden_act", "")) in _GATED,
            norm="rms-rounded" if rms else "layer",
        )
    except UsageError:
        return None
