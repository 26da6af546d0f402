"""Runs field cases (``regrad verify field``): ``python -m regrad.torch.field_runner FOLDER``; a line of JSON a case.

Every case runs under every mode in a process of its own, forked from one that has only imported torch. Results are
compared with the eager run's bit for bit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed
import torch.utils.checkpoint

import regrad.torch as rt

SECONDS = 120
LEARNING_RATE = 0.1
MODES: dict[str, Callable[..., Any]] = {
    "eager": lambda f, *a, **k: f(*a, **k),
    "torch non-reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "torch reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "regrad": rt.checkpoint,
    "planted": lambda f, *a, **k: (f(*a, **k), f(*a, **k))[1],
}
# Kinds of cases whose regions hold state, so that running a region twice must be seen.
PLANTED_KINDS = ("norm-stats", "moe", "fp8", "memory-bank")


def load(path: Path) -> Any:
    """The case in ``path`` as a module."""
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def counted(checkpoint: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """``checkpoint``, and a counter of how often the bodies of regions run. The bodies themselves are not touched."""
    codes: set[Any] = set()
    count = [0]

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            count[0] += 1

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        inner = function
        while hasattr(inner, "func"):
            inner = inner.func
        if isinstance(inner, torch.nn.Module):
            inner = type(inner).forward
        codes.add(getattr(getattr(inner, "__func__", inner), "__code__", None))
        return checkpoint(function, *args, **kwargs)

    threading.setprofile(watch)
    sys.setprofile(watch)
    return call, count


def freeze(value: Any) -> Any:
    """A picklable value whose ``==`` is equality of bits."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        flat = dense.cpu().contiguous().reshape(-1)
        return ("tensor", str(dense.dtype), tuple(dense.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return ("dict", tuple((str(k), freeze(v)) for k, v in sorted(value.items(), key=lambda item: str(item[0]))))
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return ("list", tuple(map(freeze, value)))
    return ("float", value.hex()) if isinstance(value, float) else ("plain", repr(value))


def ambient() -> Iterator[tuple[str, Any]]:
    """Generators and modes of the process."""
    yield "torch's generator", torch.get_rng_state()
    yield "NumPy's generator", hashlib.sha1(pickle.dumps(np.random.get_state())).hexdigest()
    yield "Python's generator", hashlib.sha1(pickle.dumps(random.getstate())).hexdigest()
    yield "grad mode", torch.is_grad_enabled()
    yield "autocast", torch.is_autocast_enabled("cpu")
    yield "default dtype", torch.get_default_dtype()


def measure(path: Path, mode: str) -> dict[str, Any]:
    """Run one case under one mode and return everything that must be as in eager."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    case = load(path)
    torch.manual_seed(1234)
    np.random.seed(1234)
    random.seed(1234)
    world = case.build()
    checkpoint, count = counted(MODES[mode])

    def tensors(group: str) -> dict[str, torch.Tensor]:
        found = world.get(group)
        return found() if callable(found) else (found or {})

    out: dict[str, Any] = {}
    for step in range(case.META.get("steps", 2)):
        for tensor in (*tensors("params").values(), *tensors("inputs").values()):
            tensor.grad = None
        loss = case.step(world, checkpoint, step)
        if loss is not None:
            out[f"loss {step}"] = freeze(loss)
        for group in ("params", "inputs"):
            for name, tensor in tensors(group).items():
                out[f"gradient {name} {step}"] = freeze(tensor.grad)
        if case.META.get("sgd", True):
            with torch.no_grad():
                for tensor in tensors("params").values():
                    if tensor.grad is not None and tensor.is_floating_point():
                        tensor.sub_(LEARNING_RATE * tensor.grad)
    out.update({f"parameter {name}": freeze(tensor) for name, tensor in tensors("params").items()})
    if case.META.get("ambient", True):
        out.update({name: freeze(value) for name, value in ambient()})
    for name, value in case.observe(world).items():
        out[name if name.startswith("_") else f"state {name}"] = value if name.startswith("_") else freeze(value)
    sys.setprofile(None)
    out["_calls"] = count[0]
    return out


def in_child(path: Path, mode: str) -> tuple[str, Any]:
    """:func:`measure` in a process of its own: ("ok", what it returned) or ("raises", text)."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(False)

    def child() -> None:
        try:
            theirs.send(("ok", measure(path, mode)))
        except BaseException as error:  # noqa: BLE001 - whatever a case raises is its verdict
            theirs.send(("raises", f"{type(error).__name__}: {error}"[:2000]))
        theirs.close()
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    theirs.close()
    answer: tuple[str, Any] = ("raises", f"TimeoutError: more than {SECONDS} s")
    if ours.poll(SECONDS):
        try:
            answer = ours.recv()
        except EOFError:
            answer = ("raises", "the process died")
    else:
        process.kill()
    process.join()
    return answer


def judge(case: Any, eager: dict[str, Any], answer: tuple[str, Any]) -> dict[str, Any]:
    """The verdict on one mode: exact, silent, bound or raises; whether it passes; whether bodies ran again."""
    status, got = answer
    if status == "raises":
        words = case.META.get("refuse_mentions", [])
        passes = "refuse" in case.META.get("accept", []) and any(word.lower() in got.lower() for word in words)
        return {"verdict": "raises", "passes": passes, "recomputed": False, "why": re.sub(r"\s+", " ", got)[:300]}
    wrong = [key for key in sorted(set(eager) | set(got)) if key[0] != "_" and eager.get(key) != got.get(key)]
    broken = list(case.check(eager, got)) if hasattr(case, "check") else []
    verdict = "silent" if wrong else "bound" if broken else "exact"
    recomputed = got["_calls"] > eager["_calls"]
    return {
        "verdict": verdict,
        "passes": verdict == "exact",
        "recomputed": recomputed,
        "why": "; ".join([*wrong[:4], *broken]),
    }


def main() -> int:
    """Run every case in the folder that the command line names."""
    for path in sorted(Path(sys.argv[1]).glob("[0-9][0-9]_*.py")):
        case = load(path)
        line: dict[str, Any] = {"case": path.stem, "kind": case.META["kind"], "modes": {}}
        status, eager = in_child(path, "eager")
        if status == "raises":
            line["broken"] = eager
        else:
            for mode in ("torch non-reentrant", "torch reentrant", "regrad"):
                line["modes"][mode] = judge(case, eager, in_child(path, mode))
            if line["kind"] in PLANTED_KINDS:
                line["caught"] = judge(case, eager, in_child(path, "planted"))["verdict"] != "exact"
        print(json.dumps(line), flush=True)  # noqa: T201 - the parent reads it
    return 0


if __name__ == "__main__":
    sys.exit(main())
