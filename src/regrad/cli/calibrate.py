"""``regrad calibrate``: learn on this machine how much memory kernels hold for themselves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import RenderableType
from rich.table import Table

from regrad.cli import options
from regrad.cli.output import Answer, answering, progress_bar
from regrad.core.codec import plain
from regrad.core.errors import UsageError
from regrad.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from regrad.torch.calibrate import Change


def calibrate(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The file to write.",
            show_default="what REGRAD_CALIBRATION names, else regrad/workspace.json in the user's cache folder",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About a sixth of the shapes, in a few seconds.")] = False,
    as_json: options.Json = False,
) -> None:
    """Measure the workspace of common CPU operations and write it to a file that plans read from then on.

    Plans use it for operations that are too large or too many to be measured while planning.
    """
    with answering(Answer("calibrate", "", as_json, device="cpu")) as answer:
        if out is not None:
            _check_writable(out)
        from regrad.torch.calibrate import compare, learn
        from regrad.torch.workspace_table import calibration_file, shipped

        path = out if out is not None else calibration_file()
        if out is None:
            _make_folder(path)
            _check_writable(path)
        began = time.monotonic()
        with progress_bar() as report:
            table = learn(quick=quick, progress=report)
        seconds = time.monotonic() - began
        changes = compare(table, shipped())
        try:
            path.write_text(table.to_json(), encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error
        body: dict[str, Any] = {"calibration_file": str(path), "entries": table.entry_count, "seconds": seconds}
        body |= {"torch": table.torch_version, "processor": table.processor, "threads": table.threads}
        answer.body = {"calibration": body | {"operations": [plain(change) for change in changes]}}
        summary = f"{table.entry_count} entries in {format_seconds(seconds)}, written to {path}"
        answer.shown = [_table(changes), summary]


def _check_writable(path: Path) -> None:
    """Say before the work, not after it, that its result has no place."""
    try:
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder. Give the name of a file with --out.")
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _make_folder(path: Path) -> None:
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {path}: {error.strerror or error}. Nothing was changed. Name a file in a folder that is there and "
        "may be written with --out FILE, and point REGRAD_CALIBRATION to it."
    )


def _table(changes: list[Change]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, header_style="bold")
    table.title, table.title_justify = "workspace, compared with the table that comes with regrad", "left"
    table.add_column("operation", overflow="fold")
    for name in ("entries", "same", "changed", "new", "largest change"):
        table.add_column(name, justify="right")
    for change in changes:
        counts = (change.entries, change.same, change.changed, change.new)
        sign = "+" if change.largest_change_bytes > 0 else "-"
        size = f"{sign}{format_bytes(abs(change.largest_change_bytes))}" if change.largest_change_bytes else ""
        table.add_row(change.operation.removeprefix("aten."), *(f"{count:,}" for count in counts), size)
    return table
