"""What the demo trains: a model, its batches of text and its optimizer, built the same way in every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regrad.core.errors import InvalidSubject, UsageError
from regrad.demo.corpus import CORPUS_BYTES, Batches, read_corpus
from regrad.demo.experts import ExpertsConfig, MixtureOfExperts, Router
from regrad.demo.gpt import GPT, MLP, VOCABULARY, GPTConfig
from regrad.torch.step import Step

MODELS = ("gpt", "gpt2", "experts")
SEED = 20


@dataclass(frozen=True, slots=True)
class Subject:
    """The demo's model and data as sizes. ``model`` is "gpt" (:mod:`regrad.demo.gpt`), "gpt2" (transformers') or
    "experts" (:mod:`regrad.demo.experts`), whose blocks hold state.

    width, heads, layers   of the transformer
    batch_size, sequence   of one step, in bytes of text
    corpus_bytes           how much text there is
    """

    model: str = "gpt"
    layers: int = 12
    width: int = 288
    heads: int = 6
    sequence: int = 256
    batch_size: int = 4
    dropout: float = 0.1
    corpus_bytes: int = CORPUS_BYTES
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UsageError(f"the demo has no model {self.model!r}; it has {', '.join(MODELS)}")

    def batches(self) -> Batches:
        """Its batches of text; reads the corpus."""
        return Batches(read_corpus(self.corpus_bytes), self.batch_size, self.sequence, SEED)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> Step:
        """A new model with its optimizer, from the seed, and a first batch. Leaves the global generator as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = {"gpt": self._gpt, "gpt2": self._gpt2, "experts": self._experts}[self.model]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate)
        return Step(model, (tokens, targets), loss=next_byte_loss, optimizer=optimizer)

    def fake_step(self) -> Step:
        """The same without data, for use under a fake tensor mode: nothing of it takes memory."""
        tokens = torch.zeros((self.batch_size, self.sequence), dtype=torch.int64)
        return self.step(tokens, torch.zeros_like(tokens))

    def counted_class(self) -> type[nn.Module]:
        """A class of which every block holds one module, so that its calls count the forwards of blocks."""
        if self.model == "gpt":
            return MLP
        if self.model == "experts":
            return Router
        from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

        counted: type[nn.Module] = GPT2MLP
        return counted

    def _config(self) -> GPTConfig:
        return GPTConfig(self.layers, self.width, self.heads, self.sequence, self.dropout)

    def _gpt(self) -> nn.Module:
        return GPT(self._config())

    def _experts(self) -> nn.Module:
        return MixtureOfExperts(ExpertsConfig(self._config()))

    def _gpt2(self) -> nn.Module:
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise InvalidSubject(
                f'the model "gpt2" is transformers\' and that cannot be imported ({error}). '
                'Install it with pip install "regrad[hf]", or take the model "gpt".'
            ) from error
        model: nn.Module = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=self.sequence,
                n_embd=self.width,
                n_layer=self.layers,
                n_head=self.heads,
                embd_pdrop=self.dropout,
                attn_pdrop=self.dropout,
                resid_pdrop=self.dropout,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        return model.train()


def next_byte_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean cross entropy, in nats a byte, of the bytes that come next; ``batch`` is (tokens, targets)."""
    tokens, targets = batch
    scores = model(tokens)
    if not isinstance(scores, torch.Tensor):
        scores = scores.logits
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def make_step(batch: int = Subject().batch_size, sequence: int = Subject().sequence) -> Step:
    """The demo's own GPT as a SUBJECT for the command line; ``--batch`` and ``--sequence`` arrive here."""
    subject = Subject(batch_size=batch, sequence=sequence)
    return subject.step(*subject.batches()[0])
