"""``rt.explain_oom``: errors go on as they were, with who asked for how much, where, what is alive, and what would help."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from models import GPT, gpt_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad.torch as rt
from regrad.core.oom import OUTSIDE, REPLAY
from regrad.torch.oom_facts import asked_bytes, is_out_of_memory
from regrad.torch.traps_retained import KEPT_GRAPH

HUGE = 1 << 50  # no machine has it, and Linux refuses it at once


class Greedy(torch.autograd.Function):
    """The identity, whose backward asks for too much."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(HUGE, dtype=torch.uint8)
        return gradient


class Hungry(nn.Module):
    """Layers of which the second asks for too much, in the phase named."""

    def __init__(self, phase: str = "forward", error: Exception | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.inner = nn.Sequential(nn.Tanh(), Eater(phase, error))
        self.phase = phase

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = checkpoint(self.inner, x, use_reentrant=False) if self.phase == "replay" else self.inner(x)
        return x.square().mean()


class Eater(nn.Module):
    """Asks for too much, or raises what it is given."""

    def __init__(self, phase: str, error: Exception | None) -> None:
        super().__init__()
        self.phase, self.error, self.calls = phase, error, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.error is not None:
            raise self.error
        if self.phase == "forward" or (self.phase == "replay" and self.calls % 2 == 0):
            torch.empty(HUGE, dtype=torch.uint8)  # the line that asked
        return Greedy.apply(x) if self.phase == "backward" else torch.tanh(x)


class HungryOptimizer(torch.optim.SGD):
    """Its step asks for too much."""

    def step(self, closure=None):
        super().step(closure)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of …")


def explained(run, *given, **settings):
    """The error that ``run`` raises within ``rt.explain_oom``."""
    with pytest.raises((RuntimeError, MemoryError)) as caught, rt.explain_oom(*given, **settings):
        run()
    return caught.value


# -- the error itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 79 GiB"), 20 << 20),
        (torch.cuda.OutOfMemoryError("Tried to allocate 1.50 GiB"), 3 << 29),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 12345 bytes."), 12345),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (MemoryError("Unable to allocate 8.00 PiB for an array with shape (1125899906842624,)"), 8 << 50),
        (MemoryError("std::bad_alloc"), None),
    ],
)  # fmt: skip
def test_what_counts_as_out_of_memory(error, asked):
    assert is_out_of_memory(error)
    assert asked_bytes(error) == asked

    def run():
        raise error

    found = explained(run)
    assert found is error
    assert found.explanation.asked_bytes == asked
    assert any(note.startswith("regrad: out of memory on") for note in found.__notes__)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory"), KeyError("x")])
def test_other_errors_pass_untouched(error):
    with pytest.raises(type(error)) as caught, rt.explain_oom() as seen:
        raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert not hasattr(error, "explanation")
    assert seen.explanation is None
    assert not is_out_of_memory(error)


def test_it_is_still_caught_by_its_type():
    with pytest.raises(torch.OutOfMemoryError), rt.explain_oom():  # noqa: PT012 - the type is what is tested
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        except torch.OutOfMemoryError:
            raise


def test_nothing_happens_without_an_error():
    with rt.explain_oom(GPT(blocks=1), gpt_batch()) as seen:
        value = 3
    assert (value, seen.explanation, seen.advice) == (3, None, None)


def test_an_explanation_that_fails_does_not_hide_the_error(monkeypatch):
    def broken(*given):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("regrad.torch.oom.alive", broken)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    def run():
        raise error

    assert explained(run) is error
    assert error.__notes__ == ["regrad: this could not be explained (ZeroDivisionError: a defect)"]


# -- where in the step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "said", "modules"),
    [("forward", "forward", ("Hungry", "inner", "inner.1")), ("backward", "backward", ()),
     ("replay", REPLAY, ("inner", "inner.1"))],
)  # fmt: skip
@pytest.mark.parametrize("bare", [True, False])
def test_the_phase_and_the_module(phase, said, modules, bare):
    model = Hungry(phase)
    step = rt.Step(model, torch.randn(4, 32))
    found = explained(step) if bare else explained(step, step, budget="1 GiB")
    if bare and phase == "replay":
        modules = ("Sequential", "1")  # named within the outermost module that the traceback shows
    assert found.explanation.phase == said
    assert found.explanation.modules == modules
    assert found.explanation.asked_bytes == HUGE
    assert found.explanation.where.partition(":")[0].endswith("test_oom.py")
    assert "torch.empty(HUGE" in found.explanation.code
    assert f"1024 TiB ({HUGE:,} bytes) were asked for in the {said}" in found.__notes__[0]


def test_the_optimizers_step():
    model = GPT(blocks=1)
    step = rt.Step(model, gpt_batch(), optimizer=HungryOptimizer(model.parameters(), lr=0.1))
    found = explained(step)
    assert type(found) is torch.OutOfMemoryError
    assert (found.explanation.phase, found.explanation.asked_bytes) == ("optimizer", 5 << 29)


def test_outside_the_model():
    found = explained(lambda: torch.empty(HUGE, dtype=torch.uint8))
    assert (found.explanation.phase, found.explanation.modules) == (OUTSIDE, ())
    assert "were asked for outside the model" in found.__notes__[0]
    assert not hasattr(found, "advice")


# -- what is alive, and what would help ---------------------------------------------------------------------------------


