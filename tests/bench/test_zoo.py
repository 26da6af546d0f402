"""The zoo: every model is the same at every making, trains, and keeps the state that it is said to keep."""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import regrad.torch as rt
from regrad.bench.zoo import BENCH, SMALL, ZOO, Model
from regrad.bench.zoo.data import TEXT_BYTES, digits, text
from regrad.core.errors import InvalidSubject, UsageError
from regrad.torch.measure import measure_peak

MIB = 2**20
STEPS = 2
"""Statistics that only the forward writes show in the second step's gradients, not in the first's."""


@pytest.fixture(params=ZOO.values(), ids=ZOO)
def entry(request: pytest.FixtureRequest) -> Model:
    """Each model of the zoo."""
    model: Model = request.param
    if model.name in ("gpt2", "llama", "mixtral", "bert"):
        pytest.importorskip("transformers")
    return model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain(value: Any) -> Any:
    """What can be compared by ``==``: tensors as their bytes, containers by their parts, other objects by their class."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.detach().contiguous().view(torch.uint8).numpy().tobytes()
                if value.dim() else value.detach().item())  # fmt: skip
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def state(model: nn.Module) -> dict[str, Any]:
    """All that modules hold beside what is trained: buffers, frozen parameters, attributes."""
    found: dict[str, Any] = {name: plain(buffer) for name, buffer in model.named_buffers()}
    found |= {name: plain(p) for name, p in model.named_parameters() if not p.requires_grad}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        found |= {f"{path}.{name}": plain(value) for name, value in own.items() if name != "forward"}
    return found


def left_by(step: rt.Step) -> dict[str, Any]:
    """What ``STEPS`` steps from a seed leave: losses, gradients, weights, state, the generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        losses = [plain(step()) for _ in range(STEPS)]
        generator = plain(torch.get_rng_state())
    named = list(step.model.named_parameters())
    return {
        "losses": losses,
        "gradients": {name: plain(parameter.grad) for name, parameter in named},
        "weights": {name: plain(parameter) for name, parameter in named},
        "state": state(step.model),
        "generator": generator,
    }


def twin(step: rt.Step) -> rt.Step:
    """A step of copies, optimizer and all."""
    model, batch, optimizer = copy.deepcopy((step.model, step.batch, step.optimizer))
    return rt.Step(model, batch, step.loss, optimizer)


def blocks(entry: Model, model: nn.Module) -> list[nn.Module]:
    """The modules that the globs of an entry name; ``*`` does not cross a dot."""
    patterns = [re.compile(fnmatch.translate(glob).replace(".*", "[^.]*")) for glob in entry.blocks]
    return [module for name, module in model.named_modules() if any(p.match(name) for p in patterns)]


class Counted:
    """A block's forward under torch's checkpoint; counts the calls of the block and the runs of its forward."""

    def __init__(self, block: nn.Module) -> None:
        self.forward, self.calls, self.runs = block.forward, 0, 0
        object.__setattr__(block, "forward", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return checkpoint(self.run, *args, use_reentrant=False, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.forward(*args, **kwargs)


def test_the_zoo_is_what_the_experiments_need() -> None:
    assert set(ZOO) == {
        "gpt", "llama_like", "vit", "gpt2", "llama", "mixtral", "bert", "batchnorm_conv", "unet", "moe",
        "queue_encoder", "vq_autoencoder", "spectral_norm", "lstm", "spiking",
    }  # fmt: skip
    assert all(name == entry.name and entry.description for name, entry in ZOO.items())
    assert all(set(entry.settings) == {SMALL, BENCH} for entry in ZOO.values())


def test_two_runs_from_the_same_start_leave_the_same_bytes(entry: Model) -> None:
    step = entry.make()
    other = twin(step)
    first = left_by(step)
    assert left_by(other) == first
    assert left_by(entry.make()) == first  # so is a step that is made anew


def test_trains(entry: Model) -> None:
    step = entry.make()
    before = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    assert step().isfinite()
    without, still = [], []
    for name, parameter in step.model.named_parameters():
        if parameter.requires_grad:
            without += [name] if parameter.grad is None or not parameter.grad.abs().sum() > 0 else []
            still += [name] if torch.equal(parameter, before[name]) else []
    assert without == []
    assert still == []


def test_state_changes_where_it_is_said_to(entry: Model) -> None:
    step = entry.make()
    before = state(step.model)
    step()
    once = state(step.model)
    step()
    twice = state(step.model)
    assert (before != once) == entry.stateful
    assert (once != twice) == entry.stateful


def test_blocks_run_again_diverge_where_they_are_said_to(entry: Model) -> None:
    """torch's checkpoint assumes that both runs of a block do the same; in the models that keep state they do not."""
    step = entry.make()
    eager = left_by(twin(step))
    counted = [Counted(block) for block in blocks(entry, step.model)]
    assert len(counted) >= 4
    try:
        again = left_by(step)
    except CheckpointError:
        again = {"failed": True}
    assert (again != eager) == entry.rerun_diverges
    if "failed" not in again:
        assert all(one.calls >= STEPS and one.runs == 2 * one.calls for one in counted)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_blocks_run_again_grow_the_cache_that_the_model_returns(name: str) -> None:
    """The step's bytes are right all the same: causal attention sees the first keys only, and those are the old ones."""
    pytest.importorskip("transformers")
    step = ZOO[name].make()
    for block in blocks(ZOO[name], step.model):
        Counted(block)
    result = step.model(**step.batch)
    length = step.batch["input_ids"].shape[1]
    assert result.past_key_values.get_seq_length() == length
    result.loss.backward()
    assert result.past_key_values.get_seq_length() == 2 * length


def test_plans_matter(entry: Model) -> None:
    """Most of a small step's memory is what the forward keeps, at least 10 MiB."""
    step = entry.make()
    step()
    peak = measure_peak(step)
    above = peak.peak_bytes - peak.baseline_bytes
    assert above >= 10 * MIB
    assert above > peak.baseline_bytes


def test_an_unknown_size() -> None:
    with pytest.raises(UsageError, match="model unet has no size 'huge'; it has small and bench"):
        ZOO["unet"].make("huge")


def test_making_a_model_draws_nothing_from_the_callers_generator() -> None:
    before = torch.get_rng_state()
    ZOO["unet"].make()
    assert torch.equal(torch.get_rng_state(), before)


def test_text_is_the_librarys_and_its_targets_follow() -> None:
    tokens, targets = text(2, 64)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.shape == (2, 64)
    assert bytes(tokens[0].tolist()) in b"".join(
        p.read_bytes() for p in sorted(Path(copy.__file__).parent.glob("*.py"))
    )
    assert TEXT_BYTES > 64


def test_digits_are_real_and_limited() -> None:
    images, labels = digits(10, 16)
    assert labels.tolist() == list(range(10))
    assert images.shape == (10, 1, 16, 16)
    assert 0 <= images.min() < images.max() <= 1
    with pytest.raises(InvalidSubject, match="2,000 digits were asked for, scikit-learn has 1,797"):
        digits(2000, 8)
