"""torch's own planner of selective checkpoints, ``torch.distributed._tools.sac_ilp``, as a baseline.

Its parts are used as they are: the memory tracker, the estimator, the program that chooses blocks and the one that
chooses operations in a block. One is not: its estimates of time ask a CUDA device, so on a CPU operations are timed by
running them there. It needs ``pulp`` and ``pwlf``: the extra ``bench``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.util import find_spec
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import regrad.torch as rt
from regrad.bench.baselines import Setting, install_spans
from regrad.bench.blocks import Block
from regrad.bench.zoo import ZOO
from regrad.core.errors import UsageError
from regrad.torch.store import fake_copy

SAC_ILP = "torch sac_ilp"
NEEDS = ("pulp", "pwlf")
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Budgets that its program is given, as shares of what it takes for the eager peak: it is the measured peak that counts."""
MOST_SECONDS = 900
_GIB = 2**30
_RUNS = 2


Decisions = tuple[Sequence[str], Sequence[int]]
"""Operations of a block in order, and for each 1 if its result is saved."""


class _Clock:
    """Milliseconds of an operation on this CPU; equal operations are timed once."""

    def __init__(self) -> None:
        self._known: dict[Any, float] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """The (fake) result of an operation and its time, as torch's estimators return them."""
        kwargs = kwargs or {}
        key = (func, *(_shape(leaf) for leaf in pytree.tree_leaves((args, kwargs))))
        if key not in self._known:
            self._known[key] = self._measure(func, args, kwargs)
        return func(*args, **kwargs), self._known[key]

    def _measure(self, func: Any, args: Any, kwargs: Any) -> float:
        with _disable_current_modes(), torch.no_grad():
            real_args, real_kwargs = pytree.tree_map(_real, (args, kwargs))
            seconds = []
            for _ in range(_RUNS):
                began = time.process_time()
                func(*real_args, **real_kwargs)
                seconds.append(time.process_time() - began)
        return 1000 * min(seconds)


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype
    return leaf if isinstance(leaf, (int, float, str, bool, type(None))) else str(leaf)


