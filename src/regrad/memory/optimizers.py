"""What an optimizer holds for every parameter, and what its step needs for a moment.

With m the bytes of the weights: inference m, plain SGD 2m (weights and gradients), momentum 3m, Adam 4m, all in one type.
Sources: Kingma & Ba 2015 (Adam: two moments); Loshchilov & Hutter 2019 (AdamW: the same state); Micikevicius et al. 2018
(FP32 master weights beside 16-bit weights); Dettmers et al. 2022 (8-bit moments with one FP32 scale a block; block size
and the smallest tensor that is quantised are those of the bitsandbytes library); Shazeer & Stern 2018 (Adafactor: of a
matrix the sums of its rows and columns, of a vector all of it, no first moment).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from regrad.core.errors import UsageError

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32_BYTES = 4
BLOCK = 256
"""Elements that share one scale in 8-bit states."""
QUANTISED_FROM = 4096
"""A tensor with fewer elements keeps FP32 moments."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """An optimizer. ``moments`` full copies of the parameters are kept; with ``bits`` 8 they are quantised; ``factored``
    keeps the rows and columns of a matrix. ``step_copies``: copies of the parameters, in the moments' type, that the step
    makes for a moment in torch's ``foreach`` form."""

    name: str
    title: str
    moments: int
    bits: int = 0
    factored: bool = False
    step_copies: int = 0
    source: str = ""


RULES = {
    rule.name: rule
    for rule in (
        Rule("sgd", "SGD", 0, source="no state"),
        Rule("momentum", "SGD with momentum", 1, source="one velocity"),
        Rule("adam", "Adam", 2, step_copies=1, source="Kingma & Ba 2015"),
        Rule("adamw", "AdamW", 2, step_copies=1, source="Loshchilov & Hutter 2019"),
        Rule("adamw-8bit", "AdamW, 8-bit", 2, bits=8, source="Dettmers et al. 2022"),
        Rule("adafactor", "Adafactor", 0, factored=True, step_copies=1, source="Shazeer & Stern 2018"),
    )
}


def rule(name: str) -> Rule:
    """The rule called ``name``. Raises :class:`UsageError` for any other."""
    if name not in RULES:
        raise UsageError(f"there is no optimizer {name!r} in the table. It has {', '.join(RULES)}.")
    return RULES[name]


def element_bytes(dtype: str) -> int:
    """Bytes of one element. Raises :class:`UsageError` for a type that is not in the table."""
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"there is no type {dtype!r} in the table. It has {', '.join(DTYPE_BYTES)}.")
    return DTYPE_BYTES[dtype]


def square(elements: int) -> tuple[Shape, ...]:
    """Shapes for a bare count of parameters: one matrix, as square as may be. It decides nothing but Adafactor."""
    side = max(1, math.isqrt(elements))
    rest = elements - side * (elements // side)
    return ((side, elements // side), (rest,)) if rest else ((side, elements // side),)


def state_bytes(name: str, shapes: Iterable[Shape], dtype: str = "fp32") -> int:
    """Bytes of the state of optimizer ``name`` over parameters of these shapes, moments in ``dtype``.

    Step counters are left out: they are one number a tensor and live on the host.
    """
    one, width = rule(name), element_bytes(dtype)
    total = 0
    for shape in shapes:
        count = math.prod(shape)
        if one.factored:
            # A vector keeps its second moment, a matrix (of each leading index) its row and column sums.
            split = math.prod(shape[:-2]) * (shape[-2] + shape[-1]) if len(shape) > 1 else count
            total += width * split
        elif one.bits and count >= QUANTISED_FROM:
            total += one.moments * (count + FP32_BYTES * -(-count // BLOCK))
        elif one.bits:
            total += one.moments * FP32_BYTES * count
        else:
            total += one.moments * width * count
    return total


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """What parameters cost by themselves, in bytes. ``parameter_memory_bytes`` is the sum of the first four."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    master_bytes: int
    step_bytes: int

    @property
    def parameter_memory_bytes(self) -> int:
        """Weights, gradients, optimizer state and master weights: what is quoted as bytes a parameter."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.master_bytes


def parameter_memory(
    shapes: Iterable[Shape],
    *,
    dtype: str = "fp32",
    optimizer: str = "adamw",
    optimizer_dtype: str | None = None,
    gradient_dtype: str | None = None,
    master_weights: bool = False,
) -> ParameterMemory:
    """Bytes of weights, gradients, optimizer state and master weights over parameters of these shapes.

    ``optimizer_dtype`` is that of the moments; left out it is the weights' own (as torch's optimizers make them), or
    fp32 beside ``master_weights``. ``gradient_dtype`` is the weights' unless given. Master weights are an FP32 copy; they
    are refused beside FP32 weights, which are their own masters. Raises :class:`UsageError`.
    """
    given = tuple(shapes)
    count = sum(math.prod(shape) for shape in given)
    if master_weights and dtype == "fp32":
        raise UsageError("FP32 weights are their own master weights: leave out either fp32 or the master weights.")
    moments = optimizer_dtype or ("fp32" if master_weights else dtype)
    weights, gradients = element_bytes(dtype), element_bytes(gradient_dtype or dtype)
    return ParameterMemory(
        weights_bytes=weights * count,
        gradients_bytes=gradients * count,
        optimizer_bytes=state_bytes(optimizer, given, moments),
        master_bytes=FP32_BYTES * count if master_weights else 0,
        step_bytes=rule(optimizer).step_copies * element_bytes(moments) * count,
    )
