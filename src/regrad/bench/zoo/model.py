"""An entry of the zoo: how a model is built at each size, and what is known of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import regrad.torch as rt
from regrad.core.errors import UsageError

SMALL, BENCH = "small", "bench"
SEED = 0
LEARNING_RATE = 1e-3  # at which all of them train without a schedule


@dataclass(frozen=True, slots=True)
class Model:
    """A model with a batch, by name.

    description     one line
    build           makes the model and its batch from the settings of a size
    settings        the settings of each size: "small" runs in tests (a step below half a second), "bench" is what is
                    measured (a step of seconds, 150 to 500 MiB above what is there before it)
    blocks          globs over module names: what a user would wrap into torch's checkpoint, call by call
    segments        the glob that planning needs where its own search finds no blocks; None where it needs none
    stateful        a forward leaves other buffers or attributes behind than it found
    rerun_diverges  torch's checkpoint around each of ``blocks`` leaves other bytes than eager, or fails. That is use
                    outside what torch's checkpoint assumes: that both runs of a block do the same
    """

    name: str
    description: str
    build: Callable[..., tuple[nn.Module, Any]]
    settings: Mapping[str, Mapping[str, Any]]
    blocks: tuple[str, ...]
    segments: str | None = None
    stateful: bool = False
    rerun_diverges: bool = False

    def make(self, size: str = SMALL) -> rt.Step:
        """A new step with random weights, a fixed batch and SGD with momentum; the same one every time.

        Global generators are left as they were. Raises :class:`UsageError` for a size that is not there, and
        :class:`InvalidSubject` where the library that a model or its data come from is not installed.
        """
        if size not in self.settings:
            raise UsageError(f"model {self.name} has no size {size!r}; it has {' and '.join(self.settings)}")
        model, batch = self._built(size)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=0.9)
        return rt.Step(model.train(), batch, optimizer=optimizer, make_batch=partial(self.make_batch, size))

    def make_batch(self, size: str, batch_size: int, sequence_length: int | None = None) -> Any:
        """Another batch for the model of a size, of ``batch_size`` samples; ``sequence_length`` for the models of text.

        It is drawn as the first one is, behind the weights: a model is built for it and dropped.
        """
        changed = {"batch": batch_size}
        if sequence_length is not None:
            if "length" not in self.settings[size]:
                raise UsageError(f"model {self.name} has no sequence length; leave it out")
            changed["length"] = sequence_length
        return self._built(size, **changed)[1]

    def _built(self, size: str, **changed: int) -> tuple[nn.Module, Any]:
        """The model and its batch from the settings of a size, some changed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.build(**{**self.settings[size], **changed})
