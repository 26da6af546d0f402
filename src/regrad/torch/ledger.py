"""What a step holds and what it allocates on CPU, to the byte: storages, and the profiler's memory events.

The profiler reports no free of memory that was allocated before it started, and it can report a stale one: its table of
sizes outlives a profile, so a block that is allocated unseen at an address of an earlier profile is "freed" with the
earlier block's size. Both are closed here:

1. The warm-up step runs under the profiler too, so that what a step replaces (gradients, buffers, the last batch) was
   born in sight.
2. A free counts only if the allocation was seen or the block was there before, and then with *that* size.
3. A block that was there before and has gone when the measured step begins is no part of its baseline.
4. A second allocation at one address proves that the first block is gone, whether its free was seen or not.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.profiler_util import MEMORY_EVENT_NAME
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

from regrad.core.errors import UsageError
from regrad.torch.step import FRESH, Step

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces every start and stop on stderr

_MARK = "regrad.measured_step"
_weak: Any = StorageWeakRef


class Peak(NamedTuple):
    """Bytes of one measured step: the peak, and what was live when it began (counted in the peak)."""

    peak_bytes: int
    baseline_bytes: int


class _Change(NamedTuple):
    time_ns: int
    address: int
    size: int


class _Block(NamedTuple):
    storage: Any
    address: int
    size: int


def storages(owner: Any) -> list[torch.UntypedStorage]:
    """Every storage that ``owner`` holds, once each.

    ``owner`` is a Step, a module, an optimizer, a tensor or a container of those. Of a module: parameters, their
    gradients, buffers, and tensors that are plain attributes of it or of its submodules; of an optimizer its state; of
    a Step all that and the batch. Storages that share their memory count once.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors(owner):
        storage = tensor.untyped_storage()
        known = found.get(storage.data_ptr())
        if storage.nbytes() and (known is None or known.nbytes() < storage.nbytes()):
            found[storage.data_ptr()] = storage
    return list(found.values())


def storage_bytes(owner: Any) -> int:
    """Bytes of :func:`storages`."""
    return sum(storage.nbytes() for storage in storages(owner))


def _tensors(owner: Any) -> Iterator[torch.Tensor]:
    if isinstance(owner, Step):
        owner = (owner.model, owner.optimizer, owner.batch)
    if isinstance(owner, nn.Module):
        # other modules only where they are registered: a plain attribute may point back to a parent
        held = pytree.tree_leaves([vars(module) for module in owner.modules()])
        leaves: list[Any] = [leaf for leaf in held if isinstance(leaf, torch.Tensor)]
    elif isinstance(owner, torch.optim.Optimizer):
        leaves = pytree.tree_leaves(list(owner.state.values()))
    else:
        leaves = pytree.tree_leaves(owner)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield from _dense(leaf)
            if leaf.is_leaf and leaf.grad is not None:
                yield from _dense(leaf.grad)
        elif isinstance(leaf, (Step, nn.Module, torch.optim.Optimizer)):
            yield from _tensors(leaf)


def _dense(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors that hold the bytes of ``tensor``."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


class Recording:
    """A profile of warm-up steps and one measured step, and the running sum of its memory events.

    ``before`` owns the storages that exist before the profile starts and count in the baseline. Use it as a context
    around :meth:`run`, then ask for :meth:`peak`.
    """

    def __init__(self, before: Any) -> None:
        gc.collect()
        self._before = [_Block(_weak(s), s.data_ptr(), s.nbytes()) for s in storages(before)]
        self._profile: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Recording:
        if torch._C._autograd._profiler_enabled():
            # a second one would start without a word and leave the first without its events
            raise UsageError("the step cannot be measured while another torch profiler is running; stop that one first")
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    def run(self, step: Callable[[], object], warmup: int) -> None:
        """Run ``warmup`` steps and the measured one. What a step returns is dropped at once.

        A Step with fresh gradients drops them first thing; they are dropped here, so that they are in no baseline.
        """
        fresh = isinstance(step, Step) and step.gradients == FRESH
        for _ in range(warmup):
            step()
        if fresh:
            step.clear_gradients()  # type: ignore[attr-defined]
        gc.collect()
        self._before = [block for block in self._before if not block.storage.expired()]
        with record_function(_MARK):
            step()

    def peak(self) -> Peak:
        """The highest running sum in the measured step. Call it when the profile has ended."""
        changes, begin = self._changes()
        live = {block.address: block.size for block in self._before}
        level = sum(live.values())
        baseline, highest = -1, 0
        for change in changes:
            if baseline < 0 and change.time_ns >= begin:
                baseline = highest = level
            level -= live.pop(change.address, 0)
            if change.size > 0:
                live[change.address] = change.size
                level += change.size
            highest = max(highest, level)
        return Peak(highest, baseline) if baseline >= 0 else Peak(level, level)

    def _changes(self) -> tuple[list[_Change], int]:
        """Allocations and frees on the CPU up to the end of the measured step, in order, and when that step begins."""
        changes: list[_Change] = []
        begin = end = 0
        todo = list(self._profile.profiler.kineto_results.experimental_event_tree())
        while todo:
            event = todo.pop()
            todo.extend(event.children)
            if event.name == _MARK:
                begin, end = event.start_time_ns, event.end_time_ns
            elif event.name == MEMORY_EVENT_NAME and event.extra_fields.device.type == "cpu":
                fields = event.extra_fields
                changes.append(_Change(event.start_time_ns, fields.ptr, fields.alloc_size))
        changes.sort(key=lambda change: change.time_ns)
        return [change for change in changes if change.time_ns <= end], begin
