"""What state each segment finds at its start, and what its engine copies of it: read off a rehearsal, in bytes.

The walk is the one that the engine itself does at a call's entry (``regions/discover``), here on the rehearsal's copy; the
writes are those of the recorded step. So the figures are the engine's own, before it has run once.

Large state that segments write and that has a name in the model is a :class:`LargeState`: a plan may choose by which engine
each segment brings it back. Of other large state, arguments and what no walk finds, the log is the only way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from regrad.core.simulate_trace import StateCopy
from regrad.core.state import JOURNAL, READ_SET, SNAPSHOT
from regrad.core.trace import Call
from regrad.torch.record import Record
from regrad.torch.regions.cut import PYTHON_LOOKS
from regrad.torch.regions.discover import sources
from regrad.torch.regions.discover.names import Reach
from regrad.torch.regions.discover.tensors import SMALL_BYTES
from regrad.torch.regions.discover.walk import walk
from regrad.torch.regions.region import LARGE_SHARE
from regrad.torch.state_costs import StateCosts
from regrad.torch.state_pieces import Piece, Pieces, payload, read, total, uncovered, written

PYTHON_BYTES = sources.PYTHON.size(None)
SPARSE_SHARE = 0.5
"""A log that holds less than this of what copies of the whole would is the usual way to bring a state back."""


@dataclass(frozen=True)
class Reached:
    """The storages that one module's code can reach: bytes by index in the trace; small ones are copied at every call.

    ``looks``: the code names ways by which Python reads a tensor behind torch's back, so a read set may miss reads.
    """

    small: dict[int, int] = field(default_factory=dict)
    large: dict[int, int] = field(default_factory=dict)
    looks: bool = False


def reached(module: nn.Module, index_of: dict[int, int]) -> Reached:
    """What the engine's walk finds from ``module``'s forward; ``index_of`` maps storages to their place in the trace."""
    reach = Reach()
    tensors = walk(reach, (module.forward,)).tensors
    found = Reached(looks=bool(reach.names & PYTHON_LOOKS))
    for tensor in tensors:
        if tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        index = index_of.get(storage._cdata)
        if index is None or not storage.nbytes():
            continue
        weight = isinstance(tensor, nn.Parameter)
        (found.large if weight or storage.nbytes() > SMALL_BYTES else found.small)[index] = storage.nbytes()
    return found


class Writes:
    """Which operations of the forward write what was there before the step, in order, and which draw."""

    def __init__(self, record: Record) -> None:
        trace = record.trace
        self.by_storage: dict[int, list[int]] = {}
        self.draws: list[int] = []
        for position, operation in enumerate(trace.operations[: trace.phase_starts["backward"]]):
            for index in operation.writes:
                if trace.storages[index].birth < 0:
                    self.by_storage.setdefault(index, []).append(position)
            if operation.draws:
                self.draws.append(position)

    def version(self, index: int, at: int) -> int:
        """How often storage ``index`` was written before operation ``at``."""
        return sum(position < at for position in self.by_storage.get(index, ()))

    def later(self, index: int, at: int) -> bool:
        """Whether storage ``index`` is written by operation ``at`` or later."""
        return any(position >= at for position in self.by_storage.get(index, ()))


@dataclass(frozen=True)
class LargeState:
    """A large storage that calls of candidates write.

    index     in the trace; ``name`` is what it is called there, ``attribute`` what it is called in the model, "" if it has
              no name of its own by which an engine could be told of it
    writers   what each call, by its first operation, overwrites of it, in order
    """

    index: int
    name: str
    attribute: str
    nbytes: int
    writers: dict[int, Pieces]

    @property
    def log_bytes(self) -> int:
        """All that a log of it holds at most."""
        return sum(map(total, self.writers.values()))

    def redo(self, start: int) -> dict[int, int]:
        """Bytes put aside to go back to before operation ``start``, by writer, the newest first."""
        writers = [writer for writer in sorted(self.writers, reverse=True) if writer >= start]
        return dict(zip(writers, uncovered([self.writers[writer] for writer in writers]), strict=True))


class States:
    """The state of every module call of one recorded step.

    ``model`` is the copy that was recorded, ``candidates`` the calls that may be segments: what they write of large
    state is logged, what others write cannot be brought back. ``measure`` gives the costs of moving it; it is asked where
    there is large state.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        candidates: list[Call],
        measure: Callable[[], StateCosts] = StateCosts,
    ) -> None:
        self.record, self._measure = record, measure
        self.candidates = sorted(candidates, key=lambda call: call.start)
        self._modules = dict(model.named_modules())
        self._attributes = dict(model.named_parameters()) | dict(model.named_buffers())
        self._writes = Writes(record)
        self._reached: dict[str, Reached] = {}
        self._reads: dict[tuple[int, int], Pieces] = {}
        self._touched: dict[tuple[str, int, int], list[LargeState]] = {}
        self._usual: dict[int, str] = {}
        self.large = {index: self._large(index) for index in sorted(self._writes.by_storage) if self._is_large(index)}

    @cached_property
    def costs(self) -> StateCosts:
        """What it takes to move large state."""
        return self._measure()

    def _is_large(self, index: int) -> bool:
        """Whether engines log what is written of a storage: parameters are never copied at an entry, however small."""
        attribute = self._attributes.get(self._name(index).partition(" ")[2])
        return self.record.trace.storages[index].bytes > SMALL_BYTES or isinstance(attribute, nn.Parameter)

    def _large(self, index: int) -> LargeState:
        trace, name = self.record.trace, self._name(index)
        writers = {}
        for call in self.candidates:
            pieces = written(self.record, index, range(call.start, call.stop))
            if pieces:
                writers[call.start] = pieces
        attribute = name.partition(" ")[2]
        given = any(index in call.inputs for call in self.candidates)
        big = trace.storages[index].bytes > SMALL_BYTES
        known = big and attribute in self._attributes and not given and trace.storages[index].death is None
        return LargeState(index, name, attribute if known else "", trace.storages[index].bytes, writers)

    def reached(self, module: str) -> Reached:
        """The storages that the code of ``module`` can reach."""
        if module not in self._reached:
            self._reached[module] = reached(self._modules[module], self.record.index_of)
        return self._reached[module]

    def call(self, module: str, count: int) -> Call | None:
        """The candidate that is this call of this module."""
        return next((call for call in self.candidates if (call.module, call.count) == (module, count)), None)

    def logged(self, position: int) -> bool:
        """Whether what the operation at ``position`` overwrites is logged: some candidate runs it."""
        return any(call.start <= position < call.stop for call in self.candidates)

    def touched(self, call: Call) -> list[LargeState]:
        """The large state that ``call`` can reach or reads, and that it or a later call of a candidate writes."""
        key = (call.module, call.start, call.stop)
        if self.large and key not in self._touched:
            operations = self.record.trace.operations[call.start : call.stop]
            found = self.reached(call.module).large.keys() | {i for operation in operations for i in operation.reads}
            self._touched[key] = [
                state
                for index, state in self.large.items()
                if index in found and any(writer >= call.start for writer in state.writers)
            ]
        return self._touched.get(key, [])

    def usual(self, state: LargeState) -> str:
        """The engine by which ``state`` is brought back where nobody chooses."""
        if state.index not in self._usual:
            users = sum(any(one is state for one in self.touched(call)) for call in self.candidates)
            sparse = state.log_bytes <= SPARSE_SHARE * users * state.nbytes
            self._usual[state.index] = JOURNAL if sparse else SNAPSHOT
        return self._usual[state.index]

    def reads(self, call: Call, state: LargeState) -> Pieces | None:
        """What a read set of ``call`` keeps; None where that could miss what Python looks at."""
        if self.reached(call.module).looks:
            return None
        key = (call.start, state.index)
        if key not in self._reads:
            self._reads[key] = read(self.record, state.index, range(call.start, call.stop))
        return self._reads[key]

    def copies(
        self, call: Call, engines: Mapping[str, str] | None = None, *, bare: bool = False
    ) -> tuple[StateCopy, ...]:
        """What the engine copies for one call: generators, small state whole, and of large state what its engine takes.

        ``engines`` names one for states by name; the others go by the usual one. ``bare`` leaves out what has a choice.
        """
        copies = self._small(call)
        watched = False
        for state in self.touched(call):
            if not state.attribute:
                copies += self._fixed(call, state)
            elif not bare:
                engine = (engines or {}).get(state.name) or self.usual(state)
                made = self._large_copies(call, state, engine)
                if engine != SNAPSHOT and made and not watched:
                    watched = True  # under one watch, however many states are logged
                    made[0] = _slower(made[0], self.watch_seconds(call))
                copies += made
        return tuple(copies)

    def watch_seconds(self, call: Call) -> float:
        """What it costs to watch the operations of ``call`` in its forward and in its replay."""
        return 2 * (call.stop - call.start) * self.costs.watch_seconds

    def _small(self, call: Call) -> list[StateCopy]:
        trace, writes = self.record.trace, self._writes
        draws = sum(position < call.start for position in writes.draws)
        random, drawn = torch.get_rng_state().nbytes, any(position >= call.start for position in writes.draws)
        copies = [
            StateCopy(("generator", 0, draws), random, random, "torch's generator", written=drawn),
            StateCopy(("python", 0, 0), PYTHON_BYTES, PYTHON_BYTES, "Python's generator"),
        ]
        given = {index: trace.storages[index].bytes for index in call.plain_inputs}
        small = self.reached(call.module).small | {index: size for index, size in given.items() if size <= SMALL_BYTES}
        for index, size in small.items():
            later = writes.later(index, call.start)
            key = ("storage", index, writes.version(index, call.start))
            copies.append(StateCopy(key, size, size if later else 0, self._name(index), written=later))
        return copies

    def _large_copies(self, call: Call, state: LargeState, engine: str) -> list[StateCopy]:
        if engine == JOURNAL:
            return self._logs(state, {writer: (pieces, JOURNAL) for writer, pieces in state.writers.items()}, call)
        return [self.own(call, state, engine)]

    def own(self, call: Call, state: LargeState, engine: str) -> StateCopy:
        """The copy that ``call`` alone holds of ``state`` by ``engine``: a snapshot or a read set."""
        key, costs = ("own", state.index, call.start), self.costs
        pieces: Pieces = (Piece(state.nbytes, full=True),)
        held, aside, again = state.nbytes, state.nbytes, 1
        if engine == READ_SET:
            mine = state.writers.get(call.start, ())
            pieces = self.reads(call, state) or ()
            held, aside, again = total(pieces), sum(uncovered((pieces, mine))), len(pieces) + len(mine)
        size, count = payload(pieces), len(pieces)
        replay = costs.out(aside, again) + costs.back(aside, again) + costs.back(size, count)
        return StateCopy(
            key, held, aside, state.name, engine, True, call.start, take_seconds=costs.out(size, count),
            replay_seconds=replay,
        )  # fmt: skip

    def _fixed(self, call: Call, state: LargeState) -> list[StateCopy]:
        """The log of a state that no engine can be told of: each writer learns by itself what it keeps."""
        entries = {}
        for writer, pieces in state.writers.items():
            dense = payload(pieces) > LARGE_SHARE * state.nbytes
            entries[writer] = ((Piece(state.nbytes, full=True),), SNAPSHOT) if dense else (pieces, JOURNAL)
        return self._logs(state, entries, call)

    def _logs(self, state: LargeState, entries: Mapping[int, tuple[Pieces, str]], call: Call) -> list[StateCopy]:
        """One copy for each writer from ``call`` on. The log keeps each overwritten piece once, for all that need it."""
        writers = [writer for writer in sorted(entries, reverse=True) if writer >= call.start]
        aside = uncovered([entries[writer][0] for writer in writers])
        copies, costs = [], self.costs
        for writer, present in zip(writers, aside, strict=True):
            pieces, engine = entries[writer]
            size, count = payload(pieces), len(pieces)
            again = count if present else 0
            replay = costs.back(size, count) + costs.out(present, again) + costs.back(present, again)
            copies.append(
                StateCopy(
                    ("log", state.index, writer), total(pieces), present, state.name, engine, True, writer,
                    take_seconds=costs.out(size, count), replay_seconds=replay,
                )
            )  # fmt: skip
        return copies[::-1]

    def _name(self, index: int) -> str:
        if index in self.record.names:
            return self.record.names[index]
        return "an argument" if self.record.trace.storages[index].birth >= 0 else "a tensor"


def _slower(copy: StateCopy, seconds: float) -> StateCopy:
    return replace(copy, replay_seconds=copy.replay_seconds + seconds)
