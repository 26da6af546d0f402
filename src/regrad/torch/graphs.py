"""What graphs that are alive hold: the forward passes below a scalar, and the bytes that their nodes saved.

Nodes are asked for their raw saved tensors, so no hook of the user's runs and nothing is computed again; what a hook
packed is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

_RAW = "_raw_saved_"
_SUMS = {
    "AddBackward0",
    "SubBackward0",
    "MulBackward0",
    "DivBackward0",
    "NegBackward0",
    "StackBackward0",
    "SumBackward0",
}
"""Nodes that put scalars together. Below a stack of scalars and its sum or mean stand scalars too."""


@dataclass(frozen=True)
class Pass:
    """One forward pass: a graph that shares nothing with the others but the leaves.

    nodes     how many it has
    bytes     of distinct storages that its nodes saved, those of leaves left out; 0 once a backward has released them
    released  nodes that save tensors are there, and none of them has any left
    """

    nodes: int
    bytes: int
    released: bool


def passes(roots: Iterable[torch.Tensor]) -> tuple[Pass, ...]:
    """The forward passes below scalars, in no order. Cost: one visit of every node."""
    terms = {id(node): node for root in roots if root.grad_fn is not None for node in _terms(root.grad_fn)}
    groups: list[dict[Any, None]] = []
    for node in terms.values():
        mine = dict.fromkeys(_below(node))
        joined = [group for group in groups if not group.keys().isdisjoint(mine)]
        for group in joined:
            mine |= group
            groups.remove(group)
        groups.append(mine)
    seen: set[int] = set()
    return tuple(_pass(group, seen) for group in groups)


def saved_bytes(roots: Iterable[torch.Tensor], seen: set[int] | None = None) -> int:
    """Bytes of all that the graphs below ``roots`` hold, leaves and the storages in ``seen`` left out."""
    nodes: dict[Any, None] = {}
    for root in roots:
        if root.grad_fn is not None and root.grad_fn not in nodes:
            nodes |= dict.fromkeys(_below(root.grad_fn))
    return _pass(nodes, set() if seen is None else seen).bytes


def _terms(top: Any) -> Iterator[Any]:
    """The nodes of which ``top`` is a sum: what stands below nodes that only put scalars together."""
    pending, seen = [top], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or _is_leaf(node):
            continue
        seen.add(node)
        below = [following for following, _ in node.next_functions if following is not None and not _is_leaf(following)]
        stacks = node.name() != "SumBackward0" or any(one.name() == "StackBackward0" for one in below)
        if node.name() in _SUMS and below and stacks:
            pending += below
        else:
            yield node


def _is_leaf(node: Any) -> bool:
    return bool(node.name().endswith("AccumulateGrad"))


def _below(top: Any) -> Iterator[Any]:
    pending, seen = [top], {top}
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and not _is_leaf(following):
                seen.add(following)
                pending.append(following)


def _pass(nodes: Iterable[Any], seen: set[int]) -> Pass:
    """``seen`` are the storages that another pass counted."""
    count = size = held = saving = 0
    nodes = list(nodes)
    leaves = {
        following.variable.untyped_storage()._cdata
        for node in nodes
        for following, _ in node.next_functions
        if following is not None and hasattr(following, "variable")
    }
    for node in nodes:
        count += 1
        tensors = list(_saved(node))
        if tensors:
            saving += 1
            held += any(tensor is not None for tensor in tensors)
        for tensor in tensors:
            if tensor is None or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and storage._cdata not in leaves:
                seen.add(storage._cdata)
                size += storage.nbytes()
    return Pass(count, size, saving > 0 and held == 0)


def _saved(node: Any) -> Iterator[torch.Tensor | None]:
    """What a node saved, None for what was released or is packed by a hook."""
    for name in dir(type(node)):
        if name.startswith(_RAW):
            for raw in pytree.tree_leaves(getattr(node, name)):
                yield _data(raw)
    raw_tensors = getattr(node, "_raw_saved_tensors", None) if not hasattr(type(node), "_raw_saved_tensors") else None
    for raw in raw_tensors or ():
        yield _data(raw)


def _data(raw: Any) -> torch.Tensor | None:
    if raw is None:
        return None
    data = raw.data
    return data if isinstance(data, torch.Tensor) and raw.unpack_hook is None else None
