"""Every error that regrad raises, as one tree.

    RegradError
    ├── UsageError                bad input; the command line ends with exit code 2
    │   ├── InvalidQuantity       a size or a budget that cannot be read
    │   ├── InvalidSubject        a SUBJECT, a model, a batch or a loss that cannot be used
    │   ├── PlanMismatch          a plan (or a trace) of another model
    │   ├── InvalidPlan           a plan file or a choice that is not well formed
    │   ├── PlannerMismatch       a problem given to a planner that cannot take it
    │   ├── InvalidPolicy         a policy that names no torch call of the step, or a place that takes nothing
    │   ├── InvalidRegion         a callable, an argument or settings that rt.checkpoint cannot take
    │   └── InvalidPlace          a place for moved tensors that cannot be written
    ├── Refusal                   the request is well formed and cannot be met; exit code 1
    │   ├── InfeasibleBudget      no plan fits; carries the least feasible budget and its plan
    │   ├── IllegalSchedule       a schedule that drops what it still needs
    │   ├── CannotTrace           the step runs neither with fake tensors nor, within its limits, for real
    │   └── AuditFailed           an audit that did not come out EXACT; carries the audit
    │       ├── AuditDiverged     the planned step left other bytes than the eager one; names the first difference
    │       └── AuditUnsupported  the two steps could not be compared, or the planned one refused
    └── ReplayError               a segment cannot be replayed as it ran; names segment, bytes and version; exit code 1
        ├── ViewOutOfRange        a view that leaves its storage, or a program that is not well formed; exit code 2
        ├── UnwrittenRead         a read of bytes that nobody wrote
        ├── VersionDropped        an old version that its engine no longer has, or never had
        ├── UndeclaredWrite       a write to state that was not declared, or that nobody announced
        ├── UnsupportedGradient   a gradient through what has none: an integer write, bytes taken for another type
        ├── PlaceFailed           the place of retained bytes is full or cannot be written
        ├── ContractViolated      a replay that left other bytes or another generator state than the first run
        ├── RegionError           a call of rt.checkpoint; names the thing and file:line, and what became of .grad
        │   ├── UnsupportedState  state that cannot be rewound
        │   └── ReplayDivergence  a replay that computed something else than the forward
        │       └── ModifiedArgument  an argument or state that was changed after the forward, outside any region
        └── PresentLost           bytes of the present that could not be written back

A message says what (with numbers), where, why and what to do. The numbers are attributes too. An exception that the
user's own model raises is never wrapped: it is marked by :func:`mark_as_users` and passed on as it is.
"""

from __future__ import annotations

from typing import Any

USAGE_EXIT = 2
REFUSAL_EXIT = 1
USER_MODEL_EXIT = 3


class RegradError(Exception):
    """Root of the tree. ``exit_code`` is what the command line ends with."""

    exit_code = REFUSAL_EXIT


class UsageError(RegradError):
    """The input is wrong; nothing was changed."""

    exit_code = USAGE_EXIT


class InvalidQuantity(UsageError):
    """A byte count or a budget that cannot be read."""

    def __init__(self, text: object, why: str) -> None:
        super().__init__(
            f"cannot read {text!r} as an amount of memory: {why}. "
            'Write bytes (8589934592), a unit ("8 GiB", "8GB"), a share of the eager step ("60%") or "min".'
        )
        self.text = text


class InvalidSubject(UsageError):
    """A model, batch, loss or SUBJECT that cannot be planned for."""


class PlanMismatch(UsageError):
    """A plan was given to a model that it is not for."""

    def __init__(self, expected: str, found: str, detail: str) -> None:
        super().__init__(
            f"this plan is for another model (fingerprint {expected[:12]}, this model has {found[:12]}): {detail}. "
            "Make a new plan for this model with rt.plan(...)."
        )
        self.expected = expected
        self.found = found


class InvalidPlan(UsageError):
    """A plan that is not well formed: choices that overlap, leave a gap or name an option that is not there."""


class PlannerMismatch(UsageError):
    """A planner was given a problem outside what it says that it can take."""


class InvalidPolicy(UsageError):
    """A policy that names a torch call which the step has not, or a place where nothing can be written."""


class InvalidRegion(UsageError):
    """A callable, an argument or a setting that ``rt.checkpoint`` cannot take. No state was changed."""


class InvalidPlace(UsageError):
    """A place for moved tensors that is not there or cannot be written. ``place`` is the place; nothing was changed."""

    def __init__(self, place: object, why: str, hint: str) -> None:
        super().__init__(f"tensors cannot be moved to {place}: {why}. {hint}")
        self.place = place


class Refusal(RegradError):
    """The request cannot be met."""


class InfeasibleBudget(Refusal):
    """No plan fits the budget.

    ``budget_bytes`` is what was asked for, ``least_bytes`` the smallest budget that has a plan, ``plan`` that plan
    (a :class:`regrad.core.plan.Plan`, or the planner's choices where no model is involved), ``holder`` what holds the
    floor.
    """

    def __init__(self, budget_bytes: int, least_bytes: int, plan: Any, holder: str) -> None:
        from regrad.core.units import format_bytes

        super().__init__(
            f"no plan fits {format_bytes(budget_bytes)} ({budget_bytes:,} bytes): the least that this step can run in "
            f"is {format_bytes(least_bytes)} ({least_bytes:,} bytes), {format_bytes(least_bytes - budget_bytes)} more. "
            f'The floor is {holder}. Ask for budget={least_bytes} or "min", or make the batch or the sequence smaller.'
        )
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.plan = plan
        self.holder = holder


