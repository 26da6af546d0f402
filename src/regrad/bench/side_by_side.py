"""Plans beside what is done without a planner, in one run: peak, step time and bytes left, on the zoo at many budgets.

A baseline at a budget is its setting with the least work whose *measured* peak is within the budget. Everything that
stands at one budget is timed in turns with the eager step, in process CPU seconds; a ratio is one of medians. torch's
checkpoint assumes blocks that do the same when they run again. On a model with state they do not: its baselines are
measured there all the same, and ``identical`` says what became of the bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import regrad.torch as rt
from regrad.bench.baselines import Setting, settings_of
from regrad.bench.blocks import Block, survey
from regrad.bench.leftovers import differences, left_by
from regrad.bench.torch_sac import SAC_ILP, sac_settings
from regrad.bench.zoo import Model
from regrad.core.errors import InfeasibleBudget
from regrad.core.plan import Plan
from regrad.torch.measure import measure_peak

BUDGETS = ("75%", "50%", "35%", "25%", "15%")
WORKLOADS = ("gpt", "llama_like", "vit", "batchnorm_conv", "unet", "moe", "queue_encoder")
OURS = "rt.plan"
ROUNDS = 5
UNUSED_RATIO = 0.05
_MORE = (0.05, 0.1, 0.2, 0.4)
WARMUP = 2
_SHOWN_DIFFERENCES = 3

Say = Callable[[str], None]
Install = Callable[[Any], Any]


@dataclass
class Row:
    """One way to run one workload at one budget.

    feasible              whether a setting fits; if not, the figures are of what comes closest: the plan at our floor,
                          a baseline's setting with the lowest peak
    floor_bytes           ours: the least that has a plan; a baseline: the lowest peak measured of all its settings
    predicted_peak_bytes  ours only
    step_ratio            median process CPU seconds over the eager step's median; None for what did not run
    spread_ratio          distance of the quartiles of its times over their median
    identical             whether losses, gradients, weights, buffers, attributes and generators are the eager step's
    differing             the first names of what is not
    unused_ratio          share of the budget above the measured peak
    next_peak_bytes       ours, where more than 5 % are unused: the predicted peak of the next faster plan, as far as it
                          is found within 40 % more
    failed                what stopped it; "" if nothing
    """

    workload: str
    budget: str
    budget_bytes: int
    method: str
    setting: str
    feasible: bool
    floor_bytes: int | None = None
    measured_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_step_ratio: float | None = None
    step_ratio: float | None = None
    spread_ratio: float | None = None
    identical: bool | None = None
    differing: list[str] = field(default_factory=list)
    unused_ratio: float | None = None
    next_peak_bytes: int | None = None
    failed: str = ""


@dataclass(frozen=True)
class _Tried:
    """A setting that was run: its peak, or what stopped it."""

    setting: Setting
    peak_bytes: int | None
    failed: str = ""


class Comparison:
    """One workload: its eager step, its profile, and the peaks that were measured so far."""

    def __init__(self, entry: Model, size: str, rounds: int, say: Say) -> None:
        self.entry, self.size, self.rounds, self.say = entry, size, rounds, say
        say(f"{entry.name}: the eager step")
        self.blocks: list[Block] = survey(self.make(), entry.blocks)
        self.eager = left_by(self.make())
        self.eager_peak = measure_peak(self.make(), warmup=WARMUP)
        say(f"{entry.name}: profiling")
        self.profile = rt.profile(self.make(), segments=entry.segments)
        self.methods = settings_of(self.blocks)
        self.not_run: dict[str, str] = {}
        sac = sac_settings(entry.name, size, self.blocks)
        if isinstance(sac, str):
            self.not_run[SAC_ILP] = sac
        else:
            self.methods[SAC_ILP] = sac
        self._tried: dict[tuple[str, str], _Tried] = {}
        self._left: dict[str, list[str]] = {}

    def make(self) -> rt.Step:
        """A new step, always the same."""
        return self.entry.make(self.size)

    def run(self, budgets: Sequence[str]) -> dict[str, Any]:
        """All of it as plain values."""
        rows = [row for budget in budgets for row in self.at(budget)]
        return {
            "name": self.entry.name,
            "description": self.entry.description,
            "size": self.size,
            "settings": dict(self.entry.settings[self.size]),
            "stateful": self.entry.stateful,
            "blocks": [asdict(block) for block in self.blocks],
            "eager_peak_bytes": self.eager_peak.peak_bytes,
            "persistent_bytes": self.eager_peak.baseline_bytes,
            "profile_seconds": self.profile.seconds,
            "not_run": self.not_run,
            "rows": [asdict(row) for row in rows],
            "standings": standings([asdict(row) for row in rows]),
        }

    # -- one budget -------------------------------------------------------------------------------------------

    def at(self, budget: str) -> list[Row]:
        """Our plan and each baseline at one budget, timed in turns."""
        self.say(f"{self.entry.name}: {budget}, plan")
        ours, plan = self._ours(budget)
        installs: list[tuple[Row, Install]] = [(ours, lambda model: rt.apply(model, plan))]
        rows = [ours]
        for method, settings in self.methods.items():
            self.say(f"{self.entry.name}: {budget}, {method}")
            row, setting = self._baseline(method, settings, ours.budget, ours.budget_bytes)
            rows.append(row)
            if setting is not None:
                installs.append((row, setting.install))
        self.say(f"{self.entry.name}: {budget}, timing {len(installs)} ways in turns")
        self._time(installs)
        return rows

    def _ours(self, budget: str) -> tuple[Row, Plan]:
        try:
            plan, feasible = rt.plan(self.make(), budget=budget, profile=self.profile), True
            budget_bytes = plan.budget_bytes
        except InfeasibleBudget as error:
            plan, feasible, budget_bytes = error.plan, False, error.budget_bytes
        step = self.make()
        rt.apply(step.model, plan)
        peak = measure_peak(step, warmup=WARMUP).peak_bytes
        row = Row(
            self.entry.name, budget, budget_bytes, OURS, plan.setting, feasible, plan.least_bytes, peak,
            plan.predicted_peak_bytes, plan.step_ratio,
        )  # fmt: skip
        self._finish(row, lambda model: rt.apply(model, plan), f"{OURS} {budget}")
        if row.unused_ratio is not None and row.unused_ratio > UNUSED_RATIO:
            row.next_peak_bytes = self._next_peak(plan)
        return row, plan

    def _next_peak(self, plan: Plan) -> int | None:
        """The predicted peak of the plan that a somewhat larger budget brings, if that is a faster one."""
        for more in _MORE:
            larger = rt.plan(self.make(), budget=int(plan.budget_bytes * (1 + more)), profile=self.profile)
            if larger.added_seconds < plan.added_seconds:
                return larger.predicted_peak_bytes
        return None

    def _baseline(
        self, method: str, settings: Sequence[Setting], budget: str, budget_bytes: int
    ) -> tuple[Row, Setting | None]:
        tried = []
        for setting in settings:
            tried.append(self._try(setting))
            peak = tried[-1].peak_bytes
            if peak is not None and peak <= budget_bytes:
                break
        ran = [one for one in tried if one.peak_bytes is not None]
        row = Row(self.entry.name, budget, budget_bytes, method, "", False)
        if not ran:
            row.failed = tried[0].failed if tried else "this model has no such setting"
            return row, None
        lowest = min(ran, key=lambda one: one.peak_bytes or 0)
        row.feasible = (ran[-1].peak_bytes or 0) <= budget_bytes
        chosen = ran[-1] if row.feasible else lowest
        row.setting, row.measured_peak_bytes = chosen.setting.label, chosen.peak_bytes
        row.floor_bytes = None if row.feasible else lowest.peak_bytes
        self._finish(row, chosen.setting.install, f"{method} {chosen.setting.label}")
        return row, chosen.setting

    def _try(self, setting: Setting) -> _Tried:
        key = setting.method, setting.label
        if key not in self._tried:
            step = self.make()
            setting.install(step.model)
            try:
                self._tried[key] = _Tried(setting, measure_peak(step, warmup=WARMUP).peak_bytes)
            except Exception as error:  # noqa: BLE001 - that a baseline cannot run this model is its result
                first = str(error).strip().partition("\n")[0]
                self._tried[key] = _Tried(setting, None, f"{type(error).__name__}: {first}")
        return self._tried[key]

    def _finish(self, row: Row, install: Install, key: str) -> None:
        """The bytes that it leaves, and the share of the budget that it does not use."""
        if key not in self._left:
            step = self.make()
            install(step.model)
            self._left[key] = differences(left_by(step), self.eager)
        row.identical, row.differing = not self._left[key], self._left[key][:_SHOWN_DIFFERENCES]
        if row.feasible and row.measured_peak_bytes is not None:
            row.unused_ratio = 1 - row.measured_peak_bytes / row.budget_bytes

    def _time(self, installs: Sequence[tuple[Row, Install]]) -> None:
        steps = [self.make()]
        for _, install in installs:
            steps.append(self.make())
            install(steps[-1].model)
        times = in_turns(steps, self.rounds)
        eager = statistics.median(times[0])
        for (row, _), seconds in zip(installs, times[1:], strict=True):
            median = statistics.median(seconds)
            low, _, high = statistics.quantiles(seconds, n=4)
            row.step_ratio, row.spread_ratio = median / eager, (high - low) / median


def in_turns(steps: Sequence[rt.Step], rounds: int) -> list[list[float]]:
    """Process CPU seconds of each step in each round; the one that goes first changes from round to round.

    Each step is run twice before, and holds no gradients while another one runs.
    """
    times: list[list[float]] = [[] for _ in steps]
    for number in range(-WARMUP, rounds):
        for turn in range(len(steps)):
            which = (turn + number) % len(steps)
            began = time.process_time()
            steps[which]()
            if number >= 0:
                times[which].append(time.process_time() - began)
            steps[which].clear_gradients()
    return times


def standings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each budget that ours meets: its step time over that of the fastest baseline within the same budget.

    Once among baselines that leave the eager step's bytes (``exact``), once among all. ``noise_ratio`` is what half the
    quartiles' distances of both come to; None where no baseline fits.
    """
    found = []
    for ours in (row for row in rows if row["method"] == OURS and row["feasible"]):
        others = [row for row in rows if row["budget"] == ours["budget"] and row["method"] != OURS and row["feasible"]]
        for exact in (True, False):
            pool = [row for row in others if row["identical"] or not exact]
            best = min(pool, key=lambda row: float(row["step_ratio"]), default=None)
            one = {
                "budget": ours["budget"],
                "exact": exact,
                "baseline": None,
                "relative_ratio": None,
                "noise_ratio": None,
            }
            if best is not None:
                one["baseline"] = f"{best['method']}, {best['setting']}"
                one["relative_ratio"] = ours["step_ratio"] / best["step_ratio"]
                one["noise_ratio"] = (ours["spread_ratio"] + best["spread_ratio"]) / 2
            found.append(one)
    return found


def defects(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What must not be: plans over their budget, other bytes than eager, a budget refused that an exact baseline meets."""
    found = []
    for row in rows:
        where = f"{row['workload']} at {row['budget']}"
        if row["method"] == OURS:
            allowed = row["budget_bytes"] if row["feasible"] else row["floor_bytes"]
            if row["measured_peak_bytes"] > allowed:
                found.append(f"{where}: the plan peaks at {row['measured_peak_bytes']:,} of {allowed:,} bytes")
            if not row["identical"]:
                found.append(f"{where}: the plan leaves another {', '.join(row['differing'])}")
            if not row["feasible"]:
                same = (one for one in rows if (one["workload"], one["budget"]) == (row["workload"], row["budget"]))
                met = [one["method"] for one in same if one["feasible"] and one["identical"]]
                found += [f"{where}: refused, and {method} meets it" for method in met]
    return found
