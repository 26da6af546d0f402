"""One state variable while a schedule is walked: the log that replays share, where the state stands, what is aside.

The entry that writer k leaves is born in the forward of k, if a segment up to k will be replayed from the log, and
lives until the last such segment is done. From the present each replay puts aside what it undoes and brings it back.
Where a replay *stays back* the next one goes on from there and stays back too; entries that were passed are dropped at
once, and the present returns once (:class:`regrad.core.schedule.PutBack`). These are the rules of
``replay/engines/journal.py``.
"""

from __future__ import annotations

from regrad.core.state import LogEntry, Moves, StateUse, StateVariable


class Rollback:
    """The log of ``variable`` on its way through one step."""

    def __init__(self, variable: StateVariable) -> None:
        self.variable = variable
        self._by_writer: dict[int, list[LogEntry]] = {}
        for entry in variable.entries:
            self._by_writer.setdefault(entry.writer, []).append(entry)
        self._log: dict[int, list[LogEntry]] = {}
        self._waiting: set[int] = set()
        self._standing: int | None = None
        self._aside = 0
        self._dropped = False
        self._redo_bytes: dict[int, int] = {}

    @property
    def aside_bytes(self) -> int:
        """Bytes of the present that are put aside now."""
        return self._aside

    @property
    def is_back(self) -> bool:
        """Whether the state stands rolled back."""
        return self._standing is not None

    def forward(self, segment: int, use: StateUse | None) -> tuple[int, Moves]:
        """The forward of ``segment`` starts: bytes of the entries that are born, and what keeping them moves."""
        if use is not None:
            self._waiting.add(segment)
        if not self._waiting or segment not in self._by_writer:
            return 0, Moves()
        born = self._log[segment] = self._by_writer[segment]
        return sum(e.total_bytes for e in born), Moves(sum(e.payload_bytes for e in born))

    def refusal(self, segment: int, use: StateUse | None) -> str:
        """Why the backward of ``segment`` cannot run now; empty if it can."""
        name = self.variable.name
        if use is None:
            reads = self.is_back and segment in self.variable.present_readers
            return f"it reads the present of {name!r}, which stands rolled back" if reads else ""
        if self._dropped and not self.is_back:
            return f"the log of {name!r} that leads here was dropped when its present returned"
        if self.is_back and not use.stays_back:
            return f"{name!r} stands rolled back: what replays it after one that stays back stays back too"
        return ""

    def peak_aside(self, segment: int, use: StateUse | None) -> int:
        """Bytes that are aside while the backward of ``segment`` runs."""
        return self._aside if use is None else self._redo(segment)

    def backward(self, segment: int, use: StateUse | None) -> tuple[int, Moves]:
        """The backward of ``segment`` is done: bytes of entries that die, and what its replay moved."""
        if use is None:
            return 0, Moves()
        undone = sum(e.payload_bytes for k, es in self._log.items() if segment <= k < self._until() for e in es)
        redo = self._redo(segment)
        moves = Moves(redo - self._aside, undone) if use.stays_back else Moves(redo, undone + redo)
        if use.stays_back:
            self._standing, self._aside = segment + 1, redo
        self._waiting.discard(segment)
        return self._prune(), moves

    def put_back(self) -> tuple[int, Moves]:
        """The present returns: bytes that are no longer aside, and what that moves."""
        freed, self._standing, self._aside = self._aside, None, 0
        self._dropped = True
        return freed, Moves(0, freed)

    def _until(self) -> int:
        return max(self._log, default=-1) + 1 if self._standing is None else self._standing

    def _redo(self, segment: int) -> int:
        if segment not in self._redo_bytes:
            self._redo_bytes[segment] = self.variable.redo_bytes(segment)
        return self._redo_bytes[segment]

    def _prune(self) -> int:
        first, freed = min(self._waiting, default=None), 0
        for writer in list(self._log):
            passed = self._standing is not None and writer >= self._standing
            if first is None or writer < first or passed:
                freed += sum(entry.total_bytes for entry in self._log.pop(writer))
        return freed
