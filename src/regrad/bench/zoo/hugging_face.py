"""Small configurations of ``transformers``: GPT-2, Llama, Mixtral, BERT, each with its labels in the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from regrad.bench.zoo.data import VOCABULARY, text
from regrad.bench.zoo.model import BENCH, SMALL, Model
from regrad.core.errors import InvalidSubject

_MASK_TOKEN = 0
_IGNORED = -100


def model_of(kind: str, head: str, **settings: Any) -> nn.Module:
    """A model of random weights in training mode: ``kind`` as in ``GPT2Config``, ``head`` an auto class.

    Raises :class:`InvalidSubject` without ``transformers``.
    """
    try:
        import transformers
    except ImportError as error:
        raise InvalidSubject(
            f"the model {kind} is one of transformers, which cannot be imported: {error}. "
            "Install it: pip install 'regrad[hf]'."
        ) from None
    transformers.logging.set_verbosity_error()  # what it says of token ids is for checkpoints, and there is none
    config = getattr(transformers, f"{kind}Config")(**settings)
    model: nn.Module = getattr(transformers, head).from_config(config)
    return model.train()


def _causal(kind: str, batch: int, length: int, **settings: Any) -> tuple[nn.Module, Any]:
    model = model_of(kind, "AutoModelForCausalLM", vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **settings)
    tokens, _ = text(batch, length)
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def _masked(kind: str, batch: int, length: int, **settings: Any) -> tuple[nn.Module, Any]:
    model = model_of(kind, "AutoModelForMaskedLM", vocab_size=VOCABULARY, pad_token_id=None, **settings)
    tokens, _ = text(batch, length)
    masked = torch.rand(tokens.shape) < 0.15
    inputs = tokens.masked_fill(masked, _MASK_TOKEN)
    return model, {"input_ids": inputs, "labels": tokens.masked_fill(~masked, _IGNORED)}


def _gpt2(**settings: Any) -> tuple[nn.Module, Any]:
    return _causal("GPT2", **settings)


def _llama(**settings: Any) -> tuple[nn.Module, Any]:
    return _causal("Llama", **settings)


def _mixtral(**settings: Any) -> tuple[nn.Module, Any]:
    return _causal("Mixtral", output_router_logits=True, **settings)


def _bert(**settings: Any) -> tuple[nn.Module, Any]:
    return _masked("Bert", **settings)


def _shared(layers: int, width: int, inner: int, heads: int, groups: int, **more: int) -> dict[str, Any]:
    """Settings by the names that Llama and its kin give them."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        **more,
    }


def _bert_sizes(layers: int, width: int, heads: int, **more: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        **more,
    }


_GPT2: Mapping[str, Mapping[str, Any]] = {
    SMALL: {"n_layer": 6, "n_embd": 96, "n_head": 4, "n_positions": 64, "batch": 4, "length": 64},
    BENCH: {"n_layer": 12, "n_embd": 288, "n_head": 6, "n_positions": 256, "batch": 3, "length": 256},
}
_LLAMA: Mapping[str, Mapping[str, Any]] = {
    SMALL: _shared(6, 96, 256, 4, 2, batch=4, length=64),
    BENCH: _shared(12, 320, 853, 8, 4, batch=4, length=256),
}
_MIXTRAL: Mapping[str, Mapping[str, Any]] = {
    SMALL: _shared(4, 96, 192, 4, 2, num_local_experts=4, batch=4, length=64),
    BENCH: _shared(6, 288, 576, 6, 3, num_local_experts=4, batch=6, length=256),
}
_BERT: Mapping[str, Mapping[str, Any]] = {
    SMALL: _bert_sizes(6, 96, 4, batch=4, length=64),
    BENCH: _bert_sizes(12, 288, 6, batch=3, length=256),
}

MODELS = (
    Model("gpt2", "transformers' GPT-2 with its dropout and its cache on", _gpt2, _GPT2, ("transformer.h.*",)),
    Model("llama", "transformers' Llama with its cache on", _llama, _LLAMA, ("model.layers.*",)),
    Model("mixtral", "transformers' Mixtral with its cache on and the routers' loss", _mixtral, _MIXTRAL,
          ("model.layers.*",)),
    Model("bert", "transformers' BERT with dropout, masked tokens", _bert, _BERT, ("bert.encoder.layer.*",)),
)  # fmt: skip
