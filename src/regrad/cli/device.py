"""What ``regrad plan`` adds for a device that is not here: what was assumed of it, and what would make a step fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from regrad.cli.output import Answer, describe
from regrad.core.codec import plain
from regrad.core.plan import Plan
from regrad.core.units import format_bytes
from regrad.memory.allocator import SEGMENTS_DO_NOT_FIT
from regrad.memory.devices import Device
from regrad.report.text import facts_table

if TYPE_CHECKING:
    from regrad.core.errors import InfeasibleBudget
    from regrad.torch.profile import Profile


def add_device(answer: Answer, profile: Profile, plan: Plan, device: Device) -> None:
    """Put what was assumed of the device, and what its allocator would hold for the plan, into the answer."""
    from regrad.torch.floor import model_state_bytes
    from regrad.torch.translate import reserved_under

    state = model_state_bytes(profile)
    held = reserved_under(profile, plan, device)
    answer.body |= {
        "target": device.facts(),
        "model_state_bytes": state,
        "reserved_peak_bytes": held.reserved_peak_bytes,
        "reserved_fits": held.reserved_peak_bytes <= device.usable_bytes,
    }
    answer.shown.append(
        facts_table(
            (
                ("planned for", device.in_words()),
                ("model state", f"{format_bytes(state)} (weights, gradients, optimizer state)"),
                ("reserved", f"{format_bytes(held.reserved_peak_bytes)} by the device's allocator, segments included"),
            )
        )
    )
    if held.reserved_peak_bytes > device.usable_bytes:
        answer.shown.append(Text.assemble(("note ", "yellow"), SEGMENTS_DO_NOT_FIT))


def refuse(answer: Answer, error: InfeasibleBudget, profile: Profile, device: Device | None) -> None:
    """Answer that nothing fits the device, with what would. Without a device the error goes on as it is."""
    if device is None:
        raise error
    from regrad.torch.floor import model_state_bytes, what_would_fit

    state = model_state_bytes(profile)
    found = what_would_fit(profile, error.budget_bytes)
    answer.exit_code = error.exit_code
    body: dict[str, Any] = {"error": describe(error), "target": device.facts(), "model_state_bytes": state}
    answer.body = body | {"remedies": [plain(one) for one in found]}
    answer.shown = []
    typer.echo(f"error: {error}", err=True)
    answer.shown.append(
        facts_table(
            (
                ("planned for", device.in_words()),
                ("model state", f"{format_bytes(state)} ({state:,} bytes: weights, gradients, optimizer state)"),
            )
        )
    )
    answer.shown.append(_table(found))


def _table(found: Any) -> Table | Text:
    if not found:
        return Text("no lighter optimizer and no sharding over up to 8 devices makes it smaller")
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row(Text("peak", style="bold"), Text("", style="bold"), Text("what would change it", style="bold"))
    for one in found:
        table.add_row(format_bytes(one.peak_bytes), "fits" if one.fits else "does not fit", one.what)
    return table