def test_what_is_alive():
    model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), Eater("forward", None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = explained(lambda: torch.empty(HUGE, dtype=torch.uint8)).explanation.alive
    after = explained(lambda: model(torch.randn(64, 256))).explanation.alive
    weights = sum(parameter.nbytes for parameter in model.parameters())
    for kind in ("weights", "gradients", "optimizer"):
        assert before[kind] == after[kind] >= weights
    # The layer saved its input, tanh its result; the layer's result is let go of.
    assert after["activations"] - before["activations"] == (64 * 1024 + 64 * 256) * 4
    assert after["other tensors"] == before["other tensors"]


def test_advice_comes_with_the_error():
    step = rt.Step(GPT(blocks=2), gpt_batch())
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    def run():
        raise error

    with pytest.raises(torch.OutOfMemoryError), rt.explain_oom(step, budget="60%") as seen:
        run()
    assert error.advice is seen.advice is seen.explanation.advice
    assert seen.advice.suggestions[0].fits
    assert seen.advice.verdict in error.__notes__[0]


@pytest.mark.parametrize("keep", [False, True])
def test_what_the_failed_frames_held(keep):
    """Without letting go of it there would be no room to advise in; a debugger may want it nevertheless."""

    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            result = self.layer(x)
            seen.append(weakref.ref(result))
            if type(result) is torch.Tensor:  # not one without bytes
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
            return result.square().mean()

    seen = []
    step = rt.Step(Holding(), torch.randn(2, 4))
    found = explained(step, step, budget="1 GiB", keep_frames=keep)
    assert (seen[0]() is not None) is keep
    assert found.explanation.modules == ("Holding",)
    assert found.advice.fits


def test_a_step_that_should_have_fitted():
    step = rt.Step(GPT(blocks=1), gpt_batch())
    found = explained(lambda: torch.empty(HUGE, dtype=torch.uint8), step)
    assert found.advice.fits
    assert any("look for what else holds memory" in note for note in found.explanation.notes)


def test_which_backward_asks_for_as_much():
    step = rt.Step(GPT(blocks=2), gpt_batch())
    grown = 8 * 32 * 256 * 4  # the gradient of the widest activation of a block

    def run():
        (step.compute_loss() * 1).register_hook(refuse)
        Greedy.apply(step.compute_loss()).backward()

    def refuse(gradient):
        return gradient

    found = explained(run, step, budget="1 GiB")
    assert found.explanation.phase == "backward"
    from regrad.torch.oom import _likely

    assert "blocks." in _likely(rt.profile(step), grown)


# -- the traps that can be seen from outside ----------------------------------------------------------------------------


def loop(how: str, steps: int = 4):
    """A training loop that ends in an error, and what it keeps."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, losses, x = torch.zeros(()), [], torch.randn(128, 64)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean() + model(-x).square().mean() if how == "two views" else model(x).square().mean()
        if how == "validation":
            total = total + loss
            continue
        loss.backward()
        optimizer.step()
        if how == "sum":
            total = total + loss
        elif how == "list":
            losses.append(loss)
        elif how == "numbers":
            total = total + loss.item()
            losses.append(loss.detach())
    torch.empty(HUGE, dtype=torch.uint8)


@pytest.mark.parametrize("how", ["sum", "list", "validation"])
def test_a_kept_loss_graph(how):
    found = explained(lambda: loop(how)).explanation
    assert [trap.name for trap in found.traps] == [KEPT_GRAPH]
    trap = found.traps[0]
    assert "4 forward passes" in trap.what
    assert ("losses" if how == "list" else "total") + " in loop" in trap.what
    # A validation pass holds its activations: tanh's results, their squares' argument, the input of the first layer.
    assert trap.bytes == (4 * (128 * 64 + 128) * 4 + 128 * 64 * 4 if how == "validation" else 0)


@pytest.mark.parametrize("how", ["plain", "numbers", "two views"])
def test_a_loop_that_keeps_nothing(how):
    assert explained(lambda: loop(how)).explanation.traps == ()


# -- a process that really runs out -------------------------------------------------------------------------------------

CHILD = """
    import resource, sys
    import torch
    from torch import nn
    import regrad.torch as rt
    torch.set_num_threads(1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(12))
            self.head = nn.Linear(512, 1)
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x).square().mean()

    model, batch = Net(), torch.randn(16384, 512)
    step = rt.Step(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    rt.Step(Net(), batch[:8])()  # what a first step loads is there before the limit
    used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)
    try:
        with rt.explain_oom(*([step] if sys.argv[1] == "step" else [])):
            step()
    except RuntimeError as error:
        found = error.explanation
        print(type(error).__name__, found.asked_bytes, found.phase, found.modules[-1])
        fitting = [one.kinds for one in found.advice.suggestions if one.fits] if found.advice else ""
        print(sum(found.alive.values()) // 2**20, fitting)
        print(error.__notes__[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("given", ["bare", "step"])
def test_a_limit_of_the_process(given, tmp_path):
    file = tmp_path / "child.py"
    file.write_text(textwrap.dedent(CHILD))
    done = subprocess.run([sys.executable, str(file), given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second, *note = done.stdout.splitlines()
    kind, asked, phase, module = first.split()
    assert (kind, int(asked), phase) == ("RuntimeError", 16384 * 512 * 4, "forward")
    assert module.startswith("blocks.")
    alive, _, fitting = second.partition(" ")
    assert 150 <= int(alive) <= 400
    assert note[0].startswith("regrad: out of memory on cpu: 32.0 MiB")
    if given == "step":
        assert "('plan',)" in fitting
        assert "('micro-batch',)" in fitting
        assert any("peak as it is" in line for line in note)
