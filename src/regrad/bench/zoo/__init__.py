"""The models that the experiments measure on: real ones by kind and size, with the state that such models keep.

``ZOO["moe"].make("bench")`` is a step; the same one every time.
"""

from __future__ import annotations

from regrad.bench.zoo import (
    attention,
    contrastive,
    convolutional,
    experts,
    hugging_face,
    quantised,
    recurrent,
    spectral,
    spiking,
)
from regrad.bench.zoo.model import BENCH, SMALL, Model

_FAMILIES = (
    attention,
    hugging_face,
    convolutional,
    experts,
    contrastive,
    quantised,
    spectral,
    recurrent,
    spiking,
)

ZOO: dict[str, Model] = {model.name: model for family in _FAMILIES for model in family.MODELS}

__all__ = ["BENCH", "SMALL", "ZOO", "Model"]
