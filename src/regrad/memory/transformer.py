"""Bytes that one transformer layer keeps from its forward to its backward, term by term, and those of a whole model.

The layer is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4:
with s tokens, b sequences, h channels and a heads in 16-bit it keeps ``s·b·h·(34 + 5·a·s/h)`` bytes; over t devices
``s·b·h·(10 + 24/t + 5·a·s/(h·t))`` (equation 2), with sequence parallelism ``s·b·h/t·(34 + 5·a·s/h)`` (equation 4);
selective recomputation drops the 5·a·s/h, full recomputation leaves the layer's input, ``2·s·b·h``. Each term says
whether it is one of those that tensor parallelism alone does not divide.

The switches of :class:`Layer` make the same account for other layers: fused attention keeps no matrix of a·s·s elements
but one FP32 number for each row; grouped heads narrow key and value; a gated MLP keeps four wide tensors instead of two;
a root-mean-square norm computed in FP32 keeps its input in FP32 and the normalised input, where a layer norm keeps its
input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from regrad.core.errors import UsageError
from regrad.memory.optimizers import Shape

RECOMPUTE = ("none", "selective", "full")
NORMS = ("layer", "rms", "rms-rounded")
ATTENTIONS = ("unfused", "fused")
HIDDEN, WIDE, MATRIX, MASK, SMALL = CLASSES = ("hidden", "wide", "attention matrix", "dropout mask", "small")
"""Of a kept tensor: as wide as the hidden state, as the MLP, sequence by sequence, a dropout mask, anything smaller."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer. The defaults are the paper's, but for its size.

    hidden, heads   h and a; ``heads`` divides ``hidden``
    groups          heads of key and value; as many as ``heads`` unless given
    inner           width of the MLP; 4 h unless given
    gated           SwiGLU: two wide products, one gates the other
    norm            "layer"; "rms", in FP32 to the end; "rms-rounded", in FP32 and rounded before its weight is applied
    attention       "unfused" writes the a·s·s weights out, "fused" does not
    dropout         on attention weights, attention and MLP
    element_bytes   of activations; mask_bytes of a dropout mask, an element
    """

    hidden: int
    heads: int
    groups: int = 0
    inner: int = 0
    gated: bool = False
    norm: str = "layer"
    attention: str = "unfused"
    dropout: bool = True
    element_bytes: int = 2
    mask_bytes: int = 1

    def __post_init__(self) -> None:
        for name, value in (("hidden", self.hidden), ("heads", self.heads)):
            if value < 1:
                raise UsageError(f"{name} is {value}; a layer has at least 1.")
        if self.hidden % self.heads:
            raise UsageError(f"hidden size {self.hidden} does not divide by {self.heads} heads: change either.")
        if self.heads % self.key_heads:
            raise UsageError(f"{self.heads} heads do not divide into {self.key_heads} groups of key and value heads.")
        if self.norm not in NORMS or self.attention not in ATTENTIONS:
            raise UsageError(
                f"norm {self.norm!r}, attention {self.attention!r}: the first is one of {', '.join(NORMS)}, the second "
                f"one of {', '.join(ATTENTIONS)}."
            )

    @property
    def key_heads(self) -> int:
        """Heads of key and of value."""
        return self.groups or self.heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP."""
        return self.inner or 4 * self.hidden

    @property
    def key_width(self) -> int:
        """Channels of key and of value."""
        return self.hidden // self.heads * self.key_heads


@dataclass(frozen=True, slots=True)
class Term:
    """One kept tensor, or several alike: its bytes, its class, and whether tensor parallelism alone divides it."""

    name: str
    bytes: int
    kind: str
    divided: bool = True
    core: bool = False
    """Whether it belongs to the attention core, which selective recomputation computes again."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is spread: ``tensor`` ways within a layer, with or without its sequence, and over ``data`` replicas of
    which ``zero`` (0 to 3) says what is not replicated. Raises :class:`UsageError` where that makes no sense."""

    tensor: int = 1
    sequence: bool = False
    data: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.data < 1:
            raise UsageError(f"tensor={self.tensor}, data={self.data}: a model is spread over at least 1 device.")
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"ZeRO has the stages 0, 1, 2 and 3; {self.zero} is none of them.")
        if self.zero and self.data == 1:
            raise UsageError(f"ZeRO stage {self.zero} spreads over data-parallel devices, and there is 1: give more.")
        if self.sequence and self.tensor == 1:
            raise UsageError("sequence parallelism goes with tensor parallelism over 2 devices or more.")