def _real(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    elements = 1 + sum((length - 1) * stride for length, stride in zip(leaf.shape, leaf.stride(), strict=True))
    held = torch.rand(elements) if leaf.is_floating_point() else torch.zeros(elements)
    return held.to(leaf.dtype).as_strided(leaf.shape, leaf.stride())  # views of one element, expanded ones, stay such


@contextmanager
def _timed_here() -> Iterator[None]:
    """torch's runtime estimator with :class:`_Clock` for its clock."""
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    kind: Any = RuntimeEstimator
    before = vars(kind)["_roofline_estimate"]
    kind._roofline_estimate = staticmethod(_Clock())
    try:
        yield
    finally:
        kind._roofline_estimate = before


def sac_settings(name: str, size: str, blocks: Sequence[Block]) -> list[Setting] | str:
    """What the planner makes of a model of the zoo at several budgets, least recomputation first; or why there is nothing.

    It runs in a process of its own: on some models its memory tracker aborts the process that it is in.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        return f"it needs {' and '.join(missing)}, not installed here"
    words = [sys.executable, "-m", "regrad.bench.torch_sac", name, size, *(block.name for block in blocks)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it was not done after {MOST_SECONDS} seconds"
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if "Error" in line and not line.startswith(" ")]
        return said[-1] if said else f"its process ended with code {done.returncode}"
    found = []
    for one in json.loads(done.stdout.splitlines()[-1]):
        found.append(Setting(SAC_ILP, one["label"], one["work_seconds"], partial(install, one["saved"])))
    return found or "its program found no plan at any budget"


def decide(step: rt.Step, names: Sequence[str]) -> list[dict[str, Any]]:
    """The planner's decisions for several budgets: for each block that it chooses its operations, 1 for those saved."""
    from torch.distributed._tools.ilp_utils import get_peak_memory_runtime_baseline, parse_module_info
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    root = type(step.model).__name__
    units = [f"{root}.{name}" for name in names]
    with _timed_here():
        info, stats = _collect(step, units)
    eager_bytes, _ = get_peak_memory_runtime_baseline(parse_module_info(info))
    found: dict[str, dict[str, Any]] = {}
    for share in SHARES:
        chosen, milliseconds, peak = sac_milp(parse_module_info(info), share * eager_bytes / _GIB, ac_units=units)
        saved: dict[str, Decisions] = {}
        for unit, discarded in chosen.items():
            decisions = get_optimal_checkpointing_policy_per_module(stats[unit], 1 - discarded)
            saved[unit.removeprefix(f"{root}.")] = stats[unit].func_names, decisions
        solved = peak >= 0 and all(len(operations) == len(decisions) for operations, decisions in saved.values())
        if saved and solved:
            label = f"{len(saved)} blocks, {share:.0%}"
            one = {"label": label, "work_seconds": milliseconds / 1000, "saved": saved}
            found.setdefault(repr(saved), one)
    return sorted(found.values(), key=lambda one: float(one["work_seconds"]))


def _collect(step: rt.Step, units: Sequence[str]) -> tuple[Any, Mapping[str, Any]]:
    """The planner's own statistics of modules, and of the operations in those that may be recomputed (``units``).

    Left out are units in which there is little or nothing to decide, and second calls of a module: it stumbles over both.
    """
    from torch.distributed._tools.ilp_utils import aggregate_stats
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    mode = "operator-level-cost-model"
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        copy = fake_copy(step, fake)
        tracker = MemTracker()
        tracker.track_external(copy.model, *([copy.optimizer] if copy.optimizer is not None else []))
        with tracker:
            copy()
            copy.clear_gradients()
            tracker.reset_mod_stats()
            copy()
            copy.clear_gradients()
        runtimes = RuntimeEstimator()
        with runtimes(estimate_mode_type=mode):
            copy()
        copy.clear_gradients()
        operations = SACEstimator()
        with operations(estimate_mode_type=mode):
            loss = copy.compute_loss()
        loss.backward()
        for name, stats in list(operations.sac_mod_stats.items()):
            if name not in units or not sum(stats.memory) or not sum(stats.runtimes):
                del operations.sac_mod_stats[name]
        info: Any = aggregate_stats(copy.model, tracker, runtimes, operations, torch.device("cpu"))
    for order in info["mod_order"]:
        info["mod_order"][order] = list(dict.fromkeys(info["mod_order"][order]))
    for module in info["mod_stats"]:
        if not all(map(isfinite, module["slopes"])):  # two operations or so, through which no curve can be fitted
            module |= {"is_leaf": True, "sac_memory": 0, "sac_runtime": 0, "n_segments": 0}
    return info, operations.sac_mod_stats


def install(saved: Mapping[str, Decisions], model: nn.Module) -> None:
    """Put decisions on a model in place."""
    for name, (operations, decisions) in saved.items():
        install_spans([(name,)], model, context_fn=partial(_contexts, name, operations, decisions))


def _contexts(name: str, operations: Sequence[str], decisions: Sequence[int]) -> Any:
    """Contexts of one call: its operations are told apart by their order, the first run's and the second's alike."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    at = {False: 0, True: 0}

    def policy(context: Any, kernel: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if kernel in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        position, at[context.is_recompute] = at[context.is_recompute], at[context.is_recompute] + 1
        called = kernel._overloadpacket.__name__
        if position >= len(operations) or operations[position] != called:
            raise UsageError(f"block {name} runs {called} where torch's estimator saw another operation")
        return CheckpointPolicy.MUST_SAVE if decisions[position] else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main(words: Sequence[str]) -> int:
    """``python -m regrad.bench.torch_sac MODEL SIZE BLOCK …``: the decisions as JSON, on the last line of stdout."""
    torch.set_num_threads(1)
    name, size, *names = words
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):  # it prints totals, and its fits divide by zero
        warnings.simplefilter("ignore")
        found = decide(ZOO[name].make(size), names)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
