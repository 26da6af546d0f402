"""Plans beside baselines: what a baseline runs, what it leaves, how rows are made, and that a run can be taken up again."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regrad.torch as rt
from regrad.bench import side_by_side_run as runs
from regrad.bench import torch_sac
from regrad.bench.baselines import EVERY_BLOCK, EVERY_K, FIRST_K, METHODS, SEGMENTS, SELECTIVE, cut_spans, settings_of
from regrad.bench.blocks import Block, survey
from regrad.bench.leftovers import differences, digest, left_by
from regrad.bench.side_by_side import OURS, WORKLOADS, Comparison, defects, in_turns, standings
from regrad.bench.zoo import ZOO
from regrad.core.errors import UsageError

torch.set_num_threads(1)


class Unit(nn.Module):
    """A layer that counts the runs of its forward, outside what ``left_by`` sees."""

    runs: dict[int, int] = {}  # noqa: RUF012 - shared by all on purpose

    def __init__(self, number: int, width: int = 64) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Unit.runs[self.number] = Unit.runs.get(self.number, 0) + 1
        return (torch.tanh(self.linear(x)) * 1.5).sin()


class Loop(nn.Module):
    """Units in a loop; ``broken`` says before which ones something else happens to the value that is handed on."""

    def __init__(self, count: int = 6, broken: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(i) for i in range(count))
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, unit in enumerate(self.units):
            x = unit(x * 1.0 if number in self.broken else x)
        return x.square().mean()


def step(**settings: Any) -> rt.Step:
    torch.manual_seed(0)
    model = Loop(**settings)
    return rt.Step(model, torch.randn(512, 64), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def blocks(**settings: Any) -> list[Block]:
    return survey(step(**settings), ("units.*",))


def runs_of_a_step(one: rt.Step) -> list[int]:
    Unit.runs.clear()
    one()
    return [Unit.runs[number] for number in sorted(Unit.runs)]


# -- blocks and baselines -----------------------------------------------------------------------------------------


def test_blocks_and_their_hand_offs() -> None:
    found = blocks(broken=(0, 3))
    assert [block.name for block in found] == [f"units.{i}" for i in range(6)]
    assert [block.follows for block in found] == [False, True, True, False, True, True]
    assert all(block.forward_seconds > 0 for block in found)
    with pytest.raises(UsageError, match=r"none of layers\.\* names a module that Loop calls"):
        survey(step(), ("layers.*",))


def test_a_block_that_is_called_twice_is_not_handed_on() -> None:
    model = Loop(3)
    model.units[1] = model.units[0]
    found = survey(rt.Step(model, torch.randn(8, 64)), ("units.*",))
    assert [(block.name, block.follows) for block in found] == [("units.0", False), ("units.2", False)]


def test_a_survey_leaves_no_hook() -> None:
    one = step()
    survey(one, ("units.*",))
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in one.model.modules())


def test_spans_are_cut_where_no_hand_off_is_proved() -> None:
    whole, broken = blocks(), blocks(broken=(4,))
    assert [len(span) for span in cut_spans(whole, 3)] == [2, 2, 2]
    assert [len(span) for span in cut_spans(whole, 4)] == [2, 1, 2, 1]
    assert [len(span) for span in cut_spans(whole, 1)] == [6]
    assert [len(span) for span in cut_spans(broken, 2)] == [3, 1, 2]


def test_methods_run_again_what_they_say_and_leave_the_same_bytes() -> None:
    settings = settings_of(blocks())
    assert tuple(settings) == METHODS
    eager = left_by(step())
    for one in itertools.chain.from_iterable(settings.values()):
        tried = step()
        one.install(tried.model)
        assert differences(left_by(tried), eager) == [], one.label
        again = [count - 1 for count in runs_of_a_step(tried)]
        number = int(one.label.split("= ")[-1].split()[0])
        if one.method in (FIRST_K, SELECTIVE):
            assert again == [1] * number + [0] * (6 - number)
        elif one.method == EVERY_K:
            assert again == [int(i % number == 0) for i in range(6)]
        elif one.method == EVERY_BLOCK:
            assert again == [1] * 6
        elif one.method == SEGMENTS:
            last = len(cut_spans(blocks(), number)[-1])
            assert again == [1] * (6 - last) + [0] * last


def test_settings_begin_with_the_least_work() -> None:
    for settings in settings_of(blocks()).values():
        work = [setting.work_seconds for setting in settings]
        assert work == sorted(work)


def test_peaks_are_those_of_the_methods() -> None:
    from regrad.torch.measure import measure_peak

    peaks: dict[str, int] = {}
    settings = settings_of(blocks())
    for method in (SEGMENTS, FIRST_K, SELECTIVE):
        for setting in settings[method][1::3]:
            one = step()
            setting.install(one.model)
            peak = measure_peak(one, warmup=1).peak_bytes
            peaks[method] = min(peak, peaks.get(method, peak))
    eager = measure_peak(step(), warmup=1).peak_bytes
    assert peaks[SEGMENTS] < peaks[FIRST_K] < eager
    assert peaks[FIRST_K] < peaks[SELECTIVE] < eager


# -- what is left behind ------------------------------------------------------------------------------------------


def test_differences_are_seen_and_named() -> None:
    expected = left_by(step())
    assert differences(left_by(step()), expected) == []
    other = step()
    with torch.no_grad():
        other.model.units[2].linear.bias[0] += 1e-6  # type: ignore[index, union-attr]
    names = differences(left_by(other), expected)
    assert "parameter units.2.linear.bias" in names
    assert "loss of step 0" in names
    other = step()
    other.model.units[1].number = 9
    assert differences(left_by(other), expected) == ["attribute units.1.number"]


def test_generators_are_part_of_it_and_put_back() -> None:
    class Drawing(Loop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0 * torch.rand(())

    torch.manual_seed(0)
    drawing = rt.Step(Drawing(), torch.randn(512, 64))
    before = torch.get_rng_state()
    names = differences(left_by(drawing), left_by(step()))
    assert "generator of torch" in names
    assert "generator of Python" not in names
    assert torch.equal(before, torch.get_rng_state())


def test_digests_tell_values_apart() -> None:
    values = [
        1, 1.0, True, "1", None, [1], (1,), [1, 1], {"a": 1}, {"a": 2}, torch.tensor(1), torch.tensor(1.0),
        torch.tensor([1.0]), torch.tensor([[1.0]]), torch.tensor([]), torch.tensor(-0.0), torch.tensor(0.0), float("nan"),
    ]  # fmt: skip
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.tensor([1, 2])) == digest(torch.tensor([1, 2]))


# -- torch's own planner ------------------------------------------------------------------------------------------


def test_without_its_libraries_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sac, "find_spec", lambda name: None)
    assert torch_sac.sac_settings("gpt", "small", blocks()) == "it needs pulp and pwlf, not installed here"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise AssertionError('of its own')", "AssertionError: of its own"),
        ("import os; os.abort()", "its process ended with code -6"),
    ],
)
def test_what_it_stumbles_over_is_its_result(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{script}"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(torch_sac, "find_spec", lambda name: object())
    monkeypatch.setattr(torch_sac.sys, "executable", str(fake))  # type: ignore[attr-defined]
    assert torch_sac.sac_settings("gpt", "small", blocks()) == said


def test_what_it_decides_becomes_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = [{"label": "1 blocks, 50%", "work_seconds": 0.5, "saved": {"units.0": [["t"], [1]]}}]
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho noise\necho '{json.dumps(decided)}'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(torch_sac, "find_spec", lambda name: object())
    monkeypatch.setattr(torch_sac.sys, "executable", str(fake))  # type: ignore[attr-defined]
    found = torch_sac.sac_settings("gpt", "small", blocks())
    assert [(one.label, one.work_seconds) for one in found] == [("1 blocks, 50%", 0.5)]  # type: ignore[union-attr]


@pytest.mark.slow
def test_its_own_decisions() -> None:
    found = torch_sac.sac_settings("gpt", "small", survey(ZOO["gpt"].make(), ("blocks.*",)))
    assert not isinstance(found, str)
    assert len(found) > 2
    one = ZOO["gpt"].make()
    found[-1].install(one.model)
    assert differences(left_by(one), left_by(ZOO["gpt"].make())) == []


def test_its_decisions_are_carried_out() -> None:
    """Decisions by hand: what is saved is not run again, a product for each of six blocks."""
    from torch.utils.flop_counter import FlopCounterMode

    def work(decisions: list[int]) -> int:
        one = step()
        names = ["t", "addmm", "tanh", "mul", "sin"]
        torch_sac.install({f"units.{i}": (names, decisions) for i in range(6)}, one.model)
        expected = left_by(step())
        assert differences(left_by(one), expected) == []
        with FlopCounterMode(display=False) as counter:
            one()
        return int(counter.get_total_flops())

    product = 2 * 512 * 64 * 64
    assert work([0, 0, 0, 0, 0]) - work([0, 1, 0, 0, 0]) == 6 * product


def test_operations_that_it_did_not_see_are_refused() -> None:
    one = step()
    torch_sac.install({"units.0": (["t", "relu"], [0, 0])}, one.model)
    with pytest.raises(UsageError, match=r"block units\.0 runs addmm where torch's estimator saw another operation"):
        one()


# -- the comparison -----------------------------------------------------------------------------------------------


def test_the_seven_workloads() -> None:
    assert len(WORKLOADS) == 7
    assert set(WORKLOADS) <= set(ZOO)


def test_turns() -> None:
    order: list[int] = []
    steps = [step() for _ in range(3)]
    for number, one in enumerate(steps):
        one.loss = lambda model, batch, number=number: (order.append(number), model(batch))[1]
    times = in_turns(steps, 3)
    assert [len(row) for row in times] == [3, 3, 3]
    assert min(itertools.chain(*times)) > 0
    assert len(order) == 3 * (3 + 2)
    rounds = [order[i : i + 3] for i in range(0, 15, 3)]
    assert all(sorted(one) == [0, 1, 2] for one in rounds)
    assert len({one[0] for one in rounds}) == 3
    assert all(parameter.grad is None for one in steps for parameter in one.model.parameters())


@pytest.fixture(scope="module")
def part() -> dict[str, Any]:
    """A model with state at two budgets, one of which nothing fits."""
    said: list[str] = []
    found = Comparison(ZOO["moe"], "small", 2, said.append).run(("50%", "1 MiB"))
    assert "moe: profiling" in said
    return found


@pytest.mark.slow
def test_rows(part: dict[str, Any]) -> None:
    rows = part["rows"]
    assert [row["method"] for row in rows[: len(rows) // 2]] == [
        OURS,
        *METHODS,
        *(["torch sac_ilp"] * (not part["not_run"])),
    ]
    ours, below = (row for row in rows if row["method"] == OURS)
    assert ours["feasible"]
    assert ours["identical"]
    assert ours["measured_peak_bytes"] <= ours["budget_bytes"] < part["eager_peak_bytes"]
    assert ours["unused_ratio"] == 1 - ours["measured_peak_bytes"] / ours["budget_bytes"]
    assert not below["feasible"]
    assert below["budget_bytes"] == 2**20
    assert 2**20 < below["measured_peak_bytes"] <= below["floor_bytes"] == below["predicted_peak_bytes"]
    assert below["unused_ratio"] is None
    for row in rows:
        assert (row["failed"] != "") == (row["measured_peak_bytes"] is None) == (row["step_ratio"] is None)
        if row["feasible"]:
            assert row["measured_peak_bytes"] <= row["budget_bytes"]


@pytest.mark.slow
def test_torchs_checkpoint_is_marked_where_it_is_not_exact(part: dict[str, Any]) -> None:
    whole = [row for row in part["rows"] if row["method"] == EVERY_BLOCK]
    assert all(row["identical"] is False for row in whole)
    assert all("." in name for name in whole[0]["differing"])
    assert 0 < len(whole[0]["differing"]) <= 3


@pytest.mark.slow
def test_defects(part: dict[str, Any]) -> None:
    assert defects(part["rows"]) == []
    ours = dict(part["rows"][0])
    assert "peaks at" in defects([ours | {"measured_peak_bytes": ours["budget_bytes"] + 1}])[0]
    assert "leaves another loss" in defects([ours | {"identical": False, "differing": ["loss"]}])[0]
    refused = ours | {"feasible": False, "floor_bytes": ours["measured_peak_bytes"]}
    exact = part["rows"][1] | {"feasible": True, "identical": True}
    assert defects([refused, exact]) == [f"moe at 50%: refused, and {FIRST_K} meets it"]
    assert defects([refused, exact | {"identical": False}]) == []


@pytest.mark.slow
def test_standings(part: dict[str, Any]) -> None:
    ours = part["rows"][0] | {"step_ratio": 1.2, "spread_ratio": 0.02}
    quick = part["rows"][1] | {"feasible": True, "identical": False, "step_ratio": 1.0, "spread_ratio": 0.04}
    exact = part["rows"][2] | {"feasible": True, "identical": True, "step_ratio": 1.5, "spread_ratio": 0.0}
    first, second = standings([ours, quick, exact])
    assert (first["exact"], first["relative_ratio"], first["noise_ratio"]) == (True, 1.2 / 1.5, 0.01)
    assert (second["exact"], second["relative_ratio"], second["noise_ratio"]) == (False, 1.2, 0.03)
    assert standings([ours])[0]["baseline"] is None


@pytest.mark.slow
def test_a_run_is_taken_up_again(part: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Counted:
        def __init__(self, entry: Any, size: str, rounds: int, say: Any) -> None:
            self.name = entry.name

        def run(self, budgets: Any) -> dict[str, Any]:
            made.append(self.name)
            if len(made) == 2:
                raise KeyboardInterrupt
            return part | {"name": self.name}

    monkeypatch.setattr(runs, "Comparison", Counted)
    words = ["--workloads", "gpt", "unet", "--size", "small", "--rounds", "2", "--out", str(tmp_path / "out")]
    words += ["--parts", str(tmp_path / "parts"), "--budgets", "50%", "1 MiB"]
    with pytest.raises(KeyboardInterrupt):
        runs.main(words)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["small_gpt.json"]
    assert runs.main(words) == 0
    assert made == ["gpt", "unet", "unet"]  # the first one was not measured again
    assert list((tmp_path / "parts").iterdir()) == []
    (written,) = (tmp_path / "out").iterdir()
    assert written.name.startswith("side-by-side_cpu-")
    read = json.loads(written.read_text())
    assert [one["name"] for one in read["workloads"]] == ["gpt", "unet"]
    assert read["defects"] == []
    assert read["machine"]["threads"] == 1


def test_a_part_of_other_code_or_settings_is_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "part.json"
    assert runs.read_part(file, {"code": "a"}) is None
    runs.write_part(file, {"code": "a"}, {"name": "gpt"})
    assert runs.read_part(file, {"code": "a"}) == {"name": "gpt"}
    assert runs.read_part(file, {"code": "b"}) is None


@pytest.mark.slow
def test_the_tables_can_be_shown(part: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(width=140, record=True)
    console.print(runs.table_of(part))
    console.print(runs.standings_of(part))
    text = console.export_text()
    for words in (OURS, FIRST_K, "floor", "fits", "ours over the fastest baseline"):
        assert words in text
