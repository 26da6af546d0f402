"""Engines that a plan chose, call by call: the present is back whatever goes wrong, and what is moved is what is said."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from regrad.core.errors import ModifiedArgument
from regrad.torch.regions import log
from regrad.torch.regions.kept import retained_bytes
from regrad.torch.regions.old import Old
from regrad.torch.regions.public import Checkpoint

WIDTH, ROWS, WRITTEN = 64, 8192, 4
ENTRY = WRITTEN * WIDTH * 4
ENGINES = ("snapshot", "journal", "read_set")


class Writer(nn.Module):
    """Reads the first rows of a queue that it shares, and writes the next ones, or "dense" all of them."""

    def __init__(self, queue: torch.Tensor, at: int, dense: bool = False) -> None:
        super().__init__()
        self.register_buffer("queue", queue)
        self.line, self.at, self.dense = nn.Linear(WIDTH, WIDTH), at, dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.line(x)) + self.queue[:8].clone().mean(0)
        if self.dense:
            self.queue.mul_(0.5)
        else:
            self.queue.index_copy_(0, torch.arange(WRITTEN) + self.at, h.detach()[:WRITTEN])
        return torch.square(h)


def chain(count: int, dense: bool = False) -> list[Writer]:
    torch.manual_seed(0)
    queue = torch.randn(ROWS, WIDTH)
    return [Writer(queue, WRITTEN * k, dense) for k in range(count)]


def forward(ck: Checkpoint, writers: list[Writer], engines: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
    for writer, engine in zip(writers, engines, strict=True):
        x = ck.planned([(writer.queue, engine)], writer.forward, (x,), {}) if engine != "eager" else writer(x)
    return x.square().mean()


def gradients(engines: tuple[str, ...], dense: bool = False, steps: int = 4) -> list[torch.Tensor]:
    ck, writers = Checkpoint(), chain(len(engines), dense)
    x, found = torch.randn(16, WIDTH), []
    for _ in range(steps):
        loss = forward(ck, writers, engines, x)
        found.append(loss.detach())
        now = writers[0].queue.clone()
        found += torch.autograd.grad(loss, [p for writer in writers for p in writer.parameters()])
        assert torch.equal(writers[0].queue, now)
    return [*found, now]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("engines", list(itertools.product(ENGINES, repeat=3)))
def test_every_mix_is_exact(engines, dense):
    plain = gradients(("eager",) * 3, dense)
    assert all(map(torch.equal, gradients(engines, dense), plain))
    assert not log._LOGS


class Faulty:
    """Lets one method of :class:`Old` raise at its ``at``-th call, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
        self.count, self.raised = 0, False
        original = getattr(Old, name)

        def method(old, *args):
            self.count += 1
            if self.count == at + 1 and not self.raised:
                self.raised = True
                raise KeyboardInterrupt(f"{name} fails")
            return original(old, *args)

        monkeypatch.setattr(Old, name, method)


@pytest.mark.parametrize("engines", [(one,) * 4 for one in ENGINES] + [("journal", "snapshot", "read_set", "journal")])
@pytest.mark.parametrize("name", ["now", "put"])
def test_a_failure_at_any_step_of_bringing_state_back_leaves_the_present(engines, name, monkeypatch):
    """At every one of them: what is put aside, what brings the past in, what brings the present back."""
    failed = 0
    for at in range(60):
        ck, writers, x = Checkpoint(), chain(4), torch.randn(16, WIDTH)
        for _ in range(2):
            forward(ck, writers, engines, x).backward()
        loss = forward(ck, writers, engines, x)
        present, versions = writers[0].queue.clone(), writers[0].queue._version
        with monkeypatch.context() as patch:
            fault = Faulty(patch, name, at)
            try:
                loss.backward()
            except KeyboardInterrupt:
                failed += 1
            assert torch.equal(writers[0].queue, present), at
            assert writers[0].queue._version == versions
        if not fault.raised:
            break
        del loss
        assert not log._LOGS
    assert failed >= 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_body_that_fails_in_its_replay_leaves_the_present(engine, monkeypatch):
    ck, writers, x = Checkpoint(), chain(3), torch.randn(16, WIDTH)
    for _ in range(2):
        forward(ck, writers, (engine,) * 3, x).backward()
    for which in range(3):
        loss = forward(ck, writers, (engine,) * 3, x)
        present = writers[0].queue.clone()
        left, square = [which], torch.square

        def failing(x, left=left, square=square):
            if not left[0]:
                raise ValueError("the body fails")
            left[0] -= 1
            return square(x)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "square", failing)
            with pytest.raises(ValueError, match="the body fails"):
                loss.backward(retain_graph=True)
        assert torch.equal(writers[0].queue, present)
        loss.backward()
        assert torch.equal(writers[0].queue, present)


