"""Steps of several sizes, each profiled, planned and, where asked for, run: what ``rt.fit`` searches on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from regrad.core.errors import CannotTrace, InfeasibleBudget, InvalidSubject, RegradError, is_users, mark_as_users
from regrad.core.fit import BATCH
from regrad.core.plan import Plan
from regrad.core.simulate_trace import live_levels
from regrad.core.trace import OPTIMIZER
from regrad.core.units import format_bytes
from regrad.memory.devices import Device
from regrad.torch.describe import UNSEEN_BYTES
from regrad.torch.dryrun import quiet
from regrad.torch.execute import apply, remove
from regrad.torch.lookups import check_lookups
from regrad.torch.measure import measure, measure_peak
from regrad.torch.plan import plan_profile
from regrad.torch.profile import Profile, make_profile
from regrad.torch.record import tensors_in
from regrad.torch.room import available_bytes
from regrad.torch.step import KEPT, Step
from regrad.torch.store import generators, own_gradients, persistent_bytes, real_copy, set_generators

_PLAIN = (int, float, str, bytes, type(None))
QUICK_SECONDS, FAIR_SECONDS, THOROUGH_SECONDS = 0.0, 0.5, 2.0
"""Of the local search of ranges: while sizes are only asked whether they fit, which it does not decide; while they are
compared; for the plans that are handed out."""


@dataclass(frozen=True)
class Question:
    """What is asked of every size. ``step`` is the user's; its batch is not used."""

    step: Step
    make_batch: Callable[..., Any]
    over: str
    budget_bytes: int
    effective_batch: int | None = None
    batch_size: int = 1
    sequence_length: int | None = None
    planner: Any = None
    segments: str | None = None
    device: Device | None = None

    def micro_batch(self, size: int) -> int:
        """Samples in one forward of a step of ``size``."""
        return size if self.over == BATCH else self.batch_size

    def accumulation_steps(self, size: int) -> int:
        """Forwards to one optimizer step."""
        return 1 if self.effective_batch is None else -(-self.effective_batch // self.micro_batch(size))

    def gradients(self, size: int) -> str:
        """Micro-batches after the first one find the gradients of those before."""
        return KEPT if self.accumulation_steps(size) > 1 else str(self.step.gradients)

    @property
    def is_here(self) -> bool:
        """Whether a step can be run and measured where the model is."""
        fake = isinstance(next(self.step.model.parameters()), FakeTensor)
        return self.device is None and not fake and self.step.device.type in ("cpu", "cuda")


@dataclass
class Trial:
    """What is known of one size.

    plan     within the budget, or if ``refusal`` is set the plan of the least peak
    error    what the user's batch or model raised; then there is nothing else
    """

    size: int
    profile: Profile | None = None
    plan: Plan | None = None
    refusal: InfeasibleBudget | None = None
    error: BaseException | None = None
    search_seconds: float = -1.0
    measured_bytes: int | None = None

    @property
    def eager_peak_bytes(self) -> int:
        """Without a plan."""
        return 0 if self.profile is None else live_levels(self.profile.trace).peak_bytes + UNSEEN_BYTES

    @property
    def optimizer_seconds(self) -> float:
        """Of the optimizer's step, which accumulation runs once."""
        operations = [] if self.profile is None else self.profile.trace.operations
        return sum(operation.seconds for operation in operations if operation.phase == OPTIMIZER)


class Trials:
    """Tries sizes, each once; ``say`` is told of every one. Call it inside :func:`regrad.torch.store.untouched`."""

    def __init__(self, question: Question, say: Callable[[str, float], None]) -> None:
        self.question = question
        self.must_run = False
        """Whether a size fits only if a real step of it, run under its plan, stays within the budget too."""
        self._say = say
        self._tried: dict[int, Trial] = {}
        self._generators = generators()

    def __iter__(self) -> Iterator[Trial]:
        return iter(sorted(self._tried.values(), key=lambda trial: trial.size))

    # -- levels, for the search -------------------------------------------------------------------------------

    def eager_level(self, size: int) -> int | None:
        """Peak bytes of the step without a plan; None where it does not run."""
        trial = self.profiled(size)
        return None if trial.error is not None else trial.eager_peak_bytes

    def level(self, size: int) -> int | None:
        """The least peak bytes of any plan; None where the step does not run."""
        trial = self.planned(size, THOROUGH_SECONDS if self.must_run else QUICK_SECONDS)
        if trial.plan is None or trial.error is not None:
            return None
        least = trial.plan.least_bytes
        return self._measured_level(size, least) if self.must_run and trial.refusal is None else least

    def _measured_level(self, size: int, least_bytes: int) -> int | None:
        """The larger of the least peak and that of a real step under the size's own plan."""
        self.measure(size)
        trial = self.profiled(size)
        return None if trial.error is not None else max(least_bytes, trial.measured_bytes or 0)

    # -- one size ---------------------------------------------------------------------------------------------

    def profiled(self, size: int) -> Trial:
        """The trial of a size with its profile."""
        trial = self._tried.get(size)
        if trial is None:
            self._say("trying sizes", len(self._tried) / (len(self._tried) + 4))
            trial = self._tried[size] = Trial(size)
            trial.error = self._no_room(size) or self._profile(trial)
        return trial

    def planned(self, size: int, search_seconds: float = QUICK_SECONDS) -> Trial:
        """The trial of a size with a plan, for whose speed so much time was taken at least."""
        trial = self.profiled(size)
        if trial.profile is None or trial.search_seconds >= search_seconds:
            return trial
        for search in (trial.profile.search, trial.profile.masked_search):
            if search is not None:
                search.limit_seconds = search_seconds
        trial.search_seconds, trial.measured_bytes = search_seconds, None
        try:
            with quiet():
                trial.plan = plan_profile(trial.profile, self.question.budget_bytes, self.question.planner)
            trial.refusal = None
        except InfeasibleBudget as error:
            trial.plan, trial.refusal = error.plan, error
        except Exception as error:
            if not is_users(error):
                raise
            trial.error = error  # a step that runs a few times and then no more, such as one that fills a buffer
        return trial

    def measure(self, size: int) -> None:
        """Run a step of this size on a copy, under its plan, and note its peak; what it raises is the trial's error."""
        trial = self.planned(size)
        if trial.measured_bytes is not None or trial.plan is None or trial.error is not None:
            return
        self._say("running a step", 0.0)
        step = self.step(size)
        try:
            with own_gradients(step):
                copy = real_copy(step)
                remove(copy.model)
                apply(copy.model, trial.plan)
                on_cpu = copy.device.type == "cpu"
                trial.measured_bytes = measure_peak(copy).peak_bytes if on_cpu else measure(copy, steps=1).peak_bytes
        except Exception as error:
            if not is_users(error):
                raise
            trial.error = error
        finally:
            set_generators(self._generators)

    def room_to_run(self, size: int) -> str:
        """Why a step of this size is not run here; "" if it can be."""
        trial = self.planned(size)
        kind = self.question.step.device.type
        if not self.question.is_here or trial.plan is None:
            return "the device is not here" if kind in ("cpu", "cuda") else f"memory on {kind} cannot be measured"
        # The copy's own weights are in the predicted peak already; what a first step makes comes and goes.
        needed, room = trial.plan.predicted_peak_bytes, available_bytes()
        if kind != "cpu" or needed <= room:
            return ""
        return f"a copy that runs takes {format_bytes(needed)}, and {format_bytes(room)} are free"

    def step(self, size: int) -> Step:
        """The user's step with a batch of this size."""
        return self._with_batch(size, self._make(size))

    def _with_batch(self, size: int, batch: Any) -> Step:
        asked, step = self.question, self.question.step
        _check_size(batch, asked, size)
        return Step(step.model, batch, step.loss, step.optimizer, gradients=asked.gradients(size))

    def _make(self, size: int) -> Any:
        asked = self.question
        length = asked.sequence_length if asked.over == BATCH else size
        more = {} if length is None else {"sequence_length": length}
        set_generators(self._generators)
        try:
            return asked.make_batch(asked.micro_batch(size), **more)
        except Exception as error:
            if not isinstance(error, RegradError):
                mark_as_users(error)
            raise
        finally:
            set_generators(self._generators)

    def _profile(self, trial: Trial) -> BaseException | None:
        """Profile a size; returns what kept the user's step from running, raises what is no matter of its size."""
        asked = self.question
        try:
            batch = self._make(trial.size)
        except Exception as error:  # noqa: BLE001 - the user's own code: there is no batch of this size
            return error
        try:
            step = self._with_batch(trial.size, batch)
            with quiet():
                profile = make_profile(step, segments=asked.segments, device=asked.device)
                check_lookups(profile.rehearsal)
        except Exception as error:
            if is_users(error) or isinstance(error, CannotTrace):
                return error
            raise
        trial.profile = profile
        return None

    def _no_room(self, size: int) -> CannotTrace | None:
        """A step that can only be recorded by running it must not be run where it would take more than there is."""
        known = [trial for trial in self if trial.profile is not None and trial.profile.rehearsal.why_real]
        if not known or known[-1].size >= size:
            return None
        last = known[-1]
        above = (last.eager_peak_bytes - persistent_bytes(self.question.step)) * size // last.size
        room = available_bytes()
        if above <= room:
            return None
        return CannotTrace(
            f"the step can only be recorded by running it, and one of {size} would take about {format_bytes(above)} where "
            f"{format_bytes(room)} are free"
        )


def takes_length(make_batch: Callable[..., Any]) -> bool:
    """Whether ``make_batch`` can be called with ``sequence_length``."""
    try:
        inspect.signature(make_batch).bind(1, sequence_length=1)
    except TypeError:
        return False
    except ValueError:  # a callable without a signature shows what it thinks of its arguments when it is called
        return True
    return True


def _check_size(batch: Any, asked: Question, size: int) -> None:
    """Refuse a batch in which nothing has the size that was asked for: sizes would be compared that are none."""
    parts = dict(batch) if isinstance(batch, Mapping) else batch
    tensors = tensors_in(parts)
    if not tensors and any(not isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(parts)):
        return  # an object of the user's own: nothing is known of what it holds
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:4]) or "no tensor at all"
    samples = asked.micro_batch(size)
    if not any(tensor.dim() and tensor.shape[0] == samples for tensor in tensors) and not _lists(parts, samples):
        raise InvalidSubject(
            f"make_batch({samples}) gave a batch in which no tensor has {samples} in its first dimension (it has {shapes}). "
            "Return batches of the size that is asked for; if there are no more samples, say most=..."
        )
    # A language model may be given one token more than it predicts.
    wanted = {size, size + 1}
    if asked.over != BATCH and not any(wanted & set(tensor.shape[1:]) for tensor in tensors if tensor.dim()):
        raise InvalidSubject(
            f"make_batch({samples}, sequence_length={size}) gave a batch in which no tensor is {size} long after its first "
            f"dimension (it has {shapes}). Return sequences of the length that is asked for."
        )


def _lists(batch: Any, samples: int) -> bool:
    """Whether somewhere below the top a list has one item for each sample, as batches of images of many sizes have."""
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (tuple, list)) else ()
    return any(isinstance(part, list) and len(part) == samples for part in parts)
