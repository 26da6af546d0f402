"""One training run in a process of its own under RLIMIT_DATA; started by :mod:`regrad.demo.limits`.

Reads an Order as JSON from standard input. Exit code 0: all steps trained; 77: out of memory; 1: anything else. What
happened stands in ``report.json`` in the order's folder, the limit in ``limit.json``.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import regrad.torch as rt
from regrad.demo.board import Board
from regrad.demo.limits import OUT_OF_MEMORY_EXIT, Order, give_back_memory
from regrad.demo.subject import Subject
from regrad.demo.train import Run
from regrad.torch.ledger import storage_bytes
from regrad.torch.step import Step

_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")


def main() -> int:
    """Do what the order on standard input says; returns the exit code."""
    faulthandler.enable()
    order = read_order(sys.stdin.read())
    folder = Path(order.folder)
    torch.set_num_threads(order.threads)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    report: dict[str, Any]
    batches = order.subject.batches()
    run = Run("child", order.subject.step(*batches[0]))
    run_fake_step(order.subject)
    with Board(folder).follow(run.step.model) as board:
        limit(order.target_bytes, run.step, folder)
        try:
            train(order, run, batches, board)
            code, report = 0, {"last_line": ""}  # what libraries wrote to standard error is no last word
        except Exception as error:  # noqa: BLE001 - whatever ended the run is what the child has to report
            lift_limit()  # telling what happened needs some memory too
            code = OUT_OF_MEMORY_EXIT if is_out_of_memory(error) else 1
            report = describe(error)
        lift_limit()
        report |= {"phase": board.phase, "module": board.module, "losses": run.losses}
    (folder / "report.json").write_text(json.dumps(report))
    return code


def read_order(text: str) -> Order:
    """The order in ``text``."""
    fields: dict[str, Any] = json.loads(text)
    return Order(**(fields | {"subject": Subject(**fields["subject"])}))


def run_fake_step(subject: Subject) -> None:
    """Run one step of a model without bytes, so that what torch loads on first use is loaded."""
    with FakeTensorMode():
        step = subject.fake_step()
        step()


def limit(target_bytes: int, step: Step, folder: Path) -> None:
    """Set RLIMIT_DATA so that live tensors may come to ``target_bytes``, and write down how it was made up."""
    give_back_memory()
    before, existing = data_bytes(), storage_bytes(step)
    allowance = target_bytes - existing
    resource.setrlimit(resource.RLIMIT_DATA, (before + allowance, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    report = {
        "before_bytes": before,
        "existing_bytes": existing,
        "allowance_bytes": allowance,
        "limit_bytes": before + allowance,
    }
    (folder / "limit.json").write_text(json.dumps(report))


def lift_limit() -> None:
    """Let the process have memory again."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def data_bytes() -> int:
    """VmData of this process: its private writable memory, which RLIMIT_DATA bounds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData")


def train(order: Order, run: Run, batches: Any, board: Board) -> None:
    """Plan, if the order says so, and train; all of it under the limit."""
    if order.planned:
        board.say("planning")
        rt.apply(run.step.model, rt.plan(run.step, budget=order.budget))
    optimizer = run.step.optimizer
    if optimizer is not None:
        optimizer.register_step_pre_hook(lambda *_: board.say("optimizer"))
    for index in range(order.steps):
        board.say("forward")
        run.advance(batches[index])
    board.say("done")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory was refused: Python's, torch's and the C++ library's ways of saying it."""
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in _OUT_OF_MEMORY_TEXTS)


def describe(error: BaseException) -> dict[str, Any]:
    """Last line of the traceback, and the last frame outside torch."""
    frames = traceback.extract_tb(error.__traceback__)
    torch_folder = str(Path(torch.__file__).parent)
    own = [frame for frame in frames if not frame.filename.startswith(torch_folder)] or list(frames)
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return {"where": where, "last_line": lines[-1] if lines else type(error).__name__}


if __name__ == "__main__":
    sys.exit(main())
