"""The trace: fake, real and merged; what it refuses; how large a model it takes."""

from __future__ import annotations

import random
import resource

import models
import pytest
import torch
from test_plan import fresh, gpt_step

import regrad.torch as rt
from regrad.bench.subjects import SUBJECTS, Subject
from regrad.core.errors import CannotTrace, InvalidSubject, PlanMismatch
from regrad.core.simulate_trace import TraceArithmetic, live_levels
from regrad.core.trace import Operation, Trace
from regrad.torch.measure import measure_peak
from regrad.torch.real_trace import align, merge_measured


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_fake_and_real_steps_have_the_same_operations_and_the_measured_peak(subject: Subject) -> None:
    """A library that takes another path under fake tensors would show here: none of these does any more."""
    step = subject.step()
    merged = rt.trace(step, source="merged")
    assert merged.source == "merged"
    assert merged.notes == []
    measured = measure_peak(step).peak_bytes
    for trace in (merged, rt.trace(step)):
        assert abs(live_levels(trace).peak_bytes / measured - 1) <= subject.band_ratio / 10


def test_eager_levels_by_arithmetic_are_those_of_the_record() -> None:
    profile = rt.profile(gpt_step())
    recorded, computed = live_levels(profile.trace), profile.arithmetic.levels()
    assert computed.peak_bytes == recorded.peak_bytes
    assert computed.operations == recorded.operations


def test_differences_between_records_are_reported() -> None:
    fake, real = _trace(["a", "b", "c"]), _trace(["a", "x", "c"])
    real.operations[2].seconds = 3.0
    merged = merge_measured(fake, real)
    assert merged.operations[2].seconds == 3.0
    assert any("in the fake step alone, b" in note for note in merged.notes)
    assert any("in the real step alone, x" in note for note in merged.notes)


def test_alignment_by_name() -> None:
    assert align(["a", "b"], ["a", "b"]) == ([(0, 0), (1, 1)], [], [])
    pairs, missing, extra = align(["a", "b", "c"], ["a", "c", "d"])
    assert pairs == [(0, 0), (2, 1)]
    assert (missing, extra) == ([1], [2])


def _trace(names: list[str]) -> Trace:
    return Trace([Operation(name, "forward", -1, 0) for name in names], [], [], "fake", "fresh", "cpu")


def test_a_real_trace_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CannotTrace, match='source="fake"'):
        rt.trace(gpt_step(), source="real", limit_bytes=1000)


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(InvalidSubject, match="fake, real, merged"):
        rt.trace(gpt_step(), source="guess")


def test_a_profile_serves_its_own_step_and_no_other() -> None:
    step = gpt_step()
    profile = rt.profile(step)
    assert rt.plan(step, budget="70%", profile=profile) is not None
    longer = fresh(models.GPT(blocks=6, width=128), models.gpt_batch(17))
    with pytest.raises(PlanMismatch, match="other shapes"):
        rt.plan(longer, budget="70%", profile=profile)
    deeper = fresh(models.GPT(blocks=7, width=128), models.gpt_batch(16))
    with pytest.raises(PlanMismatch, match="another model"):
        rt.plan(deeper, budget="70%", profile=profile)


def test_a_forward_that_is_not_the_same_twice_is_refused() -> None:
    class Drifting(models.GPT):
        turns = 0

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            Drifting.turns += 1
            loss = super().forward(tokens, targets)
            return loss * 2 if Drifting.turns % 2 else loss.abs()

    with pytest.raises(CannotTrace, match="not the same twice"):
        rt.profile(Drifting(), models.gpt_batch())


def test_a_model_that_draws_its_path_from_a_seeded_generator_can_be_traced() -> None:
    class Drawing(models.GPT):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = super().forward(tokens, targets)
            return loss * 2 if random.random() < 0.5 else loss.abs()

    for seed in range(4):
        random.seed(seed)
        assert rt.profile(Drawing(blocks=2), models.gpt_batch()).trace.operations


def test_masks_and_lengths_may_steer_the_step() -> None:
    """Values that depend on no weight are there even on copies without bytes."""

    class Masked(models.GPT):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            longest = int((tokens > 0).sum(1).max())
            if (tokens[:, :longest] >= 0).all():
                return super().forward(tokens[:, :longest], targets[:, :longest])
            raise AssertionError("not reached")

    trace = rt.profile(Masked(), models.gpt_batch()).trace
    assert trace.source == "fake"


def test_a_seven_billion_parameter_llama_is_traced_in_little_memory() -> None:
    """The memory is that of this whole process, in which the tests before have run."""
    transformers = pytest.importorskip("transformers")
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = transformers.LlamaConfig(max_position_embeddings=4096)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            model = transformers.LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)
    assert sum(parameter.numel() for parameter in model.parameters()) > 6.7e9
    ids = torch.zeros(1, 4096, dtype=torch.long)
    step = rt.Step(model, {"input_ids": ids, "labels": ids}, optimizer=torch.optim.AdamW(model.parameters()))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = rt.trace(step)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) * 1024 < 2 << 30
    persistent = 3 * 2 * sum(parameter.numel() for parameter in model.parameters())
    assert live_levels(trace).before[0] == pytest.approx(persistent, rel=0.001)
    assert TraceArithmetic(trace).levels().peak_bytes > live_levels(trace).before[0]
