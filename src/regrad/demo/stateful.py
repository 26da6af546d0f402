"""The demo on a model that holds state: eagerly, by plan, and with torch's checkpoint around the same blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad.torch as rt
from regrad.core.plan import Plan
from regrad.demo.state_result import EAGER, PLANNED, TORCH, OtherValue, StateResult, StateRow
from regrad.demo.subject import Subject
from regrad.demo.train import Run, counting_forwards, gradients, optimizer_state, same_bytes
from regrad.torch.measure import measure_peak
from regrad.torch.recompute import replays

EXPERTS = Subject(model="experts", layers=4, width=96, heads=4, sequence=128, batch_size=4)
STEPS = 4
_WARMUP = 1
Progress = Callable[[str, float], None]


def run_stateful(
    *,
    subject: Subject = EXPERTS,
    steps: int = STEPS,
    budget: str = "50%",
    plan: Plan | None = None,
    progress: Progress | None = None,
) -> StateResult:
    """Train ``subject`` three ways from one start and compare all that they leave, after every step and at the end.

    ``plan`` is one that was made for ``budget`` before. Takes about ten seconds and 200 MiB with the sizes of EXPERTS, most
    of it to plan. Raises what :func:`regrad.torch.plan` and :func:`regrad.torch.apply` raise.
    """
    began = time.monotonic()
    say = progress or (lambda stage, done: None)
    batches = subject.batches()
    # whole blocks, so that torch's checkpoint can be put on the very same ones
    plan = plan or rt.plan(subject.step(*batches[0]), budget=budget, segments="blocks.*", progress=say)
    ways = [_Way(Run(name, subject.step(*batches[0]))) for name in (EAGER, PLANNED, TORCH)]
    eager, planned, torchs = ways
    rt.apply(planned.run.step.model, plan)
    _checkpoint_blocks(torchs.run.step.model, {segment.module for segment in plan.recomputed})
    for index in range(steps):
        for way in ways:
            way.run.advance(batches[index])
        for way in ways:
            way.compare_gradients(eager, index + 1)
        say("training a model with state", (index + 1) / steps)
    predicted = {EAGER: plan.eager_peak_bytes, PLANNED: plan.predicted_peak_bytes}
    compared = [_differences(way, eager) for way in ways]
    counted = [_measure(way.run, subject.counted_class()) for way in ways]
    rows = tuple(
        StateRow(
            name=way.run.name,
            predicted_peak_bytes=predicted.get(way.run.name),
            extra_forwards=counts["block_forwards"] - counted[0]["block_forwards"],
            **counts,
            **differences,
        )
        for way, differences, counts in zip(ways, compared, counted, strict=True)
    )
    return StateResult(
        model=subject.model,
        parameters=sum(parameter.numel() for parameter in eager.run.step.model.parameters()),
        steps=steps,
        budget=budget,
        plan=plan,
        rows=rows,
        seconds=time.monotonic() - began,
    )


@dataclass
class _Way:
    """A run, what it left (taken before it is measured), and the first step in which its gradients were other ones."""

    run: Run
    other_step: int | None = None
    error_ratio: float = 0.0

    def compare_gradients(self, eager: _Way, number: int) -> None:
        if self.other_step is not None:
            return
        found, expected = gradients(self.run.step.model), gradients(eager.run.step.model)
        if not same_bytes(found, expected):
            self.other_step, self.error_ratio = number, _distance(found, expected) / _norm(expected)


def _checkpoint_blocks(model: nn.Module, names: set[str]) -> None:
    """Put torch's checkpoint around the calls of the modules called ``names``, as its documentation recommends."""
    modules: dict[str, Any] = dict(model.named_modules())
    for name in names:
        modules[name].forward = partial(checkpoint, modules[name].forward, use_reentrant=False)


def _differences(way: _Way, eager: _Way) -> dict[str, Any]:
    """The fields of a StateRow that compare what two runs left; to be taken before either of them trains on."""
    run, reference = way.run, eager.run
    model, expected = run.step.model, reference.step.model
    buffers, attributes = (
        _others(_buffers(model), _buffers(expected)),
        _others(_attributes(model), _attributes(expected)),
    )
    steps = enumerate(zip(run.losses, reference.losses, strict=True), 1)
    return {
        "losses": tuple(run.losses),
        "losses_identical": run.losses == reference.losses,
        "gradients_identical": way.other_step is None,
        "weights_identical": same_bytes(dict(model.named_parameters()), dict(expected.named_parameters())),
        "optimizer_identical": same_bytes(optimizer_state(run.step), optimizer_state(reference.step)),
        "buffers_identical": not buffers,
        "attributes_identical": not attributes,
        "generator_identical": same_bytes(run.generator, reference.generator),
        "first_other_loss_step": next((number for number, (found, wanted) in steps if found != wanted), None),
        "first_other_gradients_step": way.other_step,
        "gradient_error_ratio": way.error_ratio,
        "other_values": (*buffers, *attributes),
        "values": len(_buffers(expected)) + len(_attributes(expected)),
    }


def _measure(run: Run, counted: type[nn.Module]) -> dict[str, Any]:
    """The fields of a StateRow that are counted in further steps."""
    before = replays()
    with torch.random.fork_rng(devices=[]), counting_forwards(counted) as count:
        peak = measure_peak(run.step, warmup=_WARMUP)
    steps = _WARMUP + 1
    return {
        "measured_peak_bytes": peak.peak_bytes,
        "block_forwards": count.calls // steps,
        "replays": (replays() - before) // steps,
    }


def _buffers(model: nn.Module) -> dict[str, object]:
    return {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


def _attributes(model: nn.Module) -> dict[str, object]:
    """Python values on modules. A module's own ``forward`` is how a run is made, not what it left."""
    return {
        f"attribute {name}.{key}" if name else f"attribute {key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and key != "forward"
    }


def _others(found: dict[str, object], expected: dict[str, object]) -> tuple[OtherValue, ...]:
    names = dict.fromkeys((*expected, *found))
    return tuple(
        OtherValue(name, _sum(expected.get(name)), _sum(found.get(name)))
        for name in names
        if name not in found or name not in expected or not same_bytes(found[name], expected[name])
    )


def _sum(value: object) -> float | None:
    if isinstance(value, torch.Tensor):
        total: float = value.sum().item()
        return total
    return value if isinstance(value, (int, float)) else None


def _norm(tensors: dict[str, torch.Tensor | None]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values() if tensor is not None))


def _distance(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> float:
    zero = torch.zeros(())
    return _norm({name: _or(found[name], zero) - _or(expected[name], zero) for name in expected})


def _or(tensor: torch.Tensor | None, zero: torch.Tensor) -> torch.Tensor:
    return zero if tensor is None else tensor
