"""Runs of the step that cost no memory: fake copies of model, batch and optimizer, with or without a plan, recorded."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from regrad.core import trace as tr
from regrad.core.errors import CannotTrace, is_users
from regrad.core.trace import Trace
from regrad.core.units import format_bytes
from regrad.torch import execute
from regrad.torch.effects import ArgumentWatch
from regrad.torch.record import Record, Recorder
from regrad.torch.room import available_bytes
from regrad.torch.step import Step
from regrad.torch.store import (
    fake_copy,
    generators,
    own_gradients,
    persistent_bytes,
    persistent_tensors,
    real_copy,
    set_generators,
)
from regrad.torch.values import ValueMode


class Rehearsal:
    """A copy of the user's step on which steps are run and recorded. Fake where it can be, real where it must be.

    Raises :class:`CannotTrace` if the model cannot run under fake tensors and a real copy does not fit; the model's own
    exception if the model fails in a real run too.
    """

    def __init__(self, step: Step, *, real: bool = False) -> None:
        self.original = step
        self._generators = generators()
        self.mode: FakeTensorMode | None = _own_mode(step) or FakeTensorMode()
        self.why_real = ""
        if real:
            self._be_real(step)
            return
        failure = self._try_fake(step, self.mode)
        if failure is not None:
            # Outside the handler: what the real step raises must not drag the fake one's exception along.
            self._use_real(step, failure)

    def _try_fake(self, step: Step, mode: FakeTensorMode) -> Exception | None:
        with quiet():
            try:
                self.step = fake_copy(step, mode)
                self._warm_up()
            except Exception as error:  # noqa: BLE001 - whatever it is, the real step decides
                return error
        return None

    @property
    def source(self) -> str:
        """ "fake" or "real"."""
        return "real" if self.mode is None else "fake"

    def _use_real(self, step: Step, error: Exception) -> None:
        """The fake step failed: the step is wrong, or needs values. A real step tells, where there is room for one."""
        needed, room = 4 * persistent_bytes(step), available_bytes()
        if needed > room:
            if is_users(error) and not _is_about_fakes(error):
                raise error
            raise CannotTrace(
                f"the step does not run under fake tensors ({_in_words(error)}), and there is no room for a real one on "
                f"a copy: {format_bytes(room)} free, about {format_bytes(needed)} needed. Such a step usually branches "
                "on tensor values (.item(), `if tensor:`, nonzero): make that a Python value, or plan with a smaller "
                "batch."
            ) from error
        self.why_real = _in_words(error)
        self._be_real(step)

    def _be_real(self, step: Step) -> None:
        self.mode = None
        self.step = real_copy(step)
        self._warm_up()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The modes under which the copy runs: none for a real one."""
        with own_gradients(self.original):
            if self.mode is None:
                yield
            else:
                with self.mode, ValueMode(self.mode):
                    yield

    def _warm_up(self) -> None:
        """One whole step, so that what the first one makes (optimizer state, lazy caches, kept gradients) is there.

        A plan that is applied to the user's model came along with the copy and is taken off it first.
        """
        execute.remove(self.step.model)
        with self.entered():
            self.step()
            self.step.clear_gradients()

    def record_lifetimes(self, install: Callable[[torch.nn.Module], Any]) -> Trace:
        """Record one forward pass in which autograd keeps nothing: what each node would have saved is noted and let go.

        A storage then dies when Python drops it, which the eager step does not show for what autograd holds.
        """
        recorder = Recorder(lifetimes=True)
        self._register(recorder)
        install(self.step.model)
        try:
            self._reset_generators()
            with self.entered(), recorder, torch.autograd.graph.saved_tensors_hooks(recorder.saved, _never):
                loss = self.step.compute_loss()
                # What the loss and its graph hold lives on through the backward; only the rest was dropped by now.
                held = recorder.alive()
                del loss
        finally:
            execute.remove(self.step.model)
        for index in held:
            recorder.storages[index].death = None
        return recorder.finish(source=self.source, gradients="", device="")

    def _reset_generators(self) -> None:
        """Start every run from the same generators, so that a model that draws its path takes the same one each time."""
        set_generators(self._generators)

    def record(
        self,
        install: Callable[[torch.nn.Module], Any] | None = None,
        watch: set[str] | None = None,
        marked: bool = False,
        number: bool = True,
    ) -> Record:
        """Record one step. ``install`` puts a plan on the copy, which is taken off afterwards; ``watch`` names modules
        whose calls may change an object that they are given; ``number`` tells which torch call each operation is of."""
        step = self.step
        recorder, watcher = Recorder(marked=marked), ArgumentWatch(watch or set())
        names, index_of = self._register(recorder)
        try:
            if install is not None:
                install(step.model)
            self._reset_generators()
            began = time.process_time()
            with self.entered(), recorder, watcher.watching(step.model), recorder.watching(step.model, number=number):
                loss = step.compute_loss()
                recorder.phase = tr.BACKWARD
                loss.backward()
                recorder.phase = tr.OPTIMIZER
                self._mark_gradients(recorder)
                if step.optimizer is not None:
                    step.optimizer.step()
            seconds = time.process_time() - began
        finally:
            execute.remove(step.model)
            with self.entered():
                step.clear_gradients()
        trace = recorder.finish(
            source=self.source, gradients=str(step.gradients), device=str(step.device), seconds=seconds
        )
        calls = tuple(recorder.counter.names) if recorder.forwards == 1 else ()
        return Record(trace, names, recorder.signatures, recorder.signature_of, index_of, watcher.changed, calls)

    def _register(self, recorder: Recorder) -> tuple[dict[int, str], dict[int, int]]:
        """Make what is there before the step known to the recorder; its names, and its places by storage."""
        index_of: dict[int, int] = {}
        for tensor, category in persistent_tensors(self.step):
            recorder.register(tensor, category)
            index = recorder.find(tensor)
            if index is not None:
                index_of[tensor.untyped_storage()._cdata] = index
        names: dict[int, str] = {}
        for kind, tensors in (
            ("parameter", self.step.model.named_parameters()),
            ("buffer", self.step.model.named_buffers()),
        ):
            for name, tensor in tensors:
                index = recorder.find(tensor)
                if index is not None:
                    names.setdefault(index, f"{kind} {name}")
        return names, index_of

    def _mark_gradients(self, recorder: Recorder) -> None:
        for parameter in self.step.model.parameters():
            if parameter.grad is not None:
                index = recorder.find(parameter.grad)
                if index is not None and recorder.storages[index].birth >= 0:
                    recorder.storages[index].category = tr.GRADIENTS


def _own_mode(step: Step) -> FakeTensorMode | None:
    """The fake mode of a model that was built without bytes, such as one that no machine here could hold."""
    return next((p.fake_mode for p in step.model.parameters() if isinstance(p, FakeTensor)), None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging a fake kernel's failure, which is no failure of the user's: a real step follows."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _never(_: object) -> torch.Tensor:
    raise AssertionError("a forward pass alone asked for a saved tensor")


def _is_about_fakes(error: BaseException) -> bool:
    """Whether an exception says that fake tensors are the trouble, not the model."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    known = {"DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"}
    return bool(kinds & (known | {"UnsupportedFakeTensorException", "GuardOnDataDependentSymNode"})) or "Fake" in str(
        error
    )


def _in_words(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"
