"""The SUBJECT ``transformers:CONFIGCLASS``: a model of random weights and a batch of random data for it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from regrad.core.errors import InvalidSubject
from regrad.core.units import format_bytes
from regrad.torch.room import available_bytes
from regrad.torch.step import Step
from regrad.torch.subject import Wishes, read_value

BATCH = 4
SEQUENCE = 256
SEED = 0
LEARNING_RATE = 1e-4

MakeBatch = Callable[..., dict[str, torch.Tensor]]  # (batch_size, sequence_length=None)


@dataclass(frozen=True)
class Kind:
    """A family of models that are fed alike: the auto class that builds them and what makes their batches."""

    auto: str
    mapping: str
    make_batch: Callable[[Any, torch.dtype], MakeBatch]


def _tokens(config: Any, dtype: torch.dtype) -> MakeBatch:
    longest = getattr(config, "max_position_embeddings", None)

    def make_batch(batch_size: int, sequence_length: int | None = None) -> dict[str, torch.Tensor]:
        length = sequence_length or min(SEQUENCE, longest or SEQUENCE)
        if longest is not None and length > longest:
            raise InvalidSubject(
                f"--sequence {length} is longer than the {longest} positions that {type(config).__name__} has. "
                f"Ask for at most {longest}, or give --config max_position_embeddings={length}."
            )
        draw = torch.Generator().manual_seed(SEED)
        ids = torch.randint(config.vocab_size, (batch_size, length), generator=draw)
        return {"input_ids": ids, "labels": ids.clone()}

    return make_batch


def _images(config: Any, dtype: torch.dtype) -> MakeBatch:
    def make_batch(batch_size: int, sequence_length: int | None = None) -> dict[str, torch.Tensor]:
        if sequence_length is not None:
            raise InvalidSubject(f"{type(config).__name__} is a model of images: it has no --sequence. Leave it out.")
        size = getattr(config, "image_size", None) or 224
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        draw = torch.Generator().manual_seed(SEED)
        pixels = torch.randn(batch_size, getattr(config, "num_channels", 3), height, width, generator=draw)
        labels = torch.randint(config.num_labels, (batch_size,), generator=draw)
        return {"pixel_values": pixels.to(dtype), "labels": labels}

    return make_batch


# The first kind that knows the configuration is taken: some encoders can also be built as decoders, and are not meant.
KINDS = (
    Kind("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", _tokens),
    Kind("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", _tokens),
    Kind("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", _tokens),
    Kind("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", _images),
)


def build_step(name: str, wishes: Wishes) -> Step:
    """The step of the configuration class ``name``. Raises :class:`InvalidSubject`; builds the model in main memory."""
    library = _transformers()
    # It warns of token ids and loss names that matter to text and checkpoints, and there is neither here.
    library.logging.set_verbosity_error()
    config_class = _config_class(library, name)
    config = _configure(config_class, wishes.config)
    kind = _kind(library, config_class)
    dtype = wishes.dtype or torch.float32
    make_batch = kind.make_batch(config, dtype)
    batch = make_batch(wishes.batch or BATCH, wishes.sequence)
    build = getattr(library, kind.auto).from_config
    _check_settings(lambda: build(config, dtype=dtype), name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = build(config, dtype=dtype).train()
    make_optimizer = wishes.optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE))
    return Step(model, batch, optimizer=make_optimizer(model.parameters()), make_batch=make_batch)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InvalidSubject(
            f"the SUBJECT names a configuration of transformers, which cannot be imported: {error}. "
            "Install it: pip install 'regrad[hf]'."
        ) from None
    return transformers


def _config_class(library: Any, name: str) -> Any:
    found = getattr(library, name, None)
    if isinstance(found, type) and issubclass(found, library.PreTrainedConfig):
        return found
    known = [other for other in dir(library) if other.endswith("Config")]
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"Did you mean {' or '.join(close)}?" if close else "Write a class such as GPT2Config or LlamaConfig."
    what = "has no" if found is None else "has, but not as a model configuration,"
    raise InvalidSubject(f"transformers {library.__version__} {what} {name!r}. {hint}")


def _configure(config_class: Any, overrides: Mapping[str, str]) -> Any:
    plain = config_class()
    for key in overrides:
        if not hasattr(plain, key):
            close = difflib.get_close_matches(key, [n for n in vars(plain) if not n.startswith("_")], n=3)
            hint = (
                f"Did you mean {' or '.join(close)}?" if close else f"print({config_class.__name__}()) shows them all."
            )
            raise InvalidSubject(f"--config {key}: {config_class.__name__} has no such setting. {hint}")
    values = {key: read_value(text) for key, text in overrides.items()}
    try:
        config = config_class(**values)
    except Exception as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in values.items())
        raise InvalidSubject(f"{config_class.__name__}({shown}) is refused by transformers: {error}") from error
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # checkpoints bring it, plain configurations of some classes do not
    return config


def _kind(library: Any, config_class: Any) -> Kind:
    for kind in KINDS:
        if config_class in getattr(library, kind.mapping):
            return kind
    kinds = ", ".join(kind.auto for kind in KINDS)
    raise InvalidSubject(
        f"{config_class.__name__} is in none of the families that can be built here ({kinds}). "
        "Write a factory that builds the model and its batch, and give FILE:FACTORY."
    )


def _check_settings(build: Callable[[], torch.nn.Module], name: str) -> None:
    """Refuse settings that make no model, and weights that do not fit into memory, before anything is allocated."""
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        raise InvalidSubject(
            f"transformers cannot build a model from {name} with these settings: {type(error).__name__}: {error}. "
            "Change them with --config KEY=VALUE."
        ) from error
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    available = available_bytes()
    if needed > available:
        raise InvalidSubject(
            f"the weights of {name} with these settings are {format_bytes(needed)} ({needed:,} bytes) and "
            f"{format_bytes(available)} of memory can be had; planning builds the model. Make it smaller, "
            "for example with --config num_hidden_layers=4 or --dtype bf16."
        )
