"""What autograd saved of a storage, held in fewer bytes or in another place from its forward to its backward.

A move names saved tensors by the torch call that saves them. How it is done stands in :mod:`regrad.torch.tape.mover`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from regrad.core.errors import InvalidPlan
from regrad.torch.regions.region import RegionKept
from regrad.torch.tape.codec import HOWS, OFFLOAD
from regrad.torch.tape.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Move:
    """What is saved of one storage: ``saves`` are pairs (torch call, counted as in :class:`Range`; which of the tensors that
    the call saves, in the order in which a pack hook is given them). ``how`` is "bits", "signs", "narrow" or "offload".

    name        for messages and reports
    bytes       of the storage, if known: so much room is reserved for it where it is offloaded
    held_bytes  what stands for it meanwhile, if known; fake tensors go by it

    Raises :class:`InvalidPlan` for no save, one that cannot be, or another way.
    """

    saves: tuple[tuple[int, int], ...]
    how: str
    name: str = ""
    bytes: int = 0
    held_bytes: int = 0

    def __post_init__(self) -> None:
        if self.how not in HOWS:
            raise InvalidPlan(f"{self.title} is to be moved as {self.how!r}; a move is {', '.join(HOWS)}")
        if not self.saves or any(call < 0 or index < 0 for call, index in self.saves):
            raise InvalidPlan(f"the move of {self.title} names no saved tensor, or one before the first")

    @property
    def title(self) -> str:
        """What it is called."""
        return self.name or f"what calls {sorted({call for call, _ in self.saves})} save"


class Moves:
    """The moves of a forward, by call and saved tensor. Raises :class:`InvalidPlan` where two name the same one, or one a
    call that the plan does not have."""

    def __init__(self, moves: Iterable[Move], ranges: Ranges) -> None:
        self.moves = tuple(moves)
        self.by_call: dict[int, dict[int, Move]] = {}
        self.inside: list[Move] = []
        for move in self.moves:
            for call, index in move.saves:
                if index in self.by_call.setdefault(call, {}):
                    raise InvalidPlan(f"two moves name saved tensor {index} of call {call}; {move.title} is one")
                if ranges.names and call >= len(ranges.names):
                    raise InvalidPlan(f"{move.title} names call {call} of a forward of {len(ranges.names)} calls")
                self.by_call[call][index] = move
        for call in list(self.by_call):
            if any(one.start <= call < one.stop for one in ranges.ranges):
                self.inside += self.by_call.pop(call).values()
        self.offloads = any(move.how == OFFLOAD for move in self.moves)
        self.reserve_bytes = sum(move.bytes for move in self.moves if move.how == OFFLOAD)


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What became of one move.

    moved       saved tensors that were held as planned
    payloads    storages that were packed or put away for them
    held_bytes  of the last of these
    restored    how often such a storage was made again
    kept        by reason, the saved tensors that were held as eager holds them
    """

    move: Move
    moved: int
    payloads: int
    held_bytes: int
    restored: int
    kept: tuple[tuple[str, int], ...]


class MoveTally:
    """Counts of all moves of a tape. ``room_bytes`` is the most that a forward has put away so far."""

    def __init__(self) -> None:
        self.moved: Counter[Move] = Counter()
        self.payloads: Counter[Move] = Counter()
        self.restored: Counter[Move] = Counter()
        self.held: dict[Move, int] = {}
        self.reasons: dict[Move, Counter[str]] = {}
        self.room_bytes = 0

    def seen(self, moves: Moves) -> None:
        """A forward with these begins."""
        for move in moves.moves:
            self.reasons.setdefault(move, Counter())

    def packed(self, move: Move, held_bytes: int) -> None:
        """A storage is held as planned."""
        self.payloads[move] += 1
        self.held[move] = held_bytes

    def kept(self, move: Move, reason: str) -> None:
        """Count a saved tensor that is held as eager holds it; the first for each reason is told."""
        told = any(reason in reasons for reasons in self.reasons.values())
        self.reasons.setdefault(move, Counter())[reason] += 1
        if not told:
            warnings.warn(
                f"{move.title} is not moved ({move.how}) as planned: {reason}. The result is exact and this forward saves "
                "less memory.",
                RegionKept,
                stacklevel=2,
            )

    def report(self) -> tuple[MoveReport, ...]:
        """One report a move, in the order of their first calls."""
        return tuple(
            MoveReport(
                one,
                self.moved[one],
                self.payloads[one],
                self.held.get(one, 0),
                self.restored[one],
                tuple(reasons.items()),
            )
            for one, reasons in sorted(self.reasons.items(), key=lambda item: item[0].saves)
        )
