"""One run: some steps from the start of a world, surveyed, after which the world is put back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from regrad.core.errors import is_users, mark_as_users
from regrad.core.plan import Plan
from regrad.torch.audit.probe import BACKWARD, Borders, Engine
from regrad.torch.audit.survey import VALUE, Surveyor, Table, gradients
from regrad.torch.audit.world import NoSnapshot, World, digest_of


@dataclass(frozen=True)
class Under:
    """What a run is done under: which calls are recomputed (``None`` for eager), by which engine, and the plan whose
    ranges of torch calls are."""

    calls: dict[str, tuple[str, ...]] | None = None
    engine: Engine | None = None
    cache_off: str | None = None
    plan: Plan | None = None


class Auditor:
    """Runs the step of one world again and again. ``names`` are the modules whose borders are surveyed."""

    def __init__(self, world: World, names: list[str], steps: int) -> None:
        self.world, self.names, self.steps = world, names, steps
        self.surveyor = Surveyor(world)
        self.runs = 0
        self._start = self.surveyor.table(thorough=True)

    def run(self, under: Under, watch: Callable[[Borders], AbstractContextManager[Any]] | None = None) -> Run:
        """One run. What the eager step raises is the user's and passes through; of another one it is the result.

        ``watch(borders)`` makes what is entered around the steps. Raises :class:`NoSnapshot` if the world cannot be put
        back afterwards.
        """
        self.runs += 1
        borders = Borders(self.world.step.model, self.names, self.surveyor.table)
        error: Exception | None = None
        try:
            with (
                borders.installed(under.calls, under.cache_off, under.engine, under.plan),
                nullcontext() if watch is None else watch(borders),
            ):
                for index in range(self.steps):
                    self._step(borders, index)
        except Exception as raised:
            if under.calls is None:
                raise
            error = raised.with_traceback(None)  # its frames would hold the graph
        finally:
            self.surveyor.forget()
            lost = self.world.put_back() or self._moved()
        if lost:
            raise NoSnapshot(lost)
        return Run(borders, error)

    def _moved(self) -> str:
        """What is not as it was at the start, in words; "" if all is."""
        now = self.surveyor.table(thorough=True)
        self.surveyor.forget()
        slots = [
            slot
            for slot, aspect in {**self._start, **now}
            if self._start.get((slot, aspect)) != now.get((slot, aspect))
        ]
        return f"{slots[0]} is not what it was before" if slots else ""

    def _step(self, borders: Borders, index: int) -> None:
        step = self.world.step
        borders.begin_step(index)
        step.clear_gradients()
        loss = step.compute_loss()
        borders.survey("end of the forward", self.surveyor.table() | {("loss", VALUE): digest_of(loss)})
        borders.phase = BACKWARD
        try:
            loss.backward()
        except Exception as error:
            if not is_users(error):
                mark_as_users(error)
            raise
        borders.survey("end of the backward", self._ends())
        if step.optimizer is not None:
            step.optimizer.step()
            borders.survey("end of the step", self._ends())

    def _ends(self) -> Table:
        return self.surveyor.table(thorough=True) | gradients(self.world)


@dataclass
class Run:
    """What a run saw, and what stopped it."""

    borders: Borders
    error: Exception | None

    @property
    def replays(self) -> int:
        """How often bodies of segments, or ranges of torch calls, ran again."""
        return sum(self.borders.replays.values()) + self.borders.range_replays
