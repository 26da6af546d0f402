"""Generators of random numbers: how to read and set each kind that a call can draw from."""

from __future__ import annotations

import ctypes
import random
import sys
import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch

from regrad.torch.regions.kept import Kept


class Source(ABC):
    """One generator. ``name`` is for messages."""

    name = "generator"

    @abstractmethod
    def get(self) -> Any:
        """Its state, comparable by :meth:`same`."""

    @abstractmethod
    def set(self, state: Any) -> None:
        """Put it there."""

    def same(self, one: Any, other: Any) -> bool:
        """Whether two states are the same."""
        return bool(one == other)

    def bring(self, state: Any) -> None:
        """Put it there unless it is there."""
        self.set(state)

    def size(self, state: Any) -> int:
        """Bytes that a state holds."""
        return 5056


class TorchCpu(Source):
    name = "torch's generator"

    def get(self) -> Any:
        return torch.get_rng_state()

    def set(self, state: Any) -> None:
        torch.set_rng_state(state)

    def same(self, one: Any, other: Any) -> bool:
        return bool(torch.equal(one, other))


class TorchCuda(Source):
    name = "torch's CUDA generators"

    def get(self) -> Any:
        return torch.cuda.get_rng_state_all()

    def set(self, state: Any) -> None:
        torch.cuda.set_rng_state_all(state)

    def same(self, one: Any, other: Any) -> bool:
        return len(one) == len(other) and all(map(torch.equal, one, other))

    def size(self, state: Any) -> int:
        return sum(one.nbytes for one in state)


class Python(Source):
    """Python's global generator. Its words are read straight from memory where they are found to lie as expected."""

    name = "Python's random generator"

    def __init__(self) -> None:
        self._view: Any = None
        self._inst: Any = None
        inst = getattr(random, "_inst", None)
        if type(inst) is random.Random and sys.implementation.name == "cpython":
            view = memoryview((ctypes.c_ubyte * 2500).from_address(id(inst) + object.__basicsize__)).cast("B")
            _, words, _ = random.getstate()
            expected = words[-1].to_bytes(4, sys.byteorder) + b"".join(w.to_bytes(4, sys.byteorder) for w in words[:-1])
            if bytes(view) == expected:
                self._view, self._inst = view, inst

    def get(self) -> Any:
        if self._view is None:
            return random.getstate()
        return bytes(self._view), self._inst.gauss_next

    def set(self, state: Any) -> None:
        if self._view is None:
            random.setstate(state)
        else:
            self._view[:], self._inst.gauss_next = state

    def size(self, state: Any) -> int:
        return 2500 if self._view is not None else 5056


class Numpy(Source):
    name = "NumPy's random generator"

    def get(self) -> Any:
        kind, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        return (kind, keys.tobytes(), position, has_gauss, gauss)

    def set(self, state: Any) -> None:
        numpy = sys.modules["numpy"]
        keys = numpy.frombuffer(state[1], dtype=numpy.uint32)
        numpy.random.set_state((state[0], keys, *state[2:]))


class TorchObject(Source):
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.name = f"a torch.Generator on {generator.device}"

    def get(self) -> Any:
        return self.generator.get_state()

    def set(self, state: Any) -> None:
        self.generator.set_state(state)

    def same(self, one: Any, other: Any) -> bool:
        return bool(torch.equal(one, other))


class PythonObject(Source):
    name = "a random.Random"

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator

    def get(self) -> Any:
        return random.Random.getstate(self.generator)

    def set(self, state: Any) -> None:
        random.Random.setstate(self.generator, state)


class NumpyObject(Source):
    """``numpy.random.Generator``, ``RandomState`` or a bit generator."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.name = f"a numpy.random.{type(generator).__name__}"
        self._legacy = hasattr(generator, "get_state")
        self._bits = generator if self._legacy else getattr(generator, "bit_generator", generator)

    def get(self) -> Any:
        if self._legacy:
            return _frozen(self.generator.get_state(legacy=False))
        return _frozen(self._bits.state)

    def set(self, state: Any) -> None:
        if self._legacy:
            self.generator.set_state(_thawed(state))
        else:
            self._bits.state = _thawed(state)


def _frozen(state: Any) -> Any:
    """Nested dicts of numbers and arrays, comparable by ``==``."""
    if isinstance(state, dict):
        return {key: _frozen(value) for key, value in state.items()}
    return (str(state.dtype), state.tobytes()) if hasattr(state, "tobytes") and hasattr(state, "dtype") else state


def _thawed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _thawed(value) for key, value in state.items()}
    if isinstance(state, tuple):
        numpy = sys.modules["numpy"]
        return numpy.frombuffer(state[1], dtype=state[0]).copy()
    return state


def source_of(generator: Any) -> Source:
    """The :class:`Source` for a generator object."""
    if isinstance(generator, torch.Generator):
        return TorchObject(generator)
    if isinstance(generator, random.Random):
        return PythonObject(generator)
    return NumpyObject(generator)


CPU, CUDA, PYTHON, NUMPY = TorchCpu(), TorchCuda(), Python(), Numpy()
_LAST_REFS: dict[int, weakref.ref[Kept]] = {}


def take(source: Source) -> Kept:
    """The state of one of the process's own generators; calls in a row that draw nothing share one copy."""
    state = source.get()
    last = _LAST_REFS.get(id(source))
    kept = None if last is None else last()
    if kept is not None and source.same(kept.data, state):
        return kept
    kept = Kept(state, source.size(state))
    _LAST_REFS[id(source)] = weakref.ref(kept)
    return kept


class NumpyPeek:
    """The raw words of NumPy's global generator: a sign of a draw that costs nothing to look at."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._view: Any = None

    def look(self) -> bytes | None:
        """The words, or ``None`` while NumPy is not loaded or has another bit generator."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        bits = numpy.random.mtrand._rand._bit_generator
        if bits is not self._owner:
            self._owner, self._view = bits, None
            if type(bits).__name__ == "MT19937":
                words = (ctypes.c_ubyte * 2500).from_address(bits.ctypes.state_address)
                self._view = memoryview(words).cast("B")
        return None if self._view is None else bytes(self._view)
