"""The proof under a real limit: three children of this process train under RLIMIT_DATA, which the kernel enforces.

Each child imports everything, builds the model and the optimizer, runs one fake step so that lazily loaded code is in,
and reads its own VmData. Its limit is that plus an allowance, the ``target`` of the child less what of it is there by
then (weights and batch; the optimizer's state comes with the first step):

    eager and planned   target = midway between the measured peaks of the eager and the planned step
    control (eager)     target = the measured peak of the eager step and half their distance on top

So whatever a process needs besides tensors (interpreter, kernels' scratch, planning itself), half the distance is there
for it in the planned child and in the control alike, and the eager child has to run over by as much.

glibc would blur this: by default it raises its own threshold for mapping large blocks, after which freed memory stays
with the process. The thresholds are fixed here, so that a freed tensor is gone from VmData; one arena for all threads.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import regrad
from regrad.demo.board import read_board
from regrad.demo.result import COMPLETED, OUT_OF_MEMORY, Child, Limits
from regrad.demo.subject import Subject

OUT_OF_MEMORY_EXIT = 77
TIMEOUT_SECONDS = 600
KIND = "RLIMIT_DATA"
_THRESHOLD_BYTES = 128 * 1024
_PACKAGES = str(Path(regrad.__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Proof:
    """What is to be proved: peaks in bytes as measured in this process, and its eager losses to compare with."""

    subject: Subject
    budget: str
    steps: int
    eager_peak_bytes: int
    plan_peak_bytes: int
    eager_losses: tuple[float, ...]

    @property
    def half_distance_bytes(self) -> int:
        """Half of what the plan saves at the peak."""
        return (self.eager_peak_bytes - self.plan_peak_bytes) // 2


@dataclass(frozen=True, slots=True)
class Order:
    """What one child is told to do, as JSON on its standard input. ``folder`` takes its report and its board."""

    subject: Subject
    planned: bool
    budget: str
    steps: int
    target_bytes: int
    threads: int
    folder: str


def why_unavailable() -> str:
    """Why this system cannot run the proof; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"RLIMIT_DATA bounds the memory of a process on Linux only, this is {sys.platform}"
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release < (4, 7):
        return f"RLIMIT_DATA counts private mappings from Linux 4.7 on, this is {os.uname().release}"
    return ""


def prove(proof: Proof, progress: Callable[[float], None]) -> Limits:
    """Run the three children one after the other. Takes about a minute; never raises for what a child does."""
    unavailable = why_unavailable()
    if unavailable:
        return Limits(KIND, unavailable, proof.steps, ())
    give_back_memory()
    midway = proof.plan_peak_bytes + proof.half_distance_bytes
    over = proof.eager_peak_bytes + proof.half_distance_bytes
    wanted = (
        ("eager under the limit", False, midway),
        ("planned under the limit", True, midway),
        ("eager over the limit", False, over),
    )
    children = []
    for index, (name, planned, target_bytes) in enumerate(wanted):
        progress(index / len(wanted))
        children.append(_run_child(name, planned, target_bytes, proof))
    progress(1.0)
    return Limits(KIND, "", proof.steps, tuple(children))


def give_back_memory() -> None:
    """Give the system what this process has freed and malloc still holds (glibc; elsewhere only Python's garbage)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _run_child(name: str, planned: bool, target_bytes: int, proof: Proof) -> Child:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="regrad-demo-") as folder:
        order = Order(proof.subject, planned, proof.budget, proof.steps, target_bytes, torch.get_num_threads(), folder)
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "regrad.demo.child"],
                input=json.dumps(asdict(order)),
                env=_environment(order.threads),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
            exit_code, stderr = ended.returncode, ended.stderr
        except subprocess.TimeoutExpired:
            exit_code, stderr = -signal.SIGKILL, f"killed after {TIMEOUT_SECONDS} s"
        report = _read_report(Path(folder), stderr)
    losses = tuple(report["losses"])
    return Child(
        name=name,
        target_bytes=target_bytes,
        before_bytes=report["before_bytes"],
        existing_bytes=report["existing_bytes"],
        allowance_bytes=report["allowance_bytes"],
        limit_bytes=report["limit_bytes"],
        exit_code=exit_code,
        verdict=verdict(exit_code, report["last_line"], len(losses), proof.steps),
        steps_completed=len(losses),
        phase=report["phase"],
        module=report["module"],
        where=report["where"],
        last_line=report["last_line"],
        losses=losses,
        losses_identical=losses == proof.eager_losses[: len(losses)] if losses else None,
        seconds=time.monotonic() - began,
    )


def verdict(exit_code: int, last_line: str, completed: int, wanted: int) -> str:
    """What became of a child, in words. A child that a signal killed is not said to be out of memory."""
    if exit_code == OUT_OF_MEMORY_EXIT:
        return OUT_OF_MEMORY
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    if exit_code == 0:
        return COMPLETED if completed == wanted else f"failed: it ended after {completed} of {wanted} steps"
    return f"failed: {last_line or f'exit code {exit_code}'}"


def _read_report(folder: Path, stderr: str) -> dict[str, Any]:
    """The child's report; where it could not write one, what its board and its standard error say."""
    phase, module = read_board(folder)
    lines = [line for line in stderr.splitlines() if line.strip()]
    report: dict[str, Any] = {
        "before_bytes": 0, "existing_bytes": 0, "allowance_bytes": 0, "limit_bytes": 0,
        "phase": phase, "module": module, "where": "", "last_line": lines[-1] if lines else "", "losses": [],
    }  # fmt: skip
    for part in ("limit.json", "report.json"):
        if (folder / part).exists():
            report |= json.loads((folder / part).read_text())
    return report


def _environment(threads: int) -> dict[str, str]:
    """The parent's environment with malloc's thresholds, the threads and the way to this package fixed."""
    tunables = [
        os.environ.get("GLIBC_TUNABLES", ""),
        f"glibc.malloc.mmap_threshold={_THRESHOLD_BYTES}",
        f"glibc.malloc.trim_threshold={_THRESHOLD_BYTES}",
        "glibc.malloc.mmap_max=1000000",
        "glibc.malloc.arena_max=1",
    ]
    paths = [_PACKAGES, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "GLIBC_TUNABLES": ":".join(part for part in tunables if part),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
