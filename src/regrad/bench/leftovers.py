"""What a step leaves behind, byte by byte, so that two ways to run it can be held against each other."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

import regrad.torch as rt

STEPS = 2
"""Statistics that only the forward writes show in the second step's gradients, not in the first's."""
_SEED = 1


def left_by(step: rt.Step, steps: int = STEPS) -> dict[str, str]:
    """Digests, by name, of what ``steps`` steps from fixed seeds leave: losses, gradients, weights, buffers, every
    attribute of every module, and the generators of torch, Python and numpy. The process's generators are put back.

    Danger: an attribute that is neither a tensor, a number, a string nor a container of those counts by its class alone.
    """
    found: dict[str, Any] = {}
    with _seeded():
        for number in range(steps):
            found[f"loss of step {number}"] = step()
        found["generator of torch"] = torch.get_rng_state()
        found["generator of Python"] = random.getstate()
        found["generator of numpy"] = numpy.random.get_state(legacy=False)
    for name, parameter in step.model.named_parameters():
        found[f"parameter {name}"], found[f"gradient {name}"] = parameter, parameter.grad
    found |= {f"buffer {name}": buffer for name, buffer in step.model.named_buffers()}
    for path, module in step.model.named_modules():
        own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "forward"}
        found |= {f"attribute {path}.{name}": value for name, value in own.items()}
    return {name: digest(value) for name, value in found.items()}


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """The names whose digests differ, or that only one of the two has, in order."""
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))


@contextmanager
def _seeded() -> Iterator[None]:
    python, numbers = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        numpy.random.seed(_SEED)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(numbers)


def digest(value: Any) -> str:
    """Equal for values of equal types, shapes and bytes."""
    state = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        state.update(part)
    return state.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous().reshape(-1)
        yield f"tensor {value.dtype} {tuple(value.shape)} ".encode()
        yield plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    elif isinstance(value, numpy.ndarray):
        yield f"array {value.dtype} {value.shape} ".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield f"key {key!r} ".encode()
            yield from _parts(part)
    elif isinstance(value, (list, tuple)) and not isinstance(value, nn.Module):
        yield f"{type(value).__name__} of {len(value)} ".encode()
        for part in value:
            yield from _parts(part)
    elif isinstance(value, (int, float, complex, str, bytes, type(None))):
        yield f"{type(value).__name__} {value!r} ".encode()
    else:
        yield type(value).__qualname__.encode()
