"""What fits a budget: the largest batch or sequence length, and the one that trains fastest. Values, text, the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from regrad.core.errors import InvalidPlan
from regrad.core.plan import Plan
from regrad.core.units import format_bytes, format_seconds

FORMAT_VERSION = 1
BATCH, SEQUENCE = OVER = ("batch", "sequence")
UNITS = {BATCH: "sample", SEQUENCE: "token"}


@dataclass(frozen=True, slots=True)
class Size:
    """One batch size, or one sequence length, that was tried.

    size                 samples in a forward, or tokens in a sample
    micro_batch          samples in one forward and backward
    accumulation_steps   forwards and backwards to one optimizer step; 1 without an effective batch
    gradients            "fresh", or "kept" where micro-batches add to them
    fits                 whether its step runs within the budget; why says what stands against it
    eager_peak_bytes     without a plan
    peak_bytes           under its own best plan; where nothing fits under the plan of the least peak
    eager_step_seconds   one optimizer step with all its micro-batches, without a plan. Predicted; what was timed on this
                         device is smoothed over all sizes that were tried
    step_seconds         the same under the plan
    unit_seconds         step_seconds for one sample, or one token, that the step trains on
    measured_peak_bytes  of a step that was run under the plan; None where none was
    plan                 for one micro-batch; kept for the sizes that a :class:`Fit` names
    """

    size: int
    micro_batch: int
    accumulation_steps: int
    gradients: str
    fits: bool
    eager_peak_bytes: int = 0
    peak_bytes: int = 0
    eager_step_seconds: float = 0.0
    step_seconds: float = 0.0
    step_ratio: float = 1.0
    unit_seconds: float = 0.0
    measured_peak_bytes: int | None = None
    why: str = ""
    plan: Plan | None = None


@dataclass(frozen=True)
class Fit:
    """The answer of ``rt.fit``.

    over             "batch" or "sequence": what ``size`` counts
    largest          the largest size that fits under its own best plan
    best             of the sizes tried the one with the least seconds for each sample (token), at most the largest
    largest_eager    the largest size that fits without recomputation; None if not even the smallest does
    beyond           the next size above the largest, and why it is not the answer; None where ``most`` was reached
    sizes            every size of which it was tried whether it fits, ascending
    effective_batch  samples to one optimizer step; None without accumulation
    batch_size       samples held fixed while the length is searched, sequence_length the length while the batch is;
                     None where make_batch decides
    confirmed        whether measured steps of ``largest`` and ``best`` stayed within the budget; None if none was run
    """

    over: str
    budget_bytes: int
    largest: Size
    best: Size
    largest_eager: Size | None
    beyond: Size | None
    sizes: tuple[Size, ...]
    device: str
    predicted_by: str
    band_ratio: float
    effective_batch: int | None = None
    batch_size: int | None = None
    sequence_length: int | None = None
    confirmed: bool | None = None
    notes: tuple[str, ...] = ()
    planning_seconds: float = 0.0
    version: int = FORMAT_VERSION

    @property
    def unit(self) -> str:
        """What seconds are counted for: "sample" or "token"."""
        return UNITS[self.over]

    def to_json(self) -> str:
        """As JSON, to be read by :meth:`from_json`."""
        from regrad.core.codec import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str) -> Fit:
        """Read what :meth:`to_json` wrote. Raises :class:`InvalidPlan` for anything else."""
        from regrad.core.codec import load

        found = load(cls, text)
        if found.version != FORMAT_VERSION:
            raise InvalidPlan(f"the fit has format version {found.version}, this regrad reads {FORMAT_VERSION}")
        return found

    def __str__(self) -> str:
        return fit_text(self)


def header(fit: Fit) -> tuple[str, ...]:
    """The heads of the table of :func:`rows`."""
    often = () if fit.effective_batch is None else ("times",)
    return ("", _searched(fit), *often, "peak", "eager peak", "step", f"a {fit.unit}")


def rows(fit: Fit) -> tuple[tuple[str, ...], ...]:
    """The table: what each size that is named takes, and the others that ran."""
    named: list[tuple[str, Size]] = []
    if fit.largest_eager is not None:
        named.append(("largest, eager", fit.largest_eager))
    named += [("largest, planned", fit.largest), ("best throughput", fit.best)]
    if fit.beyond is not None:
        named.append(("one more", fit.beyond))
    shown = {size.size for _, size in named}
    others = [("tried", size) for size in fit.sizes if size.size not in shown and size.peak_bytes]
    return tuple(_row(fit, name, size) for name, size in [*named, *others])


def _row(fit: Fit, name: str, size: Size) -> tuple[str, ...]:
    start = (name, str(size.size), *(() if fit.effective_batch is None else (str(size.accumulation_steps),)))
    if not size.peak_bytes:
        return (*start, "does not run", "", "", "")
    peaks = (format_bytes(size.peak_bytes), format_bytes(size.eager_peak_bytes))
    if not size.fits:
        least = f"least {peaks[0]}" if size.peak_bytes > fit.budget_bytes else "over, measured"
        return (*start, least, peaks[1], "", "")
    return (*start, *peaks, f"{size.step_ratio:.2f}x", format_small(size.unit_seconds))


def format_small(seconds: float) -> str:
    """Seconds with a unit that suits a single sample or token."""
    return format_seconds(seconds) if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.1f} us"


def facts(fit: Fit) -> tuple[tuple[str, str], ...]:
    """Name and value of the figures that stand above the table."""
    band = f"± {fit.band_ratio:.1%}, by {fit.predicted_by}"
    found = [
        ("budget", f"{format_bytes(fit.budget_bytes)} ({fit.budget_bytes:,} bytes)"),
        (f"largest {_searched(fit)}", f"{fit.largest.size}, predicted peak {_peak(fit.largest)}; {band}"),
        ("best throughput", f"{fit.best.size}, predicted peak {_peak(fit.best)}"),
        ("accumulation", accumulation(fit, fit.best)),
        ("measured", _measured(fit)),
    ]
    held = fit.sequence_length if fit.over == BATCH else fit.batch_size
    if held is not None:
        found.append(("held fixed", f"{'length' if fit.over == BATCH else 'batch'} {held}"))
    found.append(("for", f"device {fit.device}, gradients {fit.best.gradients}"))
    return tuple((name, value) for name, value in found if value)


def _searched(fit: Fit) -> str:
    return "batch" if fit.over == BATCH else "length"


def _peak(size: Size) -> str:
    return f"{format_bytes(size.peak_bytes)} at {size.step_ratio:.2f}x the eager step"


def accumulation(fit: Fit, size: Size) -> str:
    """How micro-batches of a size make up the effective batch; "" without one."""
    if fit.effective_batch is None:
        return ""
    effective, micro, steps = fit.effective_batch, size.micro_batch, size.accumulation_steps
    full, rest = divmod(effective, micro)
    if not rest:
        return f"{micro} x {steps} = {effective}"
    return f"{full} x {micro} and one of {rest} = {effective}: {micro} does not divide it, so weigh losses by samples"


def _measured(fit: Fit) -> str:
    measured = {size.size: size.measured_peak_bytes for size in (fit.largest, fit.best)}
    parts = [f"{format_bytes(peak)} at {size}" for size, peak in measured.items() if peak is not None]
    if not parts:
        return "no step was run"
    return f"{', '.join(parts)}: {'within' if fit.confirmed else 'OVER'} the budget"


def fit_text(fit: Fit) -> str:
    """The whole answer for a terminal without colours, a log or a test."""
    pairs = facts(fit)
    width = max(len(name) for name, _ in pairs) + 1
    lines = [f"{name + ':':<{width}} {value}" for name, value in pairs]
    table = (header(fit), *rows(fit))
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    lines.append("")
    for first, *cells in table:
        shown = "  ".join(cell.rjust(wide) for cell, wide in zip(cells, widths[1:], strict=True))
        lines.append(f"{first.ljust(widths[0])}  {shown}".rstrip())
    if fit.notes:
        lines += ["", *(f"note: {note}" for note in fit.notes)]
    return "\n".join(lines)


_PATIENCE, _POINTS = 2, 3
Level = Callable[[int], int | None]
"""The bytes that a size needs at least; None where its step does not run."""


def find_edge(level: Level, budget_bytes: int, lowest: int, highest: int, growth: int = 16) -> tuple[int, int | None]:
    """The largest size within a budget, and the next one, which is not; None for it if ``highest`` is within.

    ``lowest`` must be within. The next size to try is where a parabola through the three nearest ones crosses the budget,
    at most ``growth`` times the last; where that was slow twice intervals are halved. A level that is a line takes about
    five trials. Where levels do not rise with the size one of the edges is found.
    """
    found = {lowest: level(lowest)}
    low, high, slow, stride = lowest, highest + 1, 0, 1
    while high - low > 1:
        is_open, width = high > highest, high - low
        if is_open:
            end = min(high, growth * low + 1)
            at = min(max(_guess(found, low, end, budget_bytes), low + stride), end - 1)
        elif found[high] is None or slow >= _PATIENCE:
            at = (low + high) // 2
        else:
            at = _guess(found, low, high, budget_bytes)
        found[at] = level(at)
        if (found[at] or budget_bytes + 1) <= budget_bytes:
            low = at
            stride *= 2 if len(found) > _POINTS else 1
        else:
            high = at
        slow += not is_open and 2 * (high - low) > width
    return low, high if high <= highest else None


def _guess(found: dict[int, int | None], low: int, end: int, budget_bytes: int) -> int:
    """The largest size above ``low`` and below ``end`` that the parabola has within the budget, ``low + 1`` at least."""
    near = sorted((abs(size - low), size, level) for size, level in found.items() if level is not None)[:_POINTS]
    points = [(size, level) for _, size, level in near]
    if len(points) == 1:
        return min(2 * low, end - 1)
    within, above = low, end
    while above - within > 1:
        middle = (within + above) // 2
        if _curve(points, middle) <= budget_bytes:
            within = middle
        else:
            above = middle
    return max(within, low + 1)


def _curve(points: list[tuple[int, int]], size: int) -> float:
    """The polynomial through ``points`` (Lagrange) at ``size``."""
    total = 0.0
    for x, y in points:
        term = float(y)
        for other, _ in points:
            if other != x:
                term *= (size - other) / (x - other)
        total += term
    return total


def smoothed_seconds(points: dict[int, float]) -> dict[int, float]:
    """Seconds by size with the clock's noise taken out: a + b·n + c·n² with no negative coefficient, least squares of the
    relative errors.

    Work grows like that in samples and in tokens. Fewer than three points, and points without seconds, stay as they are.
    """
    known = {size: seconds for size, seconds in points.items() if seconds > 0}
    if len(known) < 3:
        return dict(points)
    best: tuple[float, dict[int, float]] = (float("inf"), points)
    for powers in ((0,), (1,), (0, 1), (2,), (0, 2), (1, 2), (0, 1, 2))[: 3 if len(known) == 3 else None]:
        rows = [[size**power / seconds for power in powers] for size, seconds in known.items()]
        coefficients = _solve([[sum(r[i] * r[j] for r in rows) for j in range(len(powers))] for i in range(len(powers))],
                              [sum(r[i] for r in rows) for i in range(len(powers))])  # fmt: skip
        if coefficients is None or min(coefficients) < 0:
            continue
        error = sum((sum(map(float.__mul__, coefficients, row)) - 1) ** 2 for row in rows)
        if error < best[0]:
            terms = list(zip(coefficients, powers, strict=True))
            best = error, {size: sum(c * size**power for c, power in terms) for size in known}
    return {**points, **best[1]}


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """The solution of a small system of normal equations by elimination; None if it has none."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for k, row in enumerate(rows):
        if abs(row[k]) < 1e-12 * abs(matrix[k][k]):
            return None
        for other in rows[k + 1 :]:
            factor = other[k] / row[k]
            other[:] = [a - factor * b for a, b in zip(other, row, strict=True)]
    found: list[float] = []
    for k in range(len(rows) - 1, -1, -1):
        rest = sum(a * b for a, b in zip(rows[k][k + 1 : -1], found, strict=True))
        found.insert(0, (rows[k][-1] - rest) / rows[k][k])
    return found
