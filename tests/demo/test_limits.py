"""What is said of a child is what happened to it: no verdict is assumed."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from regrad.demo import child, limits
from regrad.demo.board import Board, read_board
from regrad.demo.result import COMPLETED, Limits
from regrad.demo.subject import Subject

TINY = Subject(layers=2, width=32, heads=2, sequence=32, batch_size=2, corpus_bytes=20_000)
linux = pytest.mark.skipif(bool(limits.why_unavailable()), reason=limits.why_unavailable())


@pytest.mark.parametrize(
    ("exit_code", "last_line", "completed", "verdict"),
    [
        (0, "", 5, "completed"),
        (0, "", 4, "failed: it ended after 4 of 5 steps"),
        (77, "RuntimeError: can't allocate memory", 1, "out of memory"),
        (-9, "", 1, "killed by SIGKILL"),
        (-11, "Segmentation fault", 1, "killed by SIGSEGV"),
        (1, "ValueError: no", 0, "failed: ValueError: no"),
        (3, "", 0, "failed: exit code 3"),
    ],
)
def test_verdicts(exit_code: int, last_line: str, completed: int, verdict: str) -> None:
    assert limits.verdict(exit_code, last_line, completed, 5) == verdict


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 8 bytes"), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("memory of a goldfish"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, wanted: bool) -> None:
    assert child.is_out_of_memory(error) is wanted


def test_where_the_limit_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.sys, "platform", "darwin")
    proof = limits.Proof(TINY, "50%", 5, 200, 100, ())
    found = limits.prove(proof, lambda done: None)
    assert found.children == ()
    assert "darwin" in found.unavailable
    assert found.verdict(0).startswith("not run: RLIMIT_DATA")


def test_targets_lie_symmetrically(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool, int]] = []
    monkeypatch.setattr(limits, "why_unavailable", lambda: "")
    monkeypatch.setattr(limits, "_run_child", lambda name, planned, target, proof: seen.append((name, planned, target)))
    limits.prove(limits.Proof(TINY, "50%", 5, 1000, 600, ()), lambda done: None)
    assert [(planned, target) for _, planned, target in seen] == [(False, 800), (True, 800), (False, 1200)]


@linux
def test_a_child_that_a_signal_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order names a class that kills its process; the parent says so, and where it was."""
    program = (
        "import json, os, signal, sys; from pathlib import Path; from regrad.demo.board import Board\n"
        "board = Board(Path(json.load(sys.stdin)['folder'])); board.say('backward', 'blocks.1')\n"
        "print('last words', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run

    def instead(command: list[str], **settings: object) -> object:
        return run([sys.executable, "-c", program], **settings)  # type: ignore[call-overload]

    monkeypatch.setattr(limits.subprocess, "run", instead)
    found = limits._run_child("x", False, 10**12, limits.Proof(TINY, "50%", 5, 200, 100, ()))
    assert found.exit_code == -signal.SIGKILL
    assert found.verdict == "killed by SIGKILL"
    assert (found.phase, found.module, found.last_line) == ("backward", "blocks.1", "last words")
    assert found.losses_identical is None


@linux
@pytest.mark.parametrize(
    ("order", "verdict"),
    [
        ({}, COMPLETED),
        ({"budget": "8 parsecs", "planned": True}, "failed: regrad.core.errors.InvalidQuantity"),
    ],
)
def test_a_child_by_itself(tmp_path: Path, order: dict[str, object], verdict: str) -> None:
    made = replace(limits.Order(TINY, False, "50%", 2, 10**10, torch.get_num_threads(), str(tmp_path)), **order)
    ended = subprocess.run(
        [sys.executable, "-m", "regrad.demo.child"],
        input=json.dumps(asdict(made)),
        env=limits._environment(made.threads),
        text=True,
        capture_output=True,
        check=False,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert limits.verdict(ended.returncode, report.get("last_line", ""), len(report["losses"]), 2).startswith(verdict)
    figures = json.loads((tmp_path / "limit.json").read_text())
    assert figures["limit_bytes"] == figures["before_bytes"] + 10**10 - figures["existing_bytes"]
    assert report["phase"] == ("planning" if made.planned else "done")


@linux
def test_vmdata_is_what_the_limit_bounds() -> None:
    program = (
        "import resource, sys; from regrad.demo.child import data_bytes, lift_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_DATA)[1]\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (8 << 20), hard))\n"
        "bytearray(4 << 20)\n"
        "try: bytearray(64 << 20)\n"
        "except MemoryError: lift_limit(); bytearray(64 << 20); sys.exit(5)"
    )
    environment = limits._environment(1)
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 5


def test_the_board_follows_a_step(tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []

    class Loud(Board):
        def say(self, phase: str, module: str = "") -> None:
            super().say(phase, module)
            said.append((phase, module))

    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 1)))
    other = nn.Linear(3, 3)
    assert read_board(tmp_path) == ("", "")
    with Loud(tmp_path).follow(model) as board:
        board.say("forward")
        loss = model(other(torch.randn(2, 3))).sum()
        forward, said[:] = [module for _, module in said], []
        loss.backward()
    assert forward == ["", "the model", "0", "the model", "1", "1.0", "1", "1.1", "1", "the model"]
    assert [phase for phase, _ in said] == ["backward"] * 5
    assert [module for _, module in said] == ["1.1", "1", "the model", "1.0", "0"]
    assert read_board(tmp_path) == ("backward", "0")
    model(torch.randn(2, 3))
    assert read_board(tmp_path) == ("backward", "0")


def test_no_children_no_verdicts() -> None:
    assert Limits("RLIMIT_DATA", "no Linux", 5, ()).verdict(2) == "not run: no Linux"
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != 0
