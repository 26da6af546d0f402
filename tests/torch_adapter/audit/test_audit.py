"""What an audit says besides divergences: determinism first, the state table, torch's own checkpoint; what it leaves."""

from __future__ import annotations

import json
import random
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np
import planted_blocks as blocks
import planted_engines as engines
import pytest
import torch
from models import GPT, ConvNet, gpt_batch
from torch import nn

import regrad.torch as rt
from regrad.core.audit import Audit
from regrad.core.errors import AuditUnsupported, InvalidSubject, PlanMismatch, ReplayError
from regrad.planners import FirstK
from regrad.torch.audit.world import World
from regrad.torch.recompute import recompute

BATCH = torch.linspace(-1, 1, 4 * blocks.WIDTH).reshape(4, blocks.WIDTH)


class Entropy(blocks.Plain):
    def effect(self, y: torch.Tensor) -> torch.Tensor:
        seed = torch.Generator().seed() % 1000003
        return y * torch.rand(1, generator=torch.Generator().manual_seed(seed))  # <- entropy


class Untold(blocks.Plain):
    """State that no walk can reach: its name is made when it runs."""

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        table = globals()["_UN" + "TOLD"]
        table.add_(1)  # <- untold
        return y * table.clone()


_UNTOLD = torch.zeros(blocks.WIDTH)


@lru_cache
def tripled(value: int) -> int:
    """A function with a cache."""
    return 3 * value


class Cached(blocks.Plain):
    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return y * tripled(2)


class Iterating(blocks.Plain):
    def prepare(self) -> None:
        self.source = (i for i in range(1000))

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return y * next(self.source)


def test_a_step_that_is_not_deterministic_is_said_first():
    found = rt.audit(blocks.Net(Entropy()), BATCH, engine=engines.torchs)
    assert found.verdict == "UNSUPPORTED"
    assert found.reason.startswith("the eager step is not deterministic")
    assert found.first is not None
    assert found.first.operation == "aten.rand.generator"
    assert found.first.line == blocks.line_of("entropy", __file__)
    assert found.first.segment == "blocks.1"
    assert found.segments == ()  # nothing else was compared
    assert found.torch.verdict == "NOT RUN"
    with pytest.raises(AuditUnsupported, match="not deterministic"):
        found.raise_if_diverged()


def test_an_engine_that_refuses_is_unsupported_with_its_words():
    def refusing(function: Any, *args: Any, **kwargs: Any) -> Any:
        raise ReplayError("no room for state", segment="blocks.0")

    found = rt.audit(blocks.Net(blocks.Plain()), BATCH, engine=refusing)
    assert found.verdict == "UNSUPPORTED"
    assert "no room for state" in found.reason
    assert "refusing" in found.reason