class IllegalSchedule(Refusal):
    """A schedule uses a value that is not there at that moment; ``position`` is the index of the action."""

    def __init__(self, position: int, action: object, why: str) -> None:
        super().__init__(f"action {position}, {action}: {why}")
        self.position = position
        self.action = action


class CannotTrace(Refusal):
    """The step could not be recorded; the message says which ways were tried and what stopped each."""


class AuditFailed(Refusal):
    """An audit did not come out EXACT. ``audit`` is the :class:`regrad.core.audit.Audit`, ``verdict`` its verdict."""

    def __init__(self, what: str, audit: Any) -> None:
        super().__init__(what)
        self.audit = audit
        self.verdict = str(audit.verdict)


class AuditDiverged(AuditFailed):
    """The planned step differs from the eager one. The fields are those of the first difference.

    ``segment`` and ``slot`` name where and what, ``operation`` and ``line`` (``file:line``) what computed or wrote
    another value first, ``moment`` when the difference was there ("forward of …", "backward of …", "end of step 1").
    """

    def __init__(self, what: str, audit: Any) -> None:
        super().__init__(what, audit)
        first = audit.first
        self.segment, self.slot, self.operation = str(first.segment), str(first.slot), str(first.operation)
        self.line, self.moment = str(first.line), str(first.moment)


class AuditUnsupported(AuditFailed):
    """Nothing could be compared: the eager step is not deterministic, or the engine refused a segment."""


class ReplayError(RegradError):
    """A segment cannot be replayed as it ran. The present is intact unless the error is a :class:`PresentLost`.

    ``segment`` is its name (or its index in decimals), ``where`` the byte range as ``storage[start:stop]`` and
    ``version`` the write that made the version meant (``v3``); each is ``None`` where the error has no such thing.
    """

    def __init__(
        self,
        what: str,
        *,
        segment: str | int | None = None,
        where: object = None,
        version: object = None,
        hint: str = "",
    ) -> None:
        super().__init__(what)
        self.what, self.hint = what, hint
        self.segment = None if segment is None else str(segment)
        self.where = None if where is None else str(where)
        self.version = None if version is None else str(version)

    def __str__(self) -> str:
        named = (("segment", self.segment), ("bytes", self.where), ("version", self.version))
        place = ", ".join(f"{name} {value}" for name, value in named if value is not None)
        return self.what + (f" ({place})" if place else "") + "." + (f" {self.hint}" if self.hint else "")


class ViewOutOfRange(ReplayError):
    """A view reaches beyond its storage, or overlaps itself where it is written, or names what is not there."""

    exit_code = USAGE_EXIT


class UnwrittenRead(ReplayError):
    """An operation reads bytes that no write made."""

    exit_code = USAGE_EXIT


class VersionDropped(ReplayError):
    """An engine was asked for a version after it gave it up, or for one that it never kept."""


class UndeclaredWrite(ReplayError):
    """A guard saw a write to state outside the specification, or one that no one announced."""


class UnsupportedGradient(ReplayError):
    """A gradient was asked of something that has none. The verdict is UNSUPPORTED."""


class PlaceFailed(ReplayError):
    """The place where retained bytes live took no more. ``errno`` is the operating system's number, 0 if it had none."""

    def __init__(self, what: str, *, errno: int = 0, **where: Any) -> None:
        super().__init__(what, **where)
        self.errno = errno


class ContractViolated(ReplayError):
    """A replay did not give what the first run gave. ``violations`` lists all differences found."""

    def __init__(self, what: str, *, violations: tuple[object, ...] = (), **where: Any) -> None:
        super().__init__(what, **where)
        self.violations = violations


class RegionError(ReplayError):
    """A call of ``rt.checkpoint`` that cannot be replayed as it ran. The present is intact.

    ``segment`` names the region, ``thing`` what could not be reproduced, ``line`` its ``file:line`` if known.
    ``gradients_touched`` is whether ``.grad`` may already hold part of the backward that was stopped.
    """

    def __init__(
        self, what: str, *, thing: str = "", line: str = "", gradients_touched: bool = False, **where: Any
    ) -> None:
        super().__init__(what, **where)
        self.thing, self.line, self.gradients_touched = thing, line, gradients_touched

    def __str__(self) -> str:
        text = super().__str__()
        if self.line:
            text += f" At {self.line}."
        if self.gradients_touched:
            text += " Fields .grad may already hold part of this backward: clear them before the next one."
        return text


class UnsupportedState(RegionError):
    """A region did something that can be neither rewound nor kept."""


class ReplayDivergence(RegionError):
    """A replay computed something else than the forward, or saved another set of tensors."""


class ModifiedArgument(ReplayDivergence):
    """An argument, or state that a region reads, was changed between the forward and the backward by other code."""


class PresentLost(ReplayError):
    """Writing the present back failed twice for the same bytes. They are still in the engine's frame."""


def mark_as_users(error: BaseException) -> None:
    """Mark ``error`` as raised by the user's own model or loss, so that the command line ends with exit code 3."""
    error.__dict__["__regrad_users__"] = True


def is_users(error: BaseException) -> bool:
    """Whether ``error`` came out of the user's own code."""
    return bool(getattr(error, "__regrad_users__", False))