def test_with_a_copy_of_its_own_a_call_asks_nothing_of_what_ran_after_it():
    for engine in ("snapshot", "read_set"):
        ck, (writer,), x = Checkpoint(), chain(1), torch.randn(16, WIDTH)
        plain, (other,) = Checkpoint(), chain(1)
        for _ in range(3):
            loss = forward(ck, [writer], (engine,), x)
            want = forward(plain, [other], ("eager",), x)
            with torch.no_grad():
                for queue in (writer.queue, other.queue):
                    queue[100:200] = 7.0  # outside every region
            left = writer.queue.clone()
            for one, model in ((loss, writer), (want, other)):
                one.backward()
                assert torch.equal(model.queue, left)
            assert torch.equal(writer.line.weight.grad, other.line.weight.grad)
    # the log has no answer to that, and says so
    ck, (writer,), x = Checkpoint(), chain(1), torch.randn(16, WIDTH)
    forward(ck, [writer], ("journal",), x).backward()
    loss = forward(ck, [writer], ("journal",), x)
    with torch.no_grad():
        writer.queue[100:200] = 7.0
    with pytest.raises(ModifiedArgument):
        loss.backward()


@pytest.mark.parametrize("count", [2, 5, 8])
def test_moves_from_the_present_are_those_of_the_cost_model(count, monkeypatch):
    ck, writers, x = Checkpoint(), chain(count), torch.randn(16, WIDTH)
    engines = ("journal",) * count
    for _ in range(2):
        forward(ck, writers, engines, x).backward()
    before = retained_bytes()
    loss = forward(ck, writers, engines, x)
    assert count * ENTRY <= retained_bytes() - before < count * (ENTRY + 16_384)
    moved = {"now": 0, "put": 0}
    now, put = Old.now, Old.put

    def counted_now(old):
        data = now(old)
        moved["now"] += data.nbytes
        return data

    def counted_put(old, *args):
        moved["put"] += (args[0] if args else old.kept.data).nbytes
        return put(old, *args)

    monkeypatch.setattr(Old, "now", counted_now)
    monkeypatch.setattr(Old, "put", counted_put)
    loss.backward()
    versions = count * (count + 1) // 2
    assert moved == {"now": versions * ENTRY, "put": 2 * versions * ENTRY}


def test_of_dense_writes_one_present_is_put_aside_however_many_there_are():
    ck, writers, x = Checkpoint(), chain(4, dense=True), torch.randn(16, WIDTH)
    for _ in range(3):
        loss = forward(ck, writers, ("journal",) * 4, x)
        with torch.profiler.profile(profile_memory=True) as profile:
            loss.backward()
    live = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    whole = ROWS * WIDTH * 4
    assert whole <= most < 1.5 * whole


class Outer(nn.Module):
    """A writer with a region of the user's own inside, which writes the same queue."""

    def __init__(self, queue: torch.Tensor, at: int) -> None:
        super().__init__()
        self.register_buffer("queue", queue)
        self.first, self.inner, self.at = nn.Linear(WIDTH, WIDTH), Writer(queue, at + 1000), at
        self.checkpoint: Checkpoint | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.queue[self.at : self.at + WRITTEN] = x.detach()[:WRITTEN]
        x = torch.tanh(self.first(x) + self.queue[:4].clone().sum(0))
        return self.inner(x) if self.checkpoint is None else self.checkpoint(self.inner, x)


@pytest.mark.parametrize(
    "engines", [(one,) * 2 for one in ENGINES] + [("snapshot", "journal"), ("journal", "read_set")]
)
def test_a_region_of_the_users_own_inside_is_served_too(engines):
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        queue, x = torch.randn(ROWS, WIDTH), torch.randn(16, WIDTH)
        models = [Outer(queue, 8 * k) for k in range(2)]
        ck, found = Checkpoint(), []
        for model in models:
            model.checkpoint = Checkpoint() if planned else None
        for _ in range(4):
            h = x
            for model, engine in zip(models, engines, strict=True):
                h = ck.planned([(queue, engine)], model.forward, (h,), {}) if planned else model(h)
            present = queue.clone()
            found += torch.autograd.grad(h.square().mean(), [p for model in models for p in model.parameters()])
            assert torch.equal(queue, present)
        results.append([*found, present])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("engines", [("journal",) * 3, ("read_set", "journal", "snapshot"), ("snapshot",) * 3])
def test_several_forwards_before_their_backwards_in_any_order(engines, order):
    """As in a pipeline: each backward finds what its own forward found, whoever wrote since."""
    results = []
    for used in (("eager",) * 3, engines):
        ck, writers, found = Checkpoint(), chain(3), []
        for _ in range(3):
            losses = [forward(ck, writers, used, torch.randn(16, WIDTH, generator=_generator(k))) for k in range(3)]
            present = writers[0].queue.clone()
            for k in order:
                found += torch.autograd.grad(losses[k], [p for writer in writers for p in writer.parameters()])
                assert torch.equal(writers[0].queue, present)
        results.append(found)
    assert all(map(torch.equal, *results))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
