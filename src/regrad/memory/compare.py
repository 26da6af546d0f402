"""A formula and a trace of the same layer side by side, and what makes them differ.

What a traced block keeps is sorted by size: as wide as the hidden state, as the MLP, sequence by sequence, a dropout mask,
or smaller than any of them. The formula's terms come in the same classes, so each class has two figures and a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from regrad.memory.transformer import CLASSES, HIDDEN, MASK, MATRIX, SMALL, WIDE, Layer, Term, layer_terms


@dataclass(frozen=True, slots=True)
class Kept:
    """A storage that a traced block keeps: bytes, elements, bytes an element, and whether a draw filled it (a mask)."""

    bytes: int
    elements: int
    element_bytes: int
    drawn: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """One class of tensors: bytes by formula and by trace, and the reason where they differ ("" where they agree)."""

    kind: str
    formula_bytes: int
    trace_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One block, in bytes and over s·b·h: the textbook's formula, the formula for this layer, and the trace."""

    block: str
    batch: int
    sequence: int
    hidden: int
    textbook_bytes: int
    formula_bytes: int
    trace_bytes: int
    differences: tuple[Difference, ...]

    @property
    def unit(self) -> int:
        """s·b·h."""
        return self.batch * self.sequence * self.hidden

    def over_unit(self, count: int) -> float:
        """Bytes over s·b·h."""
        return count / self.unit


def textbook(layer: Layer) -> Layer:
    """The paper's layer of this size: 16-bit, dropout with masks of a byte, weights of attention written out."""
    return Layer(layer.hidden, layer.heads)


def compare(block: str, kept: Iterable[Kept], layer: Layer, *, batch: int, sequence: int) -> Comparison:
    """Set what a block keeps beside the formulas for it. Differences are to the textbook's."""
    found = tuple(kept)
    standard = textbook(layer)
    terms = layer_terms(standard, batch=batch, sequence=sequence)
    by_class: dict[str, list[Kept]] = {kind: [] for kind in CLASSES}
    for one in found:
        by_class[_kind(one, layer, batch, sequence)].append(one)
    differences = tuple(
        Difference(
            kind,
            sum(term.bytes for term in terms if term.kind == kind),
            sum(one.bytes for one in by_class[kind]),
            _why(kind, by_class[kind], [term for term in terms if term.kind == kind], layer),
        )
        for kind in CLASSES
    )
    own = layer_terms(layer, batch=batch, sequence=sequence)
    return Comparison(
        block, batch, sequence, layer.hidden, sum(term.bytes for term in terms), sum(term.bytes for term in own),
        sum(one.bytes for one in found), differences,
    )  # fmt: skip


def _kind(one: Kept, layer: Layer, batch: int, sequence: int) -> str:
    rows = batch * sequence
    if one.drawn and one.elements >= rows * layer.key_width:
        return MASK
    if layer.attention == "unfused" and one.elements >= layer.heads * rows * sequence:
        return MATRIX
    if one.elements >= rows * layer.mlp_width and layer.mlp_width > layer.hidden and _whole(one, rows, layer.mlp_width):
        return WIDE
    return HIDDEN if one.elements >= rows * layer.key_width else SMALL


def _whole(one: Kept, rows: int, width: int) -> bool:
    return one.elements % (rows * width) == 0


def _why(kind: str, kept: list[Kept], terms: list[Term], layer: Layer) -> str:
    formula, trace = sum(term.bytes for term in terms), sum(one.bytes for one in kept)
    if formula == trace:
        return ""
    if kind == MASK:
        if not kept:
            return "the formula counts dropout; this block draws no mask"
        return f"the formula counts a byte an element; here a mask takes {_widths(kept)}"
    if kind == MATRIX:
        if not kept:
            return "the formula counts attention weights; this block's attention is fused and keeps none"
        made = f"{len(kept)} of {_widths(kept)} an element"
        return f"the formula counts the weights before and after dropout; this block keeps {made}"
    if kind == WIDE:
        gated = ", for its MLP is gated" if layer.gated else ""
        shape = f"{len(kept)} tensors of {layer.mlp_width} channels"
        return (
            f"the formula counts {len(terms)} tensors of {4 * layer.hidden} channels; this block keeps {shape}{gated}"
        )
    if kind == SMALL:
        return "the formula leaves out statistics of norms, masks of the order, numbers for each row of attention"
    wide = [one for one in kept if one.element_bytes > layer.element_bytes]
    fp32 = f", {len(wide)} of them in a wider type (a norm computed in FP32)" if wide else ""
    return f"the formula counts {len(terms)} tensors; this block keeps {len(kept)}{fp32}"


def _widths(kept: list[Kept]) -> str:
    widths = Counter(one.element_bytes for one in kept)
    words = [f"{width} {'byte' if width == 1 else 'bytes'}" for width in sorted(widths)]
    return " or ".join(words)
