"""Planted divergences: each engine forgets one thing, and the audit names segment, slot, operation and line.

The line is looked up by its mark in the planted source; the same program under the library's own engine is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import planted_blocks as blocks
import planted_engines as engines
import pytest
import torch
from torch import nn

import regrad.torch as rt
from regrad.core.errors import AuditDiverged

BACKWARD, FORWARD, END = "backward of blocks.1", "forward of blocks.1", "end of the backward"
PYTHON = "Python"


@dataclass(frozen=True)
class Planted:
    """A block, an engine that forgets, and what the audit must say."""

    name: str
    block: Callable[[], nn.Module]
    engine: engines.Engine
    slot: str
    mark: str
    operation: str
    moment: str = BACKWARD
    aspect: str = "value"
    step: int = 0
    loss: Any = None

    @property
    def line(self) -> str:
        """Where it shows."""
        theirs = self.mark in ("other copy", "left at entry", "one ulp", "gradient twice")
        return blocks.line_of(self.mark, engines.__file__ if theirs else blocks.__file__)


def toggled(model: nn.Module, batch: Any) -> torch.Tensor:
    """Changes a flag between the forward and the backward."""
    model.blocks[1].scale = 1.0
    loss = model(batch)
    model.blocks[1].scale = 2.0
    return loss


def wide(model: nn.Module, batch: Any) -> torch.Tensor:
    """Runs the forward under another default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        return model(batch)
    finally:
        torch.set_default_dtype(torch.float32)


def cast(model: nn.Module, batch: Any) -> torch.Tensor:
    """Runs the forward under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(batch)


def counted(model: nn.Module, batch: Any) -> torch.Tensor:
    """Tells the block which step it is."""
    model.blocks[1].phase += 1
    return model(batch)


def torchs(name: str, block: Callable[[], nn.Module], slot: str, operation: str, **more: Any) -> Planted:
    """Under torch's checkpoint, which brings back its own generators and nothing else of this."""
    return Planted(name, block, engines.torchs, slot, more.pop("mark", name), operation, **more)


def careful(kind: str, slot: str, operation: str, mark: str = "") -> Planted:
    """A block with fifteen kinds of state, under an engine that forgets one."""
    return Planted(f"all but {kind}", blocks.Everything, engines.careful(kind), slot, f"all: {mark or kind}", operation)