def layer_terms(layer: Layer, *, batch: int, sequence: int, split: Split | None = None) -> tuple[Term, ...]:
    """What one device keeps of ``layer`` for its backward. ``batch`` is that of one data-parallel device.

    Raises :class:`UsageError` for shapes that do not divide by the tensor-parallel devices.
    """
    split = split or Split()
    _check(layer, batch, sequence, split)
    rows, width, masks = batch * sequence, layer.element_bytes, layer.mask_bytes if layer.dropout else 0
    hidden = rows * layer.hidden
    terms = [
        *_norm("attention's", layer, rows),
        Term("input of query, key and value", width * hidden, HIDDEN, divided=False),
        Term("query", width * hidden, HIDDEN),
        Term("key", width * rows * layer.key_width, HIDDEN),
        Term("value", width * rows * layer.key_width, HIDDEN),
        *_core(layer, batch, sequence),
        Term("input of the output projection", width * hidden, HIDDEN),
        Term("attention's dropout mask", masks * hidden, MASK, divided=False),
        *_norm("MLP's", layer, rows),
        Term("input of the MLP", width * hidden, HIDDEN, divided=False),
        *_mlp(layer, rows),
        Term("MLP's dropout mask", masks * hidden, MASK, divided=False),
    ]
    return tuple(_share(term, split) for term in terms if term.bytes)


def _norm(whose: str, layer: Layer, rows: int) -> list[Term]:
    hidden = rows * layer.hidden
    if layer.norm == "layer":
        return [Term(f"input of the {whose} norm", layer.element_bytes * hidden, HIDDEN, divided=False)]
    rounded = layer.element_bytes if layer.norm == "rms-rounded" else 4
    return [
        Term(f"FP32 input of the {whose} norm", 4 * hidden, HIDDEN, divided=False),
        Term(f"normalised input of the {whose} norm", rounded * hidden, HIDDEN, divided=False),
    ]


def _core(layer: Layer, batch: int, sequence: int) -> list[Term]:
    matrix = layer.heads * batch * sequence * sequence
    width = layer.element_bytes
    if layer.attention == "fused":
        return [Term("a number for each row of attention", 4 * layer.heads * batch * sequence, SMALL, core=True)]
    terms = [Term("attention weights (softmax)", width * matrix, MATRIX, core=True)]
    if layer.dropout:
        terms += [
            Term("attention weights' dropout mask", layer.mask_bytes * matrix, MASK, core=True),
            Term("attention weights after dropout", width * matrix, MATRIX, core=True),
        ]
    return terms


def _mlp(layer: Layer, rows: int) -> list[Term]:
    wide = layer.element_bytes * rows * layer.mlp_width
    names = ["input of the activation", "input of the second product"]
    if layer.gated:
        names = ["gate before its activation", "gate", "what the gate multiplies", "input of the second product"]
    return [Term(name, wide, WIDE) for name in names]


