"""Workspace of operations that cannot be measured here and now, from a table of those that were measured before.

An entry says, for one operation with one description of its arguments, how many bytes its kernel held for itself and how
large the storages were that it made. The shipped table is ``workspace_table.json``; :mod:`regrad.torch.calibrate` learns
another one, and a user's own replaces the entries that it has.

What is not in the table is taken from the nearest entry of the same operation, types and ranks. Workspace is mostly
copies of operands in another layout, so the entry's workspace is written as a sum of some of its operands and a rest;
the same operands of the operation in question are summed and the rest is scaled by the bytes of all operands. Rounded up
to 64 bytes.

Error of that rule, in shares of the operation's own bytes, each entry predicted from all others of the shipped table:
see docs/how-to/calibrate.md. An entry that is hit exactly is as good as its measurement.
Not for: devices other than the CPU, other processors (layouts differ with vector widths) and other counts of threads
than those in the file's head: calibrate there.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from regrad.core.errors import UsageError
from regrad.torch.record import Signature, TensorSpec

VARIABLE = "REGRAD_CALIBRATION"
FORMAT = 1
_SHIPPED = Path(__file__).with_name("workspace_table.json")
_STEP_BYTES = 64
_OPERANDS = 6
"""How many operands, the largest first, are tried as parts of a workspace: 2⁶ sums."""
_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64", torch.int64: "i64",
          torch.int32: "i32", torch.uint8: "u8", torch.bool: "b1"}  # fmt: skip
_WIDTHS = {name: dtype.itemsize for dtype, name in _SHORT.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured of one operation. ``arguments`` is :func:`describe` of it; the rest is in bytes."""

    arguments: str
    argument_bytes: int
    workspace_bytes: int
    made_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the table says of an operation. ``made_bytes`` is None where the number of results is not the entry's;
    ``exact`` says that the very operation was measured."""

    workspace_bytes: int
    made_bytes: tuple[int, ...] | None
    exact: bool


@dataclass(frozen=True, slots=True)
class _Tensor:
    kind: str
    shape: tuple[int, ...]
    strides: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _WIDTHS.get(self.kind, 4)


def describe(signature: Signature) -> str:
    """The arguments in one line: tensors as ``f32[8,16]``, with ``@strides`` if they are not contiguous, the rest as it
    prints. Numbers with a fraction (probabilities, epsilons) do not bear on memory and are left out."""
    words = []
    for leaf in signature.leaves:
        if isinstance(leaf, TensorSpec):
            kind = _SHORT.get(leaf.dtype, str(leaf.dtype).removeprefix("torch."))
            shape = ",".join(map(str, leaf.shape))
            words.append(f"{kind}[{shape}]{_strides(leaf)}")
        elif isinstance(leaf, float):
            words.append("~")
        elif leaf is None or isinstance(leaf, bool):
            words.append("-" if leaf is None else "T" if leaf else "F")
        else:
            words.append(repr(leaf).replace(" ", ""))
    return " ".join(words)


def _strides(spec: TensorSpec) -> str:
    dense, expected = True, 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        dense = dense and (size == 1 or stride == expected)
        expected *= size
    return "" if dense else "@" + ",".join(map(str, spec.stride))


@functools.lru_cache(maxsize=8192)
def _parse(arguments: str) -> tuple[_Tensor | str, ...]:
    parsed: list[_Tensor | str] = []
    for word in arguments.split():
        kind, bracket, rest = word.partition("[")
        if not bracket:
            parsed.append(word)
            continue
        shape, _, strides = rest.partition("]")
        parsed.append(_Tensor(kind, tuple(int(size) for size in shape.split(",") if size), strides))
    return tuple(parsed)


def _is_like(one: tuple[_Tensor | str, ...], other: tuple[_Tensor | str, ...]) -> bool:
    """Whether two argument lists have tensors of the same types and ranks in the same places."""
    return len(one) == len(other) and all(
        a.kind == b.kind and len(a.shape) == len(b.shape)
        if isinstance(a, _Tensor) and isinstance(b, _Tensor)
        else isinstance(a, str) and isinstance(b, str)
        for a, b in zip(one, other, strict=True)
    )


def _octaves(one: int, other: int) -> float:
    return abs(math.log2((one + 1) / (other + 1)))


def _evenness(size: int) -> int:
    """The largest power of two up to 16 in ``size``: kernels pad what does not fill their vectors."""
    return min(size & -size, 16) if size else 16


def _distance(one: tuple[_Tensor | str, ...], other: tuple[_Tensor | str, ...]) -> float:
    """How unlike two argument lists are: octaves between sizes, and steps for flags, layouts and padding."""
    far = 0.0
    for a, b in zip(one, other, strict=True):
        if isinstance(a, _Tensor) and isinstance(b, _Tensor):
            far += sum(_octaves(p, q) for p, q in zip(a.shape, b.shape, strict=True))
            if len(a.shape) > 1:
                pairs = zip(a.shape[:2], b.shape[:2], strict=True)
                far += sum(abs(math.log2(_evenness(p) / _evenness(q))) for p, q in pairs)
            far += (a.strides == "") != (b.strides == "")
        elif isinstance(a, str) and isinstance(b, str) and a != b:
            numbers = a.lstrip("-").isdigit() and b.lstrip("-").isdigit()
            far += _octaves(abs(int(a)), abs(int(b))) if numbers else 4.0
    return far


def _result_bytes(signature: Signature) -> list[int]:
    found = [leaf for leaf in pytree.tree_leaves(signature.result) if isinstance(leaf, TensorSpec)]
    return [math.prod(spec.shape) * spec.dtype.itemsize for spec in found]


def _carry_over(entry: Entry, arguments: tuple[_Tensor | str, ...], results: list[int]) -> Estimate:
    """The figures of ``entry`` for other sizes of the same operands."""
    theirs = [item.bytes for item in _parse(entry.arguments) if isinstance(item, _Tensor)]
    mine = [item.bytes for item in arguments if isinstance(item, _Tensor)]
    scale = sum(mine) / max(1, sum(theirs))
    made: tuple[int, ...] | None = None
    if len(results) == len(entry.made_bytes):
        # A result without bytes is one whose size only the kernel knows.
        known = [(old, new) for old, new in zip(entry.made_bytes, results, strict=True) if new]
        theirs, mine = theirs + [old for old, _ in known], mine + [new for _, new in known]
        made = tuple(new or _round(old * scale) for old, new in zip(entry.made_bytes, results, strict=True))
    largest = sorted(range(len(theirs)), key=lambda i: -theirs[i])[:_OPERANDS]
    sums = itertools.product((0, 1), repeat=len(largest))

    def total(taken: tuple[int, ...], sizes: list[int]) -> int:
        return sum(sizes[i] for i, used in zip(largest, taken, strict=True) if used)

    parts = min(sums, key=lambda taken: (abs(entry.workspace_bytes - total(taken, theirs)), sum(taken)))
    rest = entry.workspace_bytes - total(parts, theirs)
    count = total(parts, mine) + rest * sum(mine) / max(1, sum(theirs))
    return Estimate(_round(max(0.0, count)), made, exact=False)


def _round(count: float) -> int:
    return -(-math.ceil(count) // _STEP_BYTES) * _STEP_BYTES


@dataclass(frozen=True)
class WorkspaceTable:
    """Entries by operation, and where they were learned: torch's version, the processor and the number of threads."""

    operations: dict[str, dict[str, Entry]] = field(default_factory=dict)
    torch_version: str = ""
    processor: str = ""
    threads: int = 0

    def find(self, signature: Signature) -> Estimate | None:
        """What is known of an operation; None if nothing is. Cost: a look at every entry of that operation, once."""
        entries = self.operations.get(str(signature.func))
        if not entries or any(isinstance(s, TensorSpec) and s.device.type != "cpu" for s in signature.leaves):
            return None
        arguments = describe(signature)
        exact = entries.get(arguments)
        if exact is not None:
            return Estimate(exact.workspace_bytes, exact.made_bytes, exact=True)
        return self.nearest(str(signature.func), arguments, _result_bytes(signature))

    def nearest(
        self, operation: str, arguments: str, results: list[int], *, leave_out: bool = False
    ) -> Estimate | None:
        """The estimate from the nearest entry. ``leave_out`` ignores an exact one, to see how good the rule is."""
        parsed = _parse(arguments)
        entries = self.operations.get(operation, {}).values()
        like = [entry for entry in entries if _is_like(_parse(entry.arguments), parsed)]
        if leave_out:
            like = [entry for entry in like if entry.arguments != arguments]
        if not like:
            return None
        best = min(like, key=lambda entry: _distance(_parse(entry.arguments), parsed))
        return _carry_over(best, parsed, results)

    def with_entries(self, other: WorkspaceTable) -> WorkspaceTable:
        """This table with the entries of ``other``, which replace its own."""
        names = self.operations.keys() | other.operations.keys()
        both = {name: self.operations.get(name, {}) | other.operations.get(name, {}) for name in sorted(names)}
        return WorkspaceTable(both, other.torch_version, other.processor, other.threads)

    @property
    def entry_count(self) -> int:
        """Entries of all operations."""
        return sum(len(entries) for entries in self.operations.values())

    def to_json(self) -> str:
        """The table as JSON, one entry a line."""
        head = {"format": FORMAT, "torch": self.torch_version, "processor": self.processor, "threads": self.threads}
        lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        lines.append('"columns": ["arguments", "argument_bytes", "workspace_bytes", "made_bytes"],\n"operations": {')
        blocks = []
        for name, entries in self.operations.items():
            rows = [
                json.dumps(
                    [e.arguments, e.argument_bytes, e.workspace_bytes, list(e.made_bytes)], separators=(",", ":")
                )
                for e in entries.values()
            ]
            blocks.append(f"{json.dumps(name)}: [\n" + ",\n".join(rows) + "]")
        return "{" + "\n".join(lines) + "\n" + ",\n".join(blocks) + "}}\n"

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Entry]]) -> WorkspaceTable:
        """A table of what was measured in this process, here and now."""
        operations: dict[str, dict[str, Entry]] = {}
        for name, entry in entries:
            operations.setdefault(name, {})[entry.arguments] = entry
        return cls(dict(sorted(operations.items())), torch.__version__, processor(), torch.get_num_threads())

    @classmethod
    def from_json(cls, text: str) -> WorkspaceTable:
        """Read what :meth:`to_json` wrote. Raises ValueError, saying what is wrong with it."""
        found: Any = json.loads(text)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f'it has no "format": {FORMAT}, so it is no calibration of this version')
        operations: dict[str, dict[str, Entry]] = {}
        try:
            for name, rows in found["operations"].items():
                entries = [Entry(str(a), int(b), int(w), tuple(map(int, made))) for a, b, w, made in rows]
                if any(min(entry.argument_bytes, entry.workspace_bytes, *entry.made_bytes, 0) < 0 for entry in entries):
                    raise ValueError(f"a negative number of bytes under {name}")
                operations[name] = {entry.arguments: entry for entry in entries}
                for entry in entries:
                    _parse(entry.arguments)
            return cls(operations, str(found["torch"]), str(found["processor"]), int(found["threads"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is not laid out as a calibration ({type(error).__name__}: {error})") from None


def processor() -> str:
    """The name of this machine's processor, as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


@functools.cache
def shipped() -> WorkspaceTable:
    """The table that comes with regrad."""
    return WorkspaceTable.from_json(_SHIPPED.read_text(encoding="utf-8"))


def calibration_file() -> Path:
    """Where a user's own table lies: REGRAD_CALIBRATION, else ``regrad/workspace.json`` in the user's cache folder."""
    given = os.environ.get(VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "regrad" / "workspace.json"


def current_table() -> WorkspaceTable:
    """The shipped table with the entries of the user's own, if there is one.

    Raises :class:`UsageError` for a file that cannot be read or understood, and for one that REGRAD_CALIBRATION names
    and that is not there. Cost: milliseconds.
    """
    path = calibration_file()
    named = bool(os.environ.get(VARIABLE))
    if not named and not path.exists():
        return shipped()
    try:
        own = WorkspaceTable.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        instead = f"unset {VARIABLE}" if named else "delete the file"
        raise UsageError(
            f"cannot read the calibration {path}: {error}. Write it anew with `regrad calibrate --out {path}`, or "
            f"{instead} to plan with the table that comes with regrad."
        ) from error
    return shipped().with_entries(own)
