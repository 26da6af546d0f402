"""What an audit found: a verdict, the first difference, the state of each segment, and what torch's checkpoint does."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.errors import AuditDiverged, AuditUnsupported

EXACT, DIVERGED, UNSUPPORTED = "EXACT", "DIVERGED", "UNSUPPORTED"
SAME, RAISED, NOT_RUN = "SAME", "RAISED", "NOT RUN"
DECLARED, DISCOVERED, ASSUMED = "declared", "discovered", "assumed"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between the eager step and another one.

    moment      when it was there: "forward of X", "backward of X", "end of the backward", "end of the step"
    step        which step, from 0
    segment     the segment in which it arose; "" outside all of them
    slot        what differs: "buffer blocks.3.norm.running_mean", "gradient of blocks.2.fc.weight", "torch's CPU generator"
    aspect      "value", or "identity" where the bytes agree and what shares them does not
    operation   what wrote the slot, or first computed another value ("aten.mul.Tensor"); "Python" for plain code; "" if
                the difference did not come again when operations were recorded
    line        ``file:line`` of the user's code that ran it; "" if it is not the user's
    how         how it came about, in words
    eager, found   the two values, shortened
    """

    moment: str
    step: int
    segment: str
    slot: str
    aspect: str
    operation: str
    line: str
    how: str
    eager: str = ""
    found: str = ""

    def __str__(self) -> str:
        where = f" in segment {self.segment}" if self.segment else ""
        what = f"{self.slot} differs" if self.aspect == "value" else f"{self.slot} is another object"
        place = f", {self.operation}" if self.operation else ""
        place += f" at {self.line}" if self.line else ""
        values = f" (eager {self.eager}, here {self.found})" if self.eager or self.found else ""
        return f"{self.moment} of step {self.step}: {what}{where}{place}: {self.how}{values}"


@dataclass(frozen=True, slots=True)
class SlotUse:
    """State that a segment touched in the eager step.

    storage_bytes   of the storage that it lies in; 0 for Python values and generators
    use          "read", "written", "read and written", "drawn", "changed", or "untouched"
    found        "declared" (a registered buffer or parameter), "discovered" (seen, and declared nowhere), "assumed" (a
                 registered buffer that no step touched)
    read_line, write_line   ``file:line`` of the first read and the last write; "" if there was none
    """

    slot: str
    storage_bytes: int
    use: str
    found: str
    read_line: str = ""
    write_line: str = ""


@dataclass(frozen=True, slots=True)
class SegmentState:
    """One module call that was compared: what it touched, and how often it really ran.

    recomputed   whether the plan recomputes it
    forwards, replays   runs of its body in the forward and again, counted over all steps of the planned run
    hooks        modules inside it that carry hooks of the user's, which a replay runs again
    """

    name: str
    module: str
    call: int
    recomputed: bool
    forwards: int
    replays: int
    state: tuple[SlotUse, ...]
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TorchResult:
    """What ``torch.utils.checkpoint`` (``use_reentrant=False``) does on the same segments, from the same start.

    verdict   SAME, DIVERGED (silently: no error was raised), RAISED or NOT RUN
    It documents that it assumes a function which behaves the same on both runs: DIVERGED on a stateful segment is use
    outside that assumption, not a fault of torch.
    """

    verdict: str
    first: Divergence | None = None
    message: str = ""
    replays: int = 0


@dataclass(frozen=True)
class Audit:
    """The result of :func:`regrad.torch.audit`.

    verdict    EXACT, DIVERGED or UNSUPPORTED; ``reason`` says why it is UNSUPPORTED
    first      the first difference; with UNSUPPORTED that of the two eager runs, if that is the reason
    engine     what ran the recomputed calls
    steps      training steps that each run did
    runs       how often the step was run for the audit, all kinds together
    range_replays                    how often ranges of torch calls were replayed
    moments, slots, compared_bytes   how many moments were compared, how many slots at the last one, and their bytes
    """

    verdict: str
    reason: str
    first: Divergence | None
    segments: tuple[SegmentState, ...]
    torch: TorchResult
    engine: str
    model: str
    device: str
    steps: int
    runs: int
    moments: int
    slots: int
    compared_bytes: int
    notes: tuple[str, ...] = ()
    range_replays: int = 0

    @property
    def exact(self) -> bool:
        """Whether the verdict is EXACT."""
        return self.verdict == EXACT

    @property
    def replays(self) -> int:
        """How often bodies of segments, or ranges of torch calls, ran again: an audit with none of them proves nothing
        about recomputation."""
        return sum(segment.replays for segment in self.segments) + self.range_replays

    def raise_if_diverged(self) -> Audit:
        """Return this audit if it is EXACT. Raises :class:`AuditDiverged` or :class:`AuditUnsupported` otherwise."""
        if self.verdict == DIVERGED:
            raise AuditDiverged(f"{self.model} under {self.engine} is not the eager step: {self.first}.", self)
        if self.verdict != EXACT:
            raise AuditUnsupported(f"{self.model} under {self.engine} was not shown to be exact: {self.reason}", self)
        return self

    def to_json(self) -> str:
        """The audit as indented JSON, with the names of the attributes."""
        from regrad.core.codec import dump

        return dump(self)

    def __str__(self) -> str:
        from regrad.core.audit_text import audit_text

        return audit_text(self)