def _share(term: Term, split: Split) -> Term:
    if term.divided or split.sequence:
        return replace(term, bytes=-(-term.bytes // split.tensor))
    return term


def _check(layer: Layer, batch: int, sequence: int, split: Split) -> None:
    if batch < 1 or sequence < 1:
        raise UsageError(f"batch {batch}, sequence {sequence}: both are at least 1.")
    for name, value in (
        ("heads", layer.heads),
        ("key and value heads", layer.key_heads),
        ("channels of the MLP", layer.mlp_width),
        ("tokens", sequence if split.sequence else split.tensor),
    ):
        if value % split.tensor:
            raise UsageError(
                f"{value} {name} do not divide by {split.tensor} tensor-parallel devices. "
                "Use a number of devices that divides them."
            )


def layer_bytes(layer: Layer, *, batch: int, sequence: int, split: Split | None = None, recompute: str = "none") -> int:
    """Bytes that one device keeps of one layer: the paper's formula where ``layer`` is the paper's.

    ``recompute`` "selective" leaves out the attention core, "full" leaves the layer's input alone (every tensor-parallel
    device keeps all of it, unless the sequence is divided too).
    """
    if recompute not in RECOMPUTE:
        raise UsageError(f"recompute {recompute!r} is not known; it is one of {', '.join(RECOMPUTE)}.")
    terms = layer_terms(layer, batch=batch, sequence=sequence, split=split)
    if recompute == "full":
        split = split or Split()
        term = Term("input", layer.element_bytes * batch * sequence * layer.hidden, HIDDEN, divided=False)
        return _share(term, split).bytes
    return sum(term.bytes for term in terms if recompute == "none" or not term.core)


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder of ``layers`` equal layers between an embedding of ``vocabulary`` tokens and a head.

    positions  learned positions; 0 for none. tied: the head is the embedding. biases: in every product of the layers
    """

    layer: Layer
    layers: int
    vocabulary: int = 0
    positions: int = 0
    tied: bool = False
    biases: bool = True

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise UsageError(f"a model of {self.layers} layers is none; give 1 or more.")

    def layer_shapes(self, split: Split | None = None) -> list[Shape]:
        """Shapes of the parameters of one layer on one device. Norms, and biases added after a sum over devices, are on
        every tensor-parallel device; all else is divided."""
        layer, ways = self.layer, (split or Split()).tensor
        hidden, inner = layer.hidden, layer.mlp_width // ways
        columns = [(layer.hidden // ways, 1), (layer.key_width // ways, 2), (inner, 2 if layer.gated else 1)]
        shapes: list[Shape] = []
        for width, count in columns:
            shapes += [(width, hidden)] * count + [(width,)] * (count if self.biases else 0)
        shapes += [(hidden, hidden // ways), (hidden, inner)] + [(hidden,)] * (2 if self.biases else 0)
        return shapes + [(hidden,)] * (4 if layer.norm == "layer" else 2)

    def outer_shapes(self, split: Split | None = None) -> list[Shape]:
        """Shapes of the parameters outside the layers on one device. Raises :class:`UsageError` if they do not divide."""
        ways, hidden = (split or Split()).tensor, self.layer.hidden
        if self.vocabulary % ways:
            raise UsageError(
                f"a vocabulary of {self.vocabulary} does not divide by {ways} tensor-parallel devices: pad it."
            )
        tables = [(self.vocabulary // ways, hidden)] * (1 if self.tied else 2) if self.vocabulary else []
        positions: list[Shape] = [(self.positions, hidden)] if self.positions else []
        return [*tables, *positions] + [(hidden,)] * (2 if self.layer.norm == "layer" else 1)

    def shapes(self, split: Split | None = None) -> list[Shape]:
        """Shapes of all parameters on one device."""
        return self.layer_shapes(split) * self.layers + self.outer_shapes(split)

    def outer_terms(self, *, batch: int, sequence: int, split: Split | None = None) -> tuple[Term, ...]:
        """What one device keeps outside the layers: the embedding's mask, the last norm's and the head's inputs, and the
        logits in FP32 (section 4.3 of the paper)."""
        split, layer = split or Split(), self.layer
        hidden = batch * sequence * layer.hidden
        terms = [
            Term("embedding's dropout mask", (layer.mask_bytes if layer.dropout else 0) * hidden, MASK, divided=False),
            Term("input of the last norm", layer.element_bytes * hidden, HIDDEN, divided=False),
        ]
        if self.vocabulary:
            logits = 4 * batch * sequence * self.vocabulary
            head = Term("input of the head", layer.element_bytes * hidden, HIDDEN, divided=False)
            terms += [head, Term("logits in FP32", logits, WIDE)]
        return tuple(_share(term, split) for term in terms if term.bytes)
