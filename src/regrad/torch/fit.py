"""``rt.fit``: the largest batch or sequence length under a budget, and the one that trains fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regrad.core.errors import InfeasibleBudget, InvalidSubject, UsageError
from regrad.core.fit import BATCH, OVER, SEQUENCE, Fit, Size, find_edge
from regrad.core.units import Budget, format_bytes
from regrad.memory.devices import Device, as_device
from regrad.torch.describe import BAND_RATIO
from regrad.torch.fit_sizes import sizes_of, told
from regrad.torch.fit_trials import FAIR_SECONDS, THOROUGH_SECONDS, Question, Trial, Trials, takes_length
from regrad.torch.plan import check_planner
from regrad.torch.profile import Progress
from regrad.torch.step import KEPT, Step
from regrad.torch.store import untouched

MOST = 1 << 20
FIRST = {BATCH: (1, 2), SEQUENCE: (1, 2, 8, 64)}
"""Where a search begins: the first of these that runs. A batch norm in front of a loss wants two samples, a window more."""
REAL_GROWTH = 2
"""How much larger than the largest known one a size may be whose step can only be recorded by running it."""
BETWEEN, DIVISORS = 3, 4
"""Sizes that are tried for their throughput: so many between the largest eager one and the largest, so many divisors."""
EVEN_RATIO = 0.05
"""What a size that divides the effective batch may be slower than one that does not, and still be the best: predicted
seconds are no finer than that, and equal micro-batches need no weights."""


def fit(
    model: nn.Module | Step,
    make_batch: Callable[..., Any] | None = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: str | int | Budget | None = None,
    over: str = BATCH,
    effective_batch: int | None = None,
    most: int | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    planner: Any = None,
    segments: str | None = None,
    device: str | Device | None = None,
    confirm: bool = True,
    progress: Progress | None = None,
) -> Fit:
    """The largest batch (or sequence length) whose step fits ``budget`` under its own best plan, and the fastest one.

    model            a module, or a :class:`regrad.torch.Step` whose ``make_batch`` is used; its batch is not
    make_batch       ``make_batch(batch_size, sequence_length=None) -> batch``
    loss, optimizer  as for :func:`regrad.torch.plan`
    budget           "8 GiB", "8GB" or bytes; left out, what ``device`` leaves
    over             "batch", or "sequence": the length of ``batch_size`` samples (1 if not given)
    effective_batch  samples to one optimizer step. Smaller batches are micro-batches then, whose gradients add up, and
                     their steps are priced with gradients that are there from the start
    most             sizes above it are not looked at
    sequence_length  handed to ``make_batch`` while the batch is searched
    planner, segments, progress   as for :func:`regrad.torch.plan`
    device           one that need not be here ("h100-80gb"); nothing is run then
    confirm          run one step of the largest and of the best size under their plans, on a copy, and measure it

    By trace the largest size fits and the next one, under the plan of its least peak, does not. ``best`` has the least
    predicted seconds a sample (a token, for lengths) among the sizes tried: the largest that needs no plan, the largest of
    all, some between, divisors of the effective batch. Apply ``found.best.plan`` as it is.

    A size at which the model or ``make_batch`` raises ends the search, and a note says so. If a measured step goes over the
    budget or raises, sizes are searched again with a measured step of each. Nothing of the user's is changed. Cost: five to
    a dozen profiles and plans, and a copy of the model while a step is measured. A model that does not run under fake
    tensors is run for real at every size that is tried.

    Raises :class:`UsageError` for settings that do not go together, :class:`InvalidSubject` where there is no ``make_batch``
    or it gives batches of another size, :class:`InfeasibleBudget` with the least bytes and their plan where not even
    the smallest size fits, and what the model raises at that one.
    """
    began = time.monotonic()
    question = _question(
        model, make_batch, loss, optimizer, budget, over, effective_batch, batch_size, sequence_length, planner, segments,
        as_device(device),
    )  # fmt: skip
    highest = _highest(question, most)
    with untouched(question.step):
        found = _Search(Trials(question, progress or (lambda stage, done: None)), highest).answer(confirm)
    return replace(found, planning_seconds=time.monotonic() - began)


def _question(
    model: nn.Module | Step, make_batch: Any, loss: Any, optimizer: Any, budget: Any, over: str,
    effective_batch: int | None, batch_size: int | None, sequence_length: int | None, planner: Any, segments: str | None,
    device: Device | None,
) -> Question:  # fmt: skip
    """What was asked for, checked."""
    if over not in OVER:
        raise UsageError(f'over={over!r} is not known; it is "{BATCH}" or "{SEQUENCE}"')
    counts = {"effective_batch": effective_batch, "batch_size": batch_size, "sequence_length": sequence_length}
    for name, count in counts.items():
        _check_count(name, count)
    searched, name = (batch_size, "batch_size") if over == BATCH else (sequence_length, "sequence_length")
    if searched is not None:
        raise UsageError(f'{name}={searched} is what over="{over}" searches; leave it out, or give most={searched}')
    if over == SEQUENCE and effective_batch is not None and effective_batch < (batch_size or 1):
        raise UsageError(f"effective_batch={effective_batch} is smaller than batch_size={batch_size}")
    check_planner(planner)
    step = model if isinstance(model, Step) else Step(model, None, loss, optimizer)
    make = make_batch or step.make_batch
    if make is None or not callable(make):
        raise InvalidSubject(
            "there is no make_batch, so there are no batches of other sizes. Give rt.fit(model, make_batch, ...) or "
            "rt.Step(..., make_batch=...): a function make_batch(batch_size, sequence_length=None) that returns a batch."
        )
    if (over == SEQUENCE or sequence_length is not None) and not takes_length(make):
        raise InvalidSubject(
            "make_batch cannot be called as make_batch(batch_size, sequence_length=...), which a length takes. Let it have "
            "a parameter sequence_length."
        )
    return Question(
        step, make, over, _budget_bytes(budget, device), effective_batch, batch_size or 1, sequence_length, planner,
        segments, device,
    )  # fmt: skip


def _budget_bytes(budget: str | int | Budget | None, device: Device | None) -> int:
    if budget is None:
        if device is None:
            raise UsageError('there is no budget: give budget="8 GiB", or a device to fit.')
        return device.usable_bytes
    wanted = Budget.parse(budget)
    if wanted.kind != "bytes":
        raise UsageError(
            f"budget={budget!r} is a share of what one step needs, and steps of many sizes are compared: give an amount, "
            'such as "8 GiB".'
        )
    return int(wanted.amount)


def _check_count(name: str, count: object) -> None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise UsageError(f"{name}={count!r}: give a whole number of 1 or more")


def _highest(question: Question, most: int | None) -> int:
    """The largest size that is looked at: no batch is larger than the effective one."""
    _check_count("most", most)
    highest = MOST if most is None else most
    if question.over == BATCH and question.effective_batch is not None:
        highest = min(highest, question.effective_batch)
    return highest


class _Search:
    """One search over the trials of a question."""

    def __init__(self, trials: Trials, highest: int) -> None:
        self.trials = trials
        self.question = trials.question
        self.highest = highest
        self.budget_bytes = trials.question.budget_bytes
        self.notes: list[str] = []

    def answer(self, confirm: bool) -> Fit:
        """Search, confirm, describe."""
        lowest = self._lowest()
        largest, beyond = self._edge(lowest)
        if confirm and self._may_run(largest) and not self._within(largest):
            # What a real step says counts for more than what its trace does, and then for every size.
            self.trials.must_run = True
            self._check_lowest(lowest)
            largest, beyond = self._edge(lowest)
        eager = self._largest_eager(lowest, largest)
        best = self._best(eager or lowest - 1, largest)
        confirmed = None
        if confirm and self._may_run(largest):
            within = [self._within(size) for size in dict.fromkeys((largest, best))]
            confirmed = all(within)
        return self._describe(largest, best, eager, beyond, confirmed)

    # -- edges ------------------------------------------------------------------------------------------------

    def _lowest(self) -> int:
        """The smallest size that runs and fits."""
        first: BaseException | None = None
        for size in FIRST[self.question.over]:
            if size > self.highest:
                break
            trial = self.trials.planned(size)
            if trial.error is not None:
                first = first or trial.error
                continue
            if first is not None:
                self.notes.append(f"a step of {self._words(1)} does not run ({told(first)}): sizes begin at {size}")
            if trial.refusal is not None:
                raise self._infeasible(trial.refusal, size)
            return size
        assert first is not None
        raise first

    def _infeasible(self, error: InfeasibleBudget, size: int) -> InfeasibleBudget:
        """The refusal of the smallest size, which says that it is the smallest, and what is there whatever the plan."""
        always = f"{format_bytes(error.plan.persistent_bytes)} are always there"
        kept = ", gradients that micro-batches add to among them" if error.plan.gradients == KEPT else ""
        holder = f"{error.holder}; {always}{kept}. This is a step of {self._words(size)}: not even that fits"
        return InfeasibleBudget(error.budget_bytes, error.least_bytes, error.plan, holder)

    def _edge(self, lowest: int) -> tuple[int, int | None]:
        profile = self.trials.planned(lowest).profile
        growth = {"growth": REAL_GROWTH} if profile is not None and profile.rehearsal.why_real else {}
        return find_edge(self.trials.level, self.budget_bytes, lowest, self.highest, **growth)

    def _largest_eager(self, lowest: int, largest: int) -> int | None:
        level = self.trials.eager_level(lowest)
        if level is None or level > self.budget_bytes:
            return None
        return find_edge(self.trials.eager_level, self.budget_bytes, lowest, largest)[0]

    # -- real steps -------------------------------------------------------------------------------------------

    def _may_run(self, size: int) -> bool:
        why = self.trials.room_to_run(size)
        if why:
            note = f"no step was run: {why}"
            self.notes += [] if note in self.notes else [note]
        return not why

    def _within(self, size: int) -> bool:
        """Run a step of a size under the plan that it would be given; whether it ran and its peak was within the budget."""
        self.trials.planned(size, THOROUGH_SECONDS)
        self.trials.measure(size)
        trial = self.trials.profiled(size)
        measured = trial.measured_bytes or 0
        if trial.error is None and measured > self.budget_bytes:
            self.notes.append(
                f"a measured step of {self._words(size)} took {format_bytes(measured)} ({measured:,} bytes), over the "
                "budget that its prediction keeps"
            )
        return trial.error is None and measured <= self.budget_bytes

    def _check_lowest(self, lowest: int) -> None:
        """Refuse a smallest size of which a real step raises, or goes over the budget."""
        if self._within(lowest):
            return
        trial = self.trials.profiled(lowest)
        if trial.error is not None:
            raise trial.error
        holder = f"a measured step of {self._words(lowest)}, which takes more than its prediction"
        raise InfeasibleBudget(self.budget_bytes, trial.measured_bytes or 0, trial.plan, holder)

    # -- throughput -------------------------------------------------------------------------------------------

    def _best(self, eager: int, largest: int) -> int:
        """The size with the least seconds a unit; equal micro-batches before unequal ones that are hardly faster."""
        self.trials.planned(largest, THOROUGH_SECONDS)
        divisors = self._divisors(eager, largest)
        for size in [*divisors, *(_spread(eager, largest) if len(divisors) < BETWEEN else ())]:
            if size > eager:
                self.trials.planned(size, FAIR_SECONDS)
            else:
                self.trials.profiled(size)
        while True:
            best = self._fastest(largest)
            if self.trials.planned(best, THOROUGH_SECONDS).error is None:
                return best

    def _fastest(self, largest: int) -> int:
        """The best of what is known now."""
        sizes = [size for size in sizes_of(self.trials) if size.fits and size.size <= largest]
        fastest = min(sizes, key=_rank)
        effective = self.question.effective_batch
        if effective is None:
            return fastest.size
        limit = fastest.unit_seconds * (1 + EVEN_RATIO)
        even = [size for size in sizes if effective % size.micro_batch == 0 and size.unit_seconds <= limit]
        return min(even, key=_rank, default=fastest).size

    def _divisors(self, eager: int, largest: int) -> list[int]:
        """Sizes that divide the effective batch: the largest that needs no plan, and the largest that need one."""
        effective = self.question.effective_batch
        if effective is None or self.question.over != BATCH:
            return []
        divisors = [size for size in range(1, largest + 1) if effective % size == 0]
        below = [size for size in divisors if size <= eager]
        return [*below[-1:], *[size for size in divisors if size > eager][-DIVISORS:]]

    # -- the answer -------------------------------------------------------------------------------------------

    def _describe(self, largest: int, best: int, eager: int | None, beyond: int | None, confirmed: bool | None) -> Fit:
        asked, trials = self.question, self.trials
        main = trials.planned(largest)
        assert main.profile is not None
        profile = main.profile
        sizes = {size.size: size for size in sizes_of(trials)}
        asked_for = [size for size in (largest, best, eager, beyond) if size is not None]
        named = {size: replace(sizes[size], plan=trials.planned(size).plan) for size in asked_for}
        self._say_what_ended(largest, beyond)
        self._say_what_accumulation_holds(main)
        return Fit(
            over=asked.over,
            budget_bytes=self.budget_bytes,
            largest=named[largest],
            best=named[best],
            largest_eager=None if eager is None else named[eager],
            beyond=None if beyond is None else named[beyond],
            sizes=tuple(sizes.values()),
            device=profile.trace.device if asked.device is None else asked.device.name,
            predicted_by="trace" if profile.rehearsal.why_real else "fake trace",
            band_ratio=BAND_RATIO[profile.rehearsal.source],
            effective_batch=asked.effective_batch,
            batch_size=asked.batch_size if asked.over == SEQUENCE else None,
            sequence_length=asked.sequence_length,
            confirmed=confirmed,
            notes=tuple(dict.fromkeys((*self.notes, *profile.notes))),
        )

    def _say_what_ended(self, largest: int, beyond: int | None) -> None:
        if beyond is None:
            effective = self.question.effective_batch
            what = "the effective batch" if largest == effective and self.question.over == BATCH else f"most={largest}"
            self.notes.append(f"{what} was reached: larger ones were not looked at")
            return
        error = self.trials.profiled(beyond).error
        if error is not None:
            self.notes.append(
                f"the budget is not what ended the search: at {beyond} the step does not run ({told(error)}), "
                f"{largest} is the largest that ran"
            )

    def _say_what_accumulation_holds(self, main: Trial) -> None:
        asked = self.question
        if main.plan is not None and asked.accumulation_steps(main.size) > 1:
            self.notes.append(
                "micro-batches add to gradients that are there when their step begins: drop them after the optimizer's "
                "step (zero_grad), not between micro-batches"
            )
        effective, micro = asked.effective_batch, asked.micro_batch(main.size)
        if effective is not None and effective % micro:
            self.notes.append(
                f"{micro} does not divide {effective}: {effective // micro} of {micro} and one of {effective % micro} samples"
            )

    def _words(self, size: int) -> str:
        if self.question.over == BATCH:
            return f"{size} sample{'s' * (size != 1)}"
        return f"length {size}"


def _rank(size: Size) -> tuple[float, int]:
    return size.unit_seconds, size.peak_bytes


def _spread(low: int, high: int) -> Iterable[int]:
    """Sizes evenly spaced between two."""
    return sorted({low + (high - low) * k // (BETWEEN + 1) for k in range(1, BETWEEN + 1)} - {low, high})
