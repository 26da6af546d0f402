"""The measured peak is exact to the byte on patterns that are known, and both ways to count a baseline agree."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import regrad.torch as rt
from regrad.core.errors import UsageError
from regrad.demo.gpt import GPT, GPTConfig
from regrad.demo.subject import next_byte_loss
from regrad.torch.ledger import storage_bytes
from regrad.torch.measure import measure_from_start, measure_pair, measure_peak

MIB = 2**20


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def gpt_step(**settings: object) -> rt.Step:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=48, heads=2, sequence=32))
    tokens = torch.randint(256, (2, 32))
    return rt.Step(
        model, (tokens, tokens), loss=next_byte_loss, optimizer=torch.optim.AdamW(model.parameters()), **settings
    )


class TestKnownPatterns:
    def test_one_block(self) -> None:
        assert measure_peak(lambda: block(12_345)) == (12_345, 0)

    def test_the_peak_is_the_most_at_one_moment_not_the_sum(self) -> None:
        def step() -> None:
            first, second = block(1_000), block(2_000)
            del first
            third = block(500)
            del second, third
            block(2_600)

        assert measure_peak(step).peak_bytes == 3_000

    def test_a_peak_after_frees(self) -> None:
        def step() -> None:
            first = block(1_000)
            del first
            block(1_001)

        assert measure_peak(step).peak_bytes == 1_001

    def test_what_persists_is_counted_once(self) -> None:
        held = block(10_000)
        views = [held[:10], held[5:], held]
        assert measure_peak(lambda: block(77), persistent=views) == (10_077, 10_000)

    def test_what_the_step_replaces_is_not_counted_twice(self) -> None:
        held = {"buffer": block(10_000)}

        def step() -> None:
            held["buffer"] = block(10_000)  # the old one is freed when the new one is there

        assert measure_peak(step, persistent=held) == (20_000, 10_000)

    def test_what_the_warm_up_makes_is_in_the_baseline(self) -> None:
        held: dict[str, torch.Tensor] = {}

        def step() -> None:
            if not held:
                held["state"] = block(4_000)
            block(100)

        assert measure_peak(step) == (4_100, 4_000)

    def test_without_a_warm_up_the_first_step_is_measured(self) -> None:
        held: dict[str, torch.Tensor] = {}

        def step() -> None:
            block(100)
            held.setdefault("state", block(4_000))

        assert measure_peak(step, warmup=0) == (4_000, 0)

    def test_a_step_that_allocates_nothing(self) -> None:
        assert measure_peak(lambda: None) == (0, 0)
        assert measure_peak(lambda: None, persistent=block(9)) == (9, 9)

    def test_persistent_may_be_a_single_tensor(self) -> None:
        measured = rt.measure(lambda: block(5), persistent=block(1_000), steps=1)
        assert (measured.peak_bytes, measured.baseline_bytes, measured.counted) == (1_005, 1_000, "storages given")

    def test_large_blocks(self) -> None:
        assert measure_peak(lambda: block(64 * MIB)).peak_bytes == 64 * MIB


class TestTheProfilersOwnDrops:
    def test_memory_from_before_that_the_step_frees(self) -> None:
        stock = [block(5_000), block(6_000)]

        def step() -> None:
            stock.pop()
            block(300)

        # One went in the warm-up. The other's free is seen only if the new block comes to stand at its address; where
        # it is not, the figure is too high, never too low.
        assert measure_peak(step, persistent=stock) in ((5_300, 5_000), (5_000, 5_000))

    def test_stale_sizes_of_an_earlier_profile(self) -> None:
        """Blocks of an earlier profile, freed unseen; what comes to stand at their addresses is freed in the step."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            earlier = [block(50_000) for _ in range(64)]
        addresses = {item.data_ptr() for item in earlier}
        earlier.clear()
        stock = [item for item in [block(49_000) for _ in range(64)] if item.data_ptr() in addresses]
        assert len(stock) >= 4, "hardly an address came back: the test would show nothing"

        def step() -> None:
            del stock[-2:]
            block(1_000)

        assert measure_peak(step) == (1_000, 0)


