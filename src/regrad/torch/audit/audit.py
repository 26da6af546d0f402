"""``rt.audit``: is this step exact under this plan, and if not, where does it part from the eager one?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from regrad.core import audit as core
from regrad.core import trace as tr
from regrad.core.audit import Audit, Divergence, TorchResult
from regrad.core.chain import KEEP, RECOMPUTE
from regrad.core.errors import InvalidPlan, InvalidSubject, PlanMismatch, mark_as_users
from regrad.core.plan import Plan
from regrad.torch import execute
from regrad.torch.audit.compare import first_difference
from regrad.torch.audit.locate import divergence, taped
from regrad.torch.audit.probe import Call, Engine
from regrad.torch.audit.runs import Auditor, Run, Under
from regrad.torch.audit.table import changed_slots, segment_table
from regrad.torch.audit.world import NoSnapshot, World
from regrad.torch.fingerprint import difference, fingerprint
from regrad.torch.recompute import recompute
from regrad.torch.record import Recorder
from regrad.torch.step import Step
from regrad.torch.store import persistent_tensors
from regrad.torch.watch import find_candidates

OWN = "regrad"
Progress = Callable[[str, float], None]


def audit(
    model: nn.Module | Step,
    batch: Any = None,
    plan: Plan | None = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    segments: str | None = None,
    engine: Engine | None = None,
    steps: int = 3,
    compare_torch: bool = True,
    progress: Progress | None = None,
) -> Audit:
    """Run the eager step and the planned step from the same start and compare everything that they leave.

    model, batch, loss, optimizer   as in :func:`regrad.torch.plan`; a :class:`Step` bundles them
    plan         whose calls are recomputed; ``None`` recomputes every segment that the search of ``rt.plan`` finds
    segments     glob over module names that replaces the search, where there is no plan
    engine       what runs a recomputed call, spelled as ``torch.utils.checkpoint.checkpoint``:
                 ``engine(function, *args, **kwargs)``; the default is the library's own
    steps        training steps a run. Three by default: regions watch their first two calls and are quicker from the third
    compare_torch   whether ``torch.utils.checkpoint`` (``use_reentrant=False``) is tried on the same segments
    progress     called as ``progress(stage, share_done)``

    At each exit of a segment's forward, when its backward is done, and at the end of forward, backward and step are
    compared, to the bit: outputs and gradients, the bytes of every storage that can be reached (parameters, buffers,
    attributes, closures, globals, optimizer state, and storages that only operations show), which objects share which
    storage, every generator, Python values and containers, modes. A difference is looked up by running again with a record
    of operations and lines. Two eager runs that differ make the verdict UNSUPPORTED before anything else is compared.

    The runs are made on the objects given, which are put back after each, also after an exception. What cannot be put
    back (a consumed iterator, a file) makes the verdict UNSUPPORTED. Not put back: entries of function caches, what
    the step writes outside the process, and state that no walk reaches and no operation writes (docs/limits.md).

    Raises :class:`PlanMismatch` and :class:`InvalidSubject` for input that cannot be used, and what the eager step raises.
    A verdict is returned, not raised: see :meth:`Audit.raise_if_diverged`.

    Cost: seven runs of the step (two more for each difference, one less without torch), most ``steps`` long, and digests of
    all state at every border; memory for one copy of every reachable byte, beside what the eager step needs.
    Not for: distributed wrappers. Source: the replay contract in docs/concepts/replay.md.
    """
    step = model if isinstance(model, Step) else Step(model, batch, loss, optimizer)
    _check(step, plan, steps)
    say = progress or (lambda stage, done: None)
    try:
        world = World(step)
    except NoSnapshot as error:
        return _unsupported(step, f"the model cannot be put back after a run: {error}", steps, engine)
    try:
        execute.remove(step.model)
        return _Audit(world, plan, segments, engine, steps, compare_torch, say).result()
    finally:
        world.put_back()


def _check(step: Step, plan: Plan | None, steps: int) -> None:
    model = step.model
    if step.batch is None and step.loss is None:
        raise InvalidSubject(
            f"there is no batch to run {type(model).__name__} on: give rt.audit(model, batch), or a Step with one."
        )
    if steps < 1:
        raise InvalidSubject(f"steps={steps}: an audit runs at least one step")
    if plan is None:
        return
    found = fingerprint(model)
    if found != plan.fingerprint:
        raise PlanMismatch(plan.fingerprint, found, difference(model, plan))
    if any(choice.is_span for choice in plan.choices):
        raise InvalidPlan("the plan holds a span of several segments, which this version cannot run; plan again")


class _Audit:
    """One audit in progress."""

    def __init__(
        self,
        world: World,
        plan: Plan | None,
        segments: str | None,
        engine: Engine | None,
        steps: int,
        compare_torch: bool,
        say: Progress,
    ) -> None:
        self.world, self.plan, self.steps, self.say = world, plan, steps, say
        self.segments, self.compare_torch = segments, compare_torch
        self.engine_name = OWN if engine is None else _name(engine)
        self.engine: Engine = engine or (lambda function, *args, **kwargs: recompute(function, args, kwargs))
        self.notes: list[str] = []

    def result(self) -> Audit:
        """All of it."""
        try:
            return self._result()
        except NoSnapshot as error:
            return _unsupported(
                self.world.step, f"the step cannot be put back after a run: {error}", self.steps, self.engine_name
            )

    def _result(self) -> Audit:
        self.say("recording the eager step", 0.0)
        _, scout = taped(Auditor(self.world, [], self.steps), Under(), [], digests=False)
        for key, (slot, alias, before) in scout.found_hidden.items():
            self.world.hide(key, slot, alias, before)
        self.world.put_back()
        calls = self._calls()
        names = list(dict.fromkeys(module for module, _, _ in calls))
        self.auditor = auditor = Auditor(self.world, names, self.steps)
        self.say("running the eager step twice", 0.2)
        eager, second = auditor.run(Under()), auditor.run(Under())
        unlike = first_difference(eager, second)
        if unlike is not None:
            first: Divergence | None = divergence(auditor, unlike, Under(), Under())
            reason = f"the eager step is not deterministic: two runs from one start differ: {first}"
            return self._audit(core.UNSUPPORTED, reason, first, (), TorchResult(core.NOT_RUN, message=reason), eager)
        slots = list(dict.fromkeys(slot for changed in changed_slots(eager).values() for slot in changed))
        _, tape = taped(auditor, Under(), slots, digests=False)
        flags = execute.call_options(calls)
        cache_off = None if self.plan is None else self.plan.cache_off
        self.say("running the planned step", 0.5)
        under = Under(flags, self.engine, cache_off, self.plan)
        planned = auditor.run(under)
        verdict, reason, first = self._judge(eager, planned, under)
        recomputed = {
            Call(module, number) for module, number, option in calls if option == RECOMPUTE and module in flags
        }
        self.say("running torch's checkpoint", 0.8)
        again = [(module, number, KEEP if option == KEEP else RECOMPUTE) for module, number, option in calls]
        if self.plan is not None and self.plan.ranges:
            again = [
                (s.module, s.call, KEEP if s.option == KEEP else RECOMPUTE) for s in self.plan.segments if s.module
            ]
        theirs = self._torch(eager, Under(execute.call_options(again), torchs, cache_off))
        table = segment_table(auditor, eager, tape, planned, recomputed)
        return self._audit(verdict, reason, first, table, theirs, eager, planned.borders.range_replays)

    def _calls(self) -> list[tuple[str, int, str]]:
        """(module, which call, what it does) of every segment; one recorded step finds them."""
        if self.plan is not None:
            return [(s.module, s.call, execute.option_of(s)) for s in self.plan.segments if s.module]
        step = self.world.step
        recorder = Recorder()
        for tensor, category in persistent_tensors(step):
            recorder.register(tensor, category)
        try:
            step.clear_gradients()
            with recorder, recorder.watching(step.model):
                loss = step.compute_loss()
                recorder.phase = tr.BACKWARD
                try:
                    loss.backward()
                except Exception as error:
                    mark_as_users(error)
                    raise
                recorder.phase = tr.OPTIMIZER
                torch.zeros(())  # a phase begins with its first operation
            trace = recorder.finish(source="real", gradients=str(step.gradients), device=str(step.device))
        finally:
            lost = self.world.put_back()
        if lost:
            raise NoSnapshot(lost)
        found = find_candidates(step.model, trace, self.segments)
        return [(trace.calls[one.call].module, trace.calls[one.call].count, RECOMPUTE) for one in found]

    def _judge(self, eager: Run, planned: Run, under: Under) -> tuple[str, str, Divergence | None]:
        found = first_difference(eager, planned)
        if found is not None:
            return core.DIVERGED, "", divergence(self.auditor, found, Under(), under)
        if planned.error is not None:
            return core.UNSUPPORTED, f"{self.engine_name} refuses: {_said(planned.error)}", None
        return core.EXACT, "", None

    def _torch(self, eager: Run, under: Under) -> TorchResult:
        if not self.compare_torch:
            return TorchResult(core.NOT_RUN, message="it was not asked for")
        run = self.auditor.run(under)
        found = first_difference(eager, run)
        if found is not None:
            first = divergence(self.auditor, found, Under(), under)
            return TorchResult(core.DIVERGED, first, replays=run.replays)
        if run.error is not None:
            return TorchResult(core.RAISED, message=_said(run.error), replays=run.replays)
        return TorchResult(core.SAME, replays=run.replays)

    def _audit(
        self,
        verdict: str,
        reason: str,
        first: Any,
        table: Any,
        theirs: TorchResult,
        eager: Run,
        range_replays: int = 0,
    ) -> Audit:
        step, world = self.world.step, self.world
        last = next(reversed(eager.borders.moments.values()))
        cached = world.filled_caches()
        if cached:
            self.notes.append(f"the function cache of {', '.join(cached)} was filled by the runs, and stays so")
        if not table and verdict == core.EXACT:
            self.notes.append('no repeated blocks were found in ModuleList or Sequential; name them with segments="…"')
        return Audit(
            verdict=verdict, reason=reason, first=first, segments=table, torch=theirs, engine=self.engine_name,
            model=type(step.model).__name__, device=str(step.device), steps=self.steps, runs=self.auditor.runs + 2,
            moments=len(eager.borders.moments), slots=len({slot for slot, _ in last}), compared_bytes=world.copied_bytes,
            notes=tuple(self.notes), range_replays=range_replays,
        )  # fmt: skip


def torchs(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint`` as an engine."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def _name(engine: Engine) -> str:
    if engine is torchs:
        return "torch.utils.checkpoint"
    return str(getattr(engine, "__qualname__", type(engine).__name__))


def _said(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"


def _unsupported(step: Step, reason: str, steps: int, engine: Any) -> Audit:
    name = OWN if engine is None else engine if isinstance(engine, str) else _name(engine)
    nothing = TorchResult(core.NOT_RUN, message=reason)
    return Audit(
        core.UNSUPPORTED,
        reason,
        None,
        (),
        nothing,
        name,
        type(step.model).__name__,
        str(step.device),
        steps,
        0,
        0,
        0,
        0,
    )