def test_the_engines_own_refusal_is_passed_on():
    def later(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = model.blocks[0](model.first(batch))
        out = model.blocks[1](hidden)
        hidden.mul_(2)
        return out.square().mean()

    found = rt.audit(blocks.Net(Shifted()), BATCH, loss=later, segments="blocks.1")
    assert found.verdict == "UNSUPPORTED"
    assert "ModifiedArgument" in found.reason


class Shifted(nn.Module):
    """Its eager backward does not need its input; a replay does."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(blocks.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + 1) * self.gain


def test_what_cannot_be_put_back_is_said():
    found = rt.audit(blocks.Net(Iterating()), BATCH)
    assert found.verdict == "UNSUPPORTED"
    assert "iterator" in found.reason


def test_a_function_cache_is_noted():
    tripled.cache_clear()
    found = rt.audit(blocks.Net(Cached()), BATCH, compare_torch=False)
    assert found.exact, found
    assert any("tripled" in note for note in found.notes)


def test_state_that_only_operations_show():
    before = _UNTOLD.clone()
    found = rt.audit(blocks.Net(Untold()), BATCH, engine=engines.torchs, compare_torch=False)
    assert found.verdict == "DIVERGED"
    assert found.first.slot.startswith("hidden tensor float32 [8] of test_audit.py:")
    assert found.first.line == blocks.line_of("untold", __file__)
    assert torch.equal(_UNTOLD, before)


def state_of(found: Audit, segment: str) -> dict[str, Any]:
    row = next(row for row in found.segments if row.name == segment)
    return {use.slot: use for use in row.state}


def test_the_table_of_state():
    found = rt.audit(blocks.Net(blocks.Everything()), BATCH)
    assert found.exact, found
    assert [(row.forwards, row.replays, row.recomputed) for row in found.segments] == [(3, 3, True)] * 3
    assert found.segments[0].state == found.segments[2].state == ()
    uses = state_of(found, "blocks.1")
    queue = uses["buffer blocks.1.queue"]
    assert (queue.use, queue.found, queue.storage_bytes) == ("read and written", "declared", 6 * blocks.WIDTH * 4)
    assert queue.read_line == blocks.line_of("all: queue")
    assert queue.write_line == blocks.line_of("all: calls")
    mean = uses["buffer blocks.1.norm.running_mean"]
    assert (mean.use, mean.write_line) == ("read and written", blocks.line_of("all: norm"))
    for slot, mark, how in (
        ("list blocks.1.seen", "seen", "changed"),
        ("deque blocks.1.window", "window", "changed"),
        ("Python's random generator", "python random", "drawn"),
        ("torch's CPU generator", "torch random", "drawn"),
        ("torch.Generator blocks.1.gen", "torch generator", "drawn"),
        ("numpy.Generator blocks.1.rng", "numpy generator", "drawn"),
    ):
        assert (uses[slot].use, uses[slot].write_line) == (how, blocks.line_of(f"all: {mark}")), slot
        assert uses[slot].found == "discovered"


def test_a_buffer_that_nothing_touched_is_assumed():
    found = rt.audit(blocks.Net(blocks.Constant()), BATCH, compare_torch=False)
    assert [(use.use, use.found) for use in found.segments[1].state] == [("untouched", "assumed")]


def test_hooks_inside_a_segment_are_named():
    found = rt.audit(blocks.Net(blocks.Hooked()), BATCH, compare_torch=False)
    assert found.segments[1].hooks == ("blocks.1.linear",)
    assert found.exact


def test_torchs_checkpoint_beside_it():
    torch.manual_seed(0)
    diverged = rt.audit(ConvNet("batch", blocks=2), (torch.randn(4, 1, 8, 8), torch.arange(4)), segments="layers.*")
    assert diverged.exact
    assert diverged.torch.verdict == "DIVERGED"
    assert diverged.torch.first.slot == "buffer layers.1.body.1.num_batches_tracked"
    assert diverged.torch.replays == 6
    assert "assumes a function that does the same on both runs" in str(diverged)
    same = rt.audit(GPT(2), gpt_batch(2))
    assert (same.verdict, same.torch.verdict) == ("EXACT", "SAME")
    raised = rt.audit(blocks.Net(blocks.ChangedArgument()), BATCH)
    assert (raised.verdict, raised.torch.verdict) == ("EXACT", "RAISED")
    assert "inplace" in raised.torch.message


def test_a_plan_and_a_plan_for_another_model():
    model = GPT(3)
    step = rt.Step(model, gpt_batch(), optimizer=torch.optim.AdamW(model.parameters()))
    plan = rt.plan(step, budget="60%", planner=FirstK(2))
    again = sum(segment.option != "keep" for segment in plan.segments)
    assert again == 2
    found = rt.audit(step, plan=plan)
    assert found.exact, found
    assert sum(row.recomputed for row in found.segments) == again
    assert {row.replays for row in found.segments if not row.recomputed} == {0}
    assert found.replays == 3 * again
    with pytest.raises(PlanMismatch):
        rt.audit(GPT(2), gpt_batch(), plan)


def test_a_plan_of_ranges():
    model = GPT(3)
    step = rt.Step(model, gpt_batch(), optimizer=torch.optim.AdamW(model.parameters()))
    plan = rt.plan(step, budget="60%")
    assert plan.ranges
    found = rt.audit(step, plan=plan)
    assert found.exact, found
    assert found.replays == found.range_replays == 3 * len(plan.ranges)


def test_a_plan_that_recomputes_nothing_says_so():
    model = GPT(2)
    plan = rt.plan(model, gpt_batch(2), budget="100%")
    found = rt.audit(model, gpt_batch(2), plan)
    assert found.exact
    assert found.replays == 0
    assert "nothing was recomputed" in str(found)


def test_an_applied_plan_stays_applied():
    model = GPT(2)
    plan = rt.plan(model, gpt_batch(2), budget="min")
    rt.apply(model, plan)
    before = [vars(module).get("forward") for module in model.modules()]
    assert rt.audit(model, gpt_batch(2), plan, compare_torch=False).exact
    assert [vars(module).get("forward") for module in model.modules()] == before
    assert rt.is_applied(model)


def test_json_and_text():
    found = rt.audit(blocks.Net(blocks.Counter()), BATCH, engine=engines.torchs)
    read = json.loads(found.to_json())
    assert read["verdict"] == "DIVERGED"
    assert read["first"]["slot"] == "Python attribute blocks.1.calls"
    assert read["first"]["line"] == blocks.line_of("counter")
    for words in ("DIVERGED", "blocks.1.calls", "planted_blocks.py:", "24 moments", "runs 3 + 3"):
        assert words in str(found)


@pytest.mark.parametrize("arguments", [(blocks.Net(blocks.Plain()),), (blocks.Net(blocks.Plain()), None)])
def test_no_batch(arguments):
    with pytest.raises(InvalidSubject, match="no batch"):
        rt.audit(*arguments)


def test_no_steps():
    with pytest.raises(InvalidSubject, match="at least one step"):
        rt.audit(blocks.Net(blocks.Plain()), BATCH, steps=0)


def test_the_users_exception_passes_and_the_model_is_as_it_was():
    class Broken(blocks.Counter):
        def effect(self, y: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise ArithmeticError("broken")
            return y

    model = blocks.Net(Broken())
    with pytest.raises(ArithmeticError, match="broken"):
        rt.audit(model, BATCH)
    assert model.blocks[1].calls == 0
    assert all("forward" not in vars(module) for module in model.modules())


def snapshot(step: rt.Step, extra: tuple[Any, ...]) -> Any:
    """Everything that must be as it was, by value and by identity."""
    model, block = step.model, step.model.blocks[1]
    tensors = [*model.parameters(), *model.buffers(), step.batch]
    return (
        [(id(t), t._version, t.data_ptr(), t.detach().numpy().tobytes(), t.requires_grad, id(t.grad)) for t in tensors],
        [sorted((key, id(value)) for key, value in vars(module).items()) for module in model.modules()],
        (block.calls, list(block.seen), dict(block.table), list(block.window), set(block.kinds)),
        (block.gen.get_state().numpy().tobytes(), str(block.rng.bit_generator.state)),
        (torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())),
        {id(p): {k: (id(v), float(v.sum())) for k, v in s.items()} for p, s in step.optimizer.state.items()},
        torch.get_default_dtype(), torch.is_grad_enabled(), [list(one) for one in extra],
    )  # fmt: skip


@pytest.mark.parametrize("engine", [None, engines.torchs, engines.careful("queue")], ids=["own", "torch", "forgetful"])
def test_the_users_objects_are_untouched(engine):
    torch.manual_seed(0)
    model = blocks.Net(blocks.Everything())
    log: deque[int] = deque([1])
    model.blocks[0].register_forward_hook(lambda module, args, output: log.append(len(log)))
    step = rt.Step(model, BATCH.clone(), optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), gradients="fresh")
    step()
    before = snapshot(step, (log,))
    found = rt.audit(step, engine=engine)
    assert found.verdict == ("EXACT" if engine is None else "DIVERGED")
    assert snapshot(step, (log,)) == before
    assert found.runs >= 6


def test_a_kept_gradient_is_left_with_its_bytes():
    model = blocks.Net(blocks.Plain())
    model(BATCH).backward()
    held = [(id(p.grad), p.grad.clone()) for p in model.parameters()]
    assert rt.audit(model, BATCH, compare_torch=False).exact
    assert [id(p.grad) for p in model.parameters()] == [identity for identity, _ in held]
    assert all(torch.equal(p.grad, g) for p, (_, g) in zip(model.parameters(), held, strict=True))


def test_putting_back_is_put_to_the_test():
    # a world that is put back brings the bytes back; one that is not leaves what the step made
    model = blocks.Net(blocks.Everything())
    step = rt.Step(model, BATCH, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    world = World(step)
    weights = model.first.weight.detach().clone()
    step()
    assert model.blocks[1].calls == 1
    assert not torch.equal(model.first.weight, weights)
    assert world.put_back() == ""
    assert model.blocks[1].calls == 0
    assert torch.equal(model.first.weight, weights)


class Installing(blocks.Plain):
    """Hooks itself up at its first call and keeps a flag of it, as some libraries do."""

    def prepare(self) -> None:
        self.installed = False
        self.collected: list[int] = []

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        if not self.installed:
            self.out.register_forward_hook(lambda module, args, output: self.collected.append(1))
            self.installed = True
        return y * (1 + len(self.collected))


def test_hooks_that_a_step_registers_are_taken_off_again():
    model = blocks.Net(Installing())
    assert rt.audit(model, BATCH, segments="blocks.0", compare_torch=False).exact
    block = model.blocks[1]
    assert (len(block.out._forward_hooks), block.installed, block.collected) == (0, False, [])


def test_a_world_that_is_not_put_back_is_noticed(monkeypatch):
    put_back = World.put_back

    def forgetful(world: World) -> str:
        calls = world.step.model.blocks[1].calls
        lost = put_back(world)
        world.step.model.blocks[1].calls = calls
        return lost

    monkeypatch.setattr(World, "put_back", forgetful)
    found = rt.audit(blocks.Net(blocks.Counter()), BATCH)
    assert found.verdict == "UNSUPPORTED"
    assert "Python attribute blocks.1.calls is not what it was before" in found.reason


def test_the_whole_model_is_no_segment():
    found = rt.audit(blocks.Net(blocks.Counter()), BATCH, segments="*", compare_torch=False)
    assert [(row.name, row.recomputed, row.replays) for row in found.segments] == [("first", True, 0)]
    assert "nothing was recomputed" in str(found)


def test_the_default_engine_is_the_executors():
    seen = []

    def spied(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(function.__self__)
        return recompute(function, args, kwargs)

    model = blocks.Net(blocks.BatchNorm())
    assert rt.audit(model, BATCH, engine=spied, compare_torch=False).exact
    assert set(seen) == set(model.blocks)
