"""What estimates are tried on: models of ten kinds, and the settings under which each is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import regrad.torch as rt
from regrad.bench.estimates_models import Autoencoder, GraphNetwork
from regrad.bench.zoo.convolutional import UNet
from regrad.bench.zoo.data import VOCABULARY, digits, text
from regrad.bench.zoo.experts import MixtureOfExperts
from regrad.bench.zoo.hugging_face import model_of
from regrad.bench.zoo.model import BENCH, LEARNING_RATE, SEED, SMALL
from regrad.bench.zoo.recurrent import LSTM

EAGER, EVERY_BLOCK, PLANNED = "eager", "every block", "planned"
SGD, ADAM = "SGD", "Adam"
FP32, AUTOCAST = "fp32", "bf16 autocast"
IGNORED = -100

Built = tuple[nn.Module, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is trained.

    recompute   "eager": nothing; "every block": every block that can be; "planned": what ``rt.plan`` says at half
    optimizer   "SGD" (with momentum) or "Adam"
    precision   "fp32", or "bf16 autocast" around the forward
    accumulate  two micro-batches a step, the gradients of the first kept while the second runs
    """

    recompute: str = EAGER
    optimizer: str = SGD
    precision: str = FP32
    accumulate: bool = False

    def __str__(self) -> str:
        words = [self.recompute, self.precision, self.optimizer] + ["accumulated"] * self.accumulate
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model by name with its settings.

    kind         what sort of model it stands for
    transformer  held to the narrower band
    build        makes the model and its batch from ``sizes["small"]`` or ``sizes["bench"]``: a step of a tenth of a
                 second, or one of up to three seconds that peaks between 100 MiB and 1 GiB
    """

    name: str
    kind: str
    transformer: bool
    build: Callable[..., Built]
    sizes: Mapping[str, Mapping[str, Any]]
    settings: tuple[Setting, ...]

    def make(self, setting: Setting, size: str = BENCH) -> rt.Step:
        """A new step of random weights that has never run; the same one every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model, batch = self.build(**self.sizes[size])
        model.train()
        optimizer: torch.optim.Optimizer
        if setting.optimizer == ADAM:
            optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        loss = autocast_loss if setting.precision == AUTOCAST else None
        return rt.Step(model, batch, loss, optimizer, gradients="kept" if setting.accumulate else "fresh")


def autocast_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model's loss under bfloat16 autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    loss: torch.Tensor = result if isinstance(result, torch.Tensor) else result.loss
    return loss


def _causal(kind: str) -> Callable[..., Built]:
    def build(batch: int, length: int, **settings: Any) -> Built:
        model = model_of(
            kind, "AutoModelForCausalLM", vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **settings
        )
        tokens, _ = text(batch, length)
        return model, {"input_ids": tokens, "labels": tokens.clone()}

    return build


def _bert(batch: int, length: int, **settings: Any) -> Built:
    model = model_of("Bert", "AutoModelForMaskedLM", vocab_size=VOCABULARY, pad_token_id=None, **settings)
    tokens, _ = text(batch, length)
    masked = torch.rand(tokens.shape) < 0.15
    return model, {"input_ids": tokens.masked_fill(masked, 0), "labels": tokens.masked_fill(~masked, IGNORED)}


def _translation(batch: int, length: int, **settings: Any) -> Built:
    model = model_of(
        "T5", "AutoModelForSeq2SeqLM", vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **settings
    )
    tokens, targets = text(batch, length)
    return model, {"input_ids": tokens, "labels": targets}


def _classifier(kind: str) -> Callable[..., Built]:
    def build(batch: int, image: int, **settings: Any) -> Built:
        if kind == "ViT":
            settings["image_size"] = image
        model = model_of(kind, "AutoModelForImageClassification", num_channels=1, num_labels=10, **settings)
        images, labels = digits(batch, image)
        return model, {"pixel_values": images, "labels": labels}

    return build


def _unet(batch: int, image: int, **sizes: int) -> Built:
    clean, _ = digits(batch, image)
    return UNet(**sizes), (clean + 0.3 * torch.randn_like(clean), clean)


def _lstm(batch: int, length: int, **sizes: int) -> Built:
    return LSTM(**sizes), text(batch, length)


def _moe(batch: int, length: int, **sizes: int) -> Built:
    return MixtureOfExperts(tokens=batch * length, **sizes), text(batch, length)


def _autoencoder(batch: int, image: int, **sizes: int) -> Built:
    return Autoencoder(**sizes), (digits(batch, image)[0],)


def _graph(nodes: int, edges: int, features: int, classes: int, **sizes: int) -> Built:
    ends = torch.randint(nodes, (2, edges))
    batch = (torch.randn(nodes, features), ends, torch.randint(classes, (nodes,)))
    return GraphNetwork(features=features, classes=classes, **sizes), batch


