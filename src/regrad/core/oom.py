"""What is known of a failed allocation: who asked for how much, what is alive, what would help. A value and its words."""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.advice import Advice, Trap
from regrad.core.advice_text import advice_text, trap_lines
from regrad.core.units import format_bytes

REPLAY, OUTSIDE = "replay in the backward", "outside the model"


@dataclass(frozen=True)
class Explanation:
    """Why a step ran out of memory.

    asked_bytes  what the failed allocation asked for; None where the error does not say
    phase        "forward", "backward", "replay in the backward", "optimizer" or "outside the model"
    modules      the modules that were being called, outermost first, by name
    code, where  the user's line that ran, and its ``file:line``
    operation    the library's call that asked
    alive        bytes of the tensors alive when it failed, by kind
    advice       where a step was given; its figures are for ``advice.budget_bytes``
    """

    device: str
    asked_bytes: int | None
    phase: str
    modules: tuple[str, ...]
    code: str
    where: str
    operation: str
    alive: dict[str, int]
    traps: tuple[Trap, ...] = ()
    advice: Advice | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [headline(self)]
        if self.where:
            lines.append(f"  at {self.where}: {self.code}")
        if self.operation and self.operation != self.code:
            lines.append(f"  by {self.operation}")
        held = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.alive.items() if size)
        lines.append(f"alive when it failed: {format_bytes(sum(self.alive.values()))} ({held or 'no tensors'})")
        for trap in self.traps:
            lines += trap_lines(trap)
        lines += [f"note: {note}" for note in self.notes]
        if self.advice is not None:
            lines += ["", "the step, by its record, in the room that there was:", advice_text(self.advice)]
        return "\n".join(lines)


def headline(one: Explanation) -> str:
    """Who asked for how much, in one line."""
    asked = "an amount that the error does not name" if one.asked_bytes is None else format_bytes(one.asked_bytes)
    exact = "" if one.asked_bytes is None else f" ({one.asked_bytes:,} bytes)"
    module = f", module {one.modules[-1]}" if one.modules and one.modules[-1] else ""
    return f"regrad: out of memory on {one.device}: {asked}{exact} were asked for in the {one.phase}{module}".replace(
        "in the outside", "outside"
    )
