"""All suites by name, and one call that runs some of them and writes their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from regrad.core.errors import InvalidPlan
from regrad.verify.alias import Alias
from regrad.verify.bytes import Bytes
from regrad.verify.cohort.suite import Cohort
from regrad.verify.complex_step import ComplexStep
from regrad.verify.engines import Engines
from regrad.verify.field.suite import Field
from regrad.verify.numeric import Numeric
from regrad.verify.records import Run, Summary
from regrad.verify.suite import Suite

SUITES: dict[str, Suite] = {
    suite.name: suite for suite in (Numeric(), Bytes(), Engines(), ComplexStep(), Alias(), Cohort(), Field())
}

Report = Callable[[str, float], None]


def run_suites(
    names: Sequence[str] = (),
    *,
    full: bool = False,
    file: Path | None = None,
    progress: Report = lambda stage, done: None,
) -> list[Summary]:
    """Run the suites called ``names`` (all if there are none), in the order of the table, each once.

    ``file`` gets JSON Lines as they come: a record a run, then a summary a suite. Raises :class:`InvalidPlan` for a name
    that is not known or a file that cannot be written. What a suite finds is in its summary, never an exception.
    """
    unknown = sorted(set(names) - set(SUITES))
    if unknown:
        raise InvalidPlan(f"there is no suite {', '.join(unknown)}; the suites are {', '.join(SUITES)}")
    chosen = [suite for name, suite in SUITES.items() if not names or name in names]
    if file is None:
        return [_run(suite, full, lambda line: None, progress) for suite in chosen]
    try:
        with file.open("w", encoding="utf-8") as out:
            return [_run(suite, full, lambda line: print(line, file=out), progress) for suite in chosen]
    except OSError as error:
        raise InvalidPlan(f"cannot write {file}: {error.strerror}. Give a file in a folder that exists.") from error


def _run(suite: Suite, full: bool, write: Callable[[str], None], progress: Report) -> Summary:
    def sink(run: Run) -> None:
        write(run.line())

    summary = suite.run(full=full, progress=lambda done: progress(suite.name, done), sink=sink)
    write(summary.line())
    return summary
