"""Korthikanti et al. 2022, term by term, and the other layers that the same account covers."""

from __future__ import annotations

import pytest

from regrad.core.errors import UsageError
from regrad.memory.transformer import MASK, Layer, Model, Split, layer_bytes, layer_terms

S, B, H, A = 512, 4, 256, 4
SBH = S * B * H
LAYER = Layer(H, A)


def over(layer=LAYER, **settings):
    return layer_bytes(layer, batch=B, sequence=S, **settings) / SBH


def test_the_textbook_layer():
    assert over() == 34 + 5 * A * S / H == 74


def test_gpt_3s_attention_term():
    gpt3 = Layer(12_288, 96)
    whole = layer_bytes(gpt3, batch=1, sequence=2048)
    rest = layer_bytes(gpt3, batch=1, sequence=2048, recompute="selective")
    assert (whole - rest) / (2048 * 12_288) == 80
    assert rest / (2048 * 12_288) == 34


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_tensor_parallel(ways):
    assert over(split=Split(tensor=ways)) == 10 + 24 / ways + 5 * A * S / (H * ways)


@pytest.mark.parametrize("ways", [2, 4])
def test_sequence_parallel(ways):
    assert over(split=Split(tensor=ways, sequence=True)) == (34 + 5 * A * S / H) / ways


def test_recomputing():
    assert over(recompute="selective") == 34
    assert over(recompute="full") == 2
    assert over(recompute="full", split=Split(tensor=4)) == 2
    assert over(recompute="full", split=Split(tensor=4, sequence=True)) == 0.5


def test_the_four_layers_that_torch_keeps_otherwise():
    wide_masks = Layer(H, A, mask_bytes=2)
    assert over(wide_masks) == 84
    assert over(Layer(H, A, dropout=False)) == 48
    fused = Layer(H, A, dropout=False, attention="fused")
    assert over(fused) == 32 + 4 * A / H
    llama = Layer(H, A, dropout=False, attention="fused", gated=True, norm="rms")
    assert over(llama) == 60 + 4 * A / H
    assert over(Layer(H, A, dropout=False, attention="fused", gated=True, norm="rms-rounded")) == 56 + 4 * A / H


def test_grouped_heads_narrow_key_and_value():
    assert over(Layer(H, A, groups=1)) == 74 - 2 * 2 * 0.75
    assert Model(Layer(H, A, groups=1), 1).layer_shapes().count((H // A, H)) == 2


def test_wider_elements_leave_masks_alone():
    terms = layer_terms(Layer(H, A, element_bytes=4), batch=B, sequence=S)
    masks = sum(term.bytes for term in terms if term.kind == MASK) / SBH
    rest = sum(term.bytes for term in terms if term.kind != MASK) / SBH
    assert masks == 2 + A * S / H
    assert rest == 2 * (74 - masks)


def test_parameters():
    gpt3 = Model(Layer(12_288, 96), 96, vocabulary=50_257, positions=2048, tied=True)
    count = sum(_elements(shape) for shape in gpt3.shapes())
    assert abs(count - 175e9) < 0.4e9
    llama = Layer(4096, 32, inner=11_008, gated=True, norm="rms")
    seven = Model(llama, 32, vocabulary=32_000, biases=False)
    assert sum(_elements(shape) for shape in seven.shapes()) == 6_738_415_616


def test_tensor_parallel_parameters():
    model = Model(LAYER, 3, vocabulary=1024, positions=S)
    whole = sum(_elements(shape) for shape in model.shapes())
    half = sum(_elements(shape) for shape in model.shapes(Split(tensor=2)))
    replicated = 3 * (4 * H + 2 * H) + S * H + 2 * H
    assert 2 * half == whole + replicated


def _elements(shape):
    count = 1
    for size in shape:
        count *= size
    return count


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layer(100, 3), "does not divide by 3 heads"),
        (lambda: Layer(96, 6, groups=4), "do not divide into 4 groups"),
        (lambda: Layer(0, 1), "hidden is 0"),
        (lambda: Layer(8, 2, norm="batch"), "batch"),
        (lambda: layer_bytes(Layer(96, 6), batch=1, sequence=8, split=Split(tensor=4)), "6 heads"),
        (lambda: layer_bytes(LAYER, batch=1, sequence=9, split=Split(tensor=2, sequence=True)), "9 tokens"),
        (lambda: layer_bytes(LAYER, batch=0, sequence=8), "batch 0"),
        (lambda: layer_bytes(LAYER, batch=1, sequence=8, recompute="some"), "some"),
        (lambda: Model(LAYER, 0), "0 layers"),
        (lambda: Model(LAYER, 1, vocabulary=11).shapes(Split(tensor=2)), "vocabulary of 11"),
        (lambda: Split(zero=4, data=2), "4"),
        (lambda: Split(zero=1), "ZeRO stage 1"),
        (lambda: Split(sequence=True), "sequence parallelism"),
        (lambda: Split(tensor=0), "tensor=0"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(UsageError, match=words):
        make()