HIDDEN = "`hidden` of closure_block.<locals>.Closure.effect"
CASES = [
    Planted("dropout", blocks.Dropout, engines.no_generator, "torch's CPU generator", "dropout", "aten.bernoulli_.float"),
    Planted(
        "dropout module", blocks.DropoutModule, engines.no_generator, "torch's CPU generator", "dropout module",
        "aten.bernoulli_.float",
    ),
    Planted("noise", blocks.Noise, engines.no_generator, "torch's CPU generator", "noise", "aten.randn.default"),
    torchs("python random", blocks.PythonRandom, "Python's random generator", PYTHON),
    torchs("numpy random", blocks.NumpyRandom, "NumPy's random generator", PYTHON),
    torchs("numpy generator", blocks.NumpyGenerator, "numpy.Generator blocks.1.rng", PYTHON),
    torchs("python generator", blocks.PythonGenerator, "random.Random blocks.1.rng", PYTHON),
    torchs("torch generator", blocks.TorchGenerator, "torch.Generator blocks.1.gen", "aten.rand.generator"),
    torchs("counter", blocks.Counter, "Python attribute blocks.1.calls", PYTHON),
    torchs("counter read", blocks.CounterRead, "Python attribute blocks.1.calls", "aten.div.Tensor"),
    torchs("object counter", blocks.ObjectCounter, "Python attribute blocks.1.stats.count", PYTHON),
    torchs("slots", blocks.SlottedCounter, "Python attribute blocks.1.stats.count", PYTHON),
    torchs("list", blocks.List, "list blocks.1.seen", PYTHON),
    torchs("dict", blocks.Dict, "entry blocks.1.table['calls']", PYTHON),
    torchs("deque", blocks.Deque, "deque blocks.1.window", PYTHON),
    torchs("set", blocks.Set, "set blocks.1.kinds", PYTHON),
    torchs("array", blocks.Array, "array blocks.1.histogram", PYTHON),
    torchs("rebound", blocks.Rebound, "tensor attribute blocks.1.average", "aten.mul.Tensor"),
    torchs("rebound buffer", blocks.ReboundBuffer, "buffer blocks.1.average", "aten.mul.Tensor"),
    torchs("closure", blocks.closure_block, f"tensor {HIDDEN}", "aten.add_.Tensor"),
    torchs("global", blocks.Global, "global tensor planted_blocks.GLOBAL_TABLE", "aten.add_.Tensor"),
    torchs("class attribute", blocks.ClassAttribute, "class attribute ClassAttribute.total", PYTHON),
    torchs(
        "batch norm", blocks.BatchNorm, "buffer blocks.1.norm.num_batches_tracked", "aten.add_.Tensor"
    ),
    torchs("queue read", blocks.Queue, "buffer blocks.1.queue", "aten.clone.default"),
    torchs("pointer", blocks.Pointer, "buffer blocks.1.pointer", "aten.add_.Tensor"),
    torchs("codebook read", blocks.Codebook, "parameter blocks.1.codebook", "aten._cdist_forward.default"),
    torchs("data write", blocks.DataWrite, "buffer blocks.1.scale", "aten.mul_.Tensor"),
    torchs("teacher", blocks.Teacher, "parameter blocks.1.teacher.weight", "aten.lerp_.Scalar"),
    torchs(
        "spectral norm", blocks.Spectral, "buffer blocks.1.linear.parametrizations.weight.0._v", "aten.mv.default"
    ),
    torchs("growing cache", blocks.GrowingCache, "tensor attribute blocks.1.cache", "aten.cat.default"),
    torchs("key cache", blocks.KeyCache, "buffer blocks.1.keys", "aten.copy_.default"),
    torchs("carry read", blocks.Carry, "buffer blocks.1.state", "aten.add.Tensor"),
    torchs("carry", blocks.CarryAfter, "buffer blocks.1.state", "aten.mul_.Tensor"),
    torchs("first call", blocks.FirstCall, "Python attribute blocks.1.ready", "aten.mul.Tensor"),
    torchs("lazy", blocks.Lazy, "tensor attribute blocks.1.statistics", "aten.mul.Tensor"),
    torchs("late", blocks.Late, "buffer blocks.1.state", "aten.add_.Tensor", step=2, loss=counted),
    torchs("hook", blocks.Hooked, "list `seen` of Hooked.prepare.<locals>.count", PYTHON),
    torchs("flag", blocks.Flagged, "Python attribute blocks.1.scale", "aten.mul.Tensor", loss=toggled),
    torchs("default dtype", blocks.DefaultDtype, "default dtype", "aten.linspace.default", loss=wide),
    Planted(
        "autocast", blocks.Autocast, engines.no_autocast, "autocast on cpu", "autocast", "aten.mm.default", loss=cast
    ),
    Planted(
        "grad mode", blocks.GradMode, engines.reentrant, "grad mode", "grad mode", "aten.mul.Tensor", moment=FORWARD
    ),
    Planted(
        "argument", blocks.ChangedArgument, engines.closed, "argument 0 of blocks.1", "argument", "aten.add_.Tensor"
    ),
    Planted(
        "one ulp", blocks.Marked, engines.one_ulp, "output 0 of blocks.1", "one ulp", "aten.add.Tensor", moment=FORWARD
    ),
    Planted(
        "gradient twice", blocks.Marked, engines.gradient_twice, "gradient of blocks.1.linear.weight", "gradient twice",
        "aten.add_.Tensor", moment=END,
    ),
    Planted(
        "alias", blocks.Constant, engines.other_copy, "buffer blocks.1.constant", "other copy", PYTHON, aspect="identity"
    ),
    Planted(
        "left at entry", blocks.CarryAfter, engines.left_at_entry, "buffer blocks.1.state", "left at entry",
        "aten.copy_.default",
    ),
    careful("torch random", "torch's CPU generator", "aten.bernoulli_.float"),
    careful("python random", "Python's random generator", PYTHON),
    careful("numpy random", "NumPy's random generator", PYTHON),
    careful("numpy generator", "numpy.Generator blocks.1.rng", PYTHON),
    careful("torch generator", "torch.Generator blocks.1.gen", "aten.rand.generator"),
    careful("running_mean", "buffer blocks.1.norm.running_mean", "aten.native_batch_norm.default", mark="norm"),
    careful("running_var", "buffer blocks.1.norm.running_var", "aten.native_batch_norm.default", mark="norm"),
    careful("batches", "buffer blocks.1.norm.num_batches_tracked", "aten.add_.Tensor", mark="norm"),
    careful("queue", "buffer blocks.1.queue", "aten.clone.default"),
    careful("carry", "buffer blocks.1.carry", "aten.mul_.Tensor"),
    careful("calls", "Python attribute blocks.1.calls", "aten.select.int"),
    careful("seen", "list blocks.1.seen", PYTHON),
    careful("table", "entry blocks.1.table['calls']", PYTHON),
    careful("window", "deque blocks.1.window", PYTHON),
    careful("kinds", "set blocks.1.kinds", PYTHON),
]  # fmt: skip


def program(case: Planted) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return blocks.Net(case.block()), torch.randn(4, blocks.WIDTH)


def test_there_are_many_and_each_is_another():
    assert len(CASES) >= 30
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_found(case):
    model, batch = program(case)
    found = rt.audit(model, batch, engine=case.engine, loss=case.loss, compare_torch=False)
    assert found.verdict == "DIVERGED", found
    first = found.first
    assert (first.segment, first.slot) == ("blocks.1", case.slot), str(first)
    assert first.line == case.line, str(first)
    assert (first.operation, first.moment, first.aspect, first.step) == (
        case.operation, case.moment, case.aspect, case.step,
    )  # fmt: skip
    assert found.replays >= 3
    with pytest.raises(AuditDiverged) as raised:
        found.raise_if_diverged()
    assert (raised.value.slot, raised.value.line, raised.value.segment) == (case.slot, case.line, "blocks.1")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_program_is_exact_under_the_library(case):
    model, batch = program(case)
    found = rt.audit(model, batch, loss=case.loss, compare_torch=False)
    assert found.verdict == "EXACT", found
    # A block without a tensor that must be computed again is not replayed; these have all some.
    assert [segment.replays for segment in found.segments] == [3, 3, 3]


def test_an_engine_that_forgets_nothing_is_exact():
    model, batch = program(next(case for case in CASES if case.block is blocks.Everything))
    found = rt.audit(model, batch, engine=engines.careful(None), compare_torch=False)
    assert found.exact, found
    assert found.replays == 9