class TestAStep:
    def test_by_hand(self) -> None:
        """Backward of ``(x @ w.T).sum()``: loss and its seed, the gradient of w, and the seed spread over the output
        for the matrix product; the output itself has gone, a sum does not need it."""
        model, x = nn.Linear(50, 30, bias=False), torch.randn(8, 50)
        step = rt.Step(model, (x,), loss=lambda model, batch: model(*batch).sum())
        weight, batch, output, scalar = 4 * 50 * 30, 4 * 8 * 50, 4 * 8 * 30, 4
        assert measure_peak(step) == (weight + batch + 2 * scalar + weight + output, weight + batch)

    @pytest.mark.parametrize("gradients", ["fresh", "kept"])
    def test_both_baselines_agree_to_the_byte(self, gradients: str) -> None:
        step = gpt_step(gradients=gradients)
        if gradients == "kept":
            step.compute_loss().backward()
        known, seen = rt.measure(step, steps=1), measure_from_start(lambda: gpt_step(gradients=gradients), steps=1)
        assert known.counted == "storages of the step"
        assert seen.counted == "from the start"
        assert (known.peak_bytes, known.baseline_bytes) == (seen.peak_bytes, seen.baseline_bytes)
        weights = sum(p.nbytes for p in step.model.parameters())
        batch = sum(t.nbytes for t in step.batch[:1])
        counters = 4 * len(list(step.model.parameters()))  # AdamW's own step counts
        assert known.baseline_bytes == (3 if gradients == "fresh" else 4) * weights + batch + counters

    def test_a_step_and_the_same_as_a_callable(self) -> None:
        step = gpt_step()
        as_step, as_callable = measure_peak(step), measure_peak(lambda: step(), persistent=step)
        assert as_step.peak_bytes == as_callable.peak_bytes
        # a bare callable cannot be asked to drop its gradients first
        assert as_callable.baseline_bytes - as_step.baseline_bytes == sum(p.nbytes for p in step.model.parameters())

    def test_twice_gives_the_same(self) -> None:
        step = gpt_step()
        first = measure_peak(step)
        gc.collect()
        assert measure_peak(step) == first

    def test_recomputing_lowers_it(self) -> None:
        eager, planned = gpt_step(), gpt_step()
        rt.apply(planned.model, rt.plan(planned, budget="min"))
        assert measure_peak(planned).peak_bytes < measure_peak(eager).peak_bytes


def test_storages_of_a_module() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10))
            self.tied = self.weight
            self.register_buffer("buffer", torch.zeros(20), persistent=False)
            self.plain = [torch.zeros(30), torch.zeros(0)]
            self.inner = nn.Linear(4, 5, bias=False)

    model = Odd()
    assert storage_bytes(model) == 4 * (10 + 20 + 30 + 20)
    model.weight.grad = torch.zeros(10)
    assert storage_bytes(model) == 4 * (10 + 20 + 30 + 20 + 10)
    assert storage_bytes([model, model.weight[:3], {"x": model.inner}]) == 4 * (10 + 20 + 30 + 20 + 10)
    indices, values = torch.tensor([[0, 2]]), torch.ones(2)
    assert (
        storage_bytes(torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True))
        == indices.nbytes + values.nbytes
    )


class TestSeconds:
    def test_counts_and_signs(self) -> None:
        calls: list[int] = []
        measured = rt.measure(lambda: calls.append(1), steps=4, warmup=2)
        assert len(calls) == 2 + 1 + 4
        assert measured.steps == 4
        assert measured.step_seconds >= 0
        assert measured.wall_seconds > 0
        assert measured.device == "cpu"
        assert measured.counted == "nothing before the step"
        assert measured.allocated_peak_bytes is None

    def test_a_pair(self) -> None:
        order: list[str] = []

        def first() -> None:
            order.append("a")
            torch.ones(100_000).sum()

        def second() -> None:
            order.append("b")
            torch.ones(200_000).sum()

        pair = measure_pair(first, second, rounds=3)
        assert "".join(order) == "ab" + "ab" + "ba" + "ab"
        assert pair.rounds == 3
        assert pair.first_seconds > 0
        assert 0 < pair.ratio < float("inf")
        assert pair.ratio == pair.second_seconds / pair.first_seconds

    def test_it_prints(self) -> None:
        assert "peak 1000 B, of which 0 B" in str(rt.measure(lambda: block(1_000)))


class TestBadInput:
    @pytest.mark.parametrize(
        ("settings", "message"), [({"steps": 0}, "steps=0"), ({"warmup": -1}, "warmup=-1"), ({"steps": -3}, "steps=-3")]
    )
    def test_counts(self, settings: dict[str, int], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            rt.measure(lambda: None, **settings)

    def test_a_device_that_cannot_be_measured(self) -> None:
        with pytest.raises(UsageError, match="'mps' cannot be measured"):
            rt.measure(lambda: None, device="mps")

    def test_not_a_step(self) -> None:
        with pytest.raises(UsageError, match="is a int"):
            rt.measure(3)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="is a str"):
            measure_from_start(lambda: "step")  # type: ignore[arg-type,return-value]
        with pytest.raises(UsageError, match="rounds=0"):
            measure_pair(lambda: None, lambda: None, rounds=0)

    def test_another_profiler_is_running(self) -> None:
        with profile(activities=[ProfilerActivity.CPU]), pytest.raises(UsageError, match="another torch profiler"):
            rt.measure(lambda: None)
        assert measure_peak(lambda: block(10)).peak_bytes == 10

    def test_what_the_step_raises_passes_and_the_profiler_is_free_again(self) -> None:
        def step() -> None:
            raise ZeroDivisionError("of the user")

        with pytest.raises(ZeroDivisionError, match="of the user"):
            rt.measure(step)
        assert measure_peak(lambda: block(10)).peak_bytes == 10