def _layers(layers: int, width: int, heads: int, groups: int, inner: int, **more: int) -> dict[str, Any]:
    """Settings by the names that Llama and its kin give them."""
    return {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner,
        "num_key_value_heads": groups, **more,
    }  # fmt: skip


def _encoder(layers: int, width: int, heads: int, **more: int) -> dict[str, Any]:
    """Settings by the names that BERT and ViT give them."""
    return {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
        "intermediate_size": 4 * width, **more,
    }  # fmt: skip


_ALL_FIVE = (
    Setting(EAGER, SGD),
    Setting(EAGER, ADAM, AUTOCAST),
    Setting(EVERY_BLOCK, SGD, accumulate=True),
    Setting(PLANNED, ADAM),
    Setting(PLANNED, SGD, AUTOCAST),
)
_FOUR = (
    Setting(EAGER, ADAM),
    Setting(EVERY_BLOCK, ADAM, AUTOCAST),
    Setting(PLANNED, SGD),
    Setting(EAGER, SGD, AUTOCAST, accumulate=True),
)
_THREE = (Setting(EAGER, SGD), Setting(EVERY_BLOCK, ADAM), Setting(PLANNED, SGD, accumulate=True))

SUBJECTS = (
    Subject("gpt2", "GPT", True, _causal("GPT2"), {
        SMALL: {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 64, "batch": 4, "length": 64},
        BENCH: {"n_layer": 8, "n_embd": 256, "n_head": 8, "n_positions": 256, "batch": 4, "length": 256},
    }, _ALL_FIVE),
    Subject("llama", "Llama-like", True, _causal("Llama"), {
        SMALL: _layers(3, 64, 4, 2, 172, batch=4, length=64),
        BENCH: _layers(8, 256, 8, 4, 688, batch=4, length=256),
    }, _FOUR),
    Subject("bert", "BERT", True, _bert, {
        SMALL: _encoder(3, 64, 4, batch=4, length=64),
        BENCH: _encoder(8, 256, 8, batch=4, length=256),
    }, _FOUR),
    Subject("vit", "ViT", True, _classifier("ViT"), {
        SMALL: _encoder(3, 64, 4, batch=4, image=32, patch_size=4),
        BENCH: _encoder(8, 256, 8, batch=12, image=64, patch_size=8),
    }, _THREE),
    Subject("t5", "encoder and decoder", True, _translation, {
        SMALL: {"num_layers": 2, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_heads": 4, "batch": 4, "length": 48},
        BENCH: {"num_layers": 4, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_heads": 8, "batch": 4, "length": 160},
    }, _THREE),
    Subject("mixtral", "mixture of experts", True, _causal("Mixtral"), {
        SMALL: _layers(2, 64, 4, 2, 128, num_local_experts=4, batch=4, length=64),
        BENCH: _layers(4, 256, 8, 4, 512, num_local_experts=4, batch=4, length=256),
    }, _THREE),
    Subject("switch", "mixture of experts", True, _moe, {
        SMALL: {"width": 64, "heads": 4, "layers": 3, "experts": 4, "batch": 4, "length": 48},
        BENCH: {"width": 224, "heads": 4, "layers": 5, "experts": 4, "batch": 4, "length": 256},
    }, (Setting(EAGER, ADAM), Setting(PLANNED, SGD))),
    Subject("resnet", "ResNet-like", False, _classifier("ResNet"), {
        SMALL: {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic", "batch": 4,
                "image": 48},
        BENCH: {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2],
                "layer_type": "basic", "batch": 24, "image": 128},
    }, _FOUR),
    Subject("u-net", "U-Net", False, _unet, {
        SMALL: {"channels": 16, "depth": 2, "batch": 2, "image": 40},
        BENCH: {"channels": 24, "depth": 3, "batch": 6, "image": 96},
    }, _FOUR),
    Subject("lstm", "LSTM", False, _lstm, {
        SMALL: {"width": 64, "layers": 3, "batch": 8, "length": 48},
        BENCH: {"width": 256, "layers": 4, "batch": 24, "length": 128},
    }, _THREE),
    Subject("autoencoder", "autoencoder", False, _autoencoder, {
        SMALL: {"channels": 16, "blocks": 2, "batch": 4, "image": 48},
        BENCH: {"channels": 48, "blocks": 4, "batch": 12, "image": 96},
    }, _THREE),
    Subject("graph", "GNN-like scatter", False, _graph, {
        SMALL: {"nodes": 512, "edges": 4096, "features": 16, "classes": 8, "width": 32, "layers": 5},
        BENCH: {"nodes": 4096, "edges": 24576, "features": 64, "classes": 16, "width": 96, "layers": 6},
    }, (*_THREE, Setting(EAGER, ADAM, AUTOCAST))),
)  # fmt: skip
