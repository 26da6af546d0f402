"""The SUBJECT ``transformers:CONFIGCLASS``: a model of random weights and a batch of random data for it.

In place of a class the path of a configuration file (``config.json``, as checkpoints have beside them) may be given.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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
        if longest is not None and length > longest and not _rotates(config):
            raise InvalidSubject(
                f"--sequence {length} is longer than the {longest} positions that {type(config).__name__} has. "
                f"Ask for at most {longest}, or give --config max_position_embeddings={length}."
            )
        draw = torch.Generator().manual_seed(SEED)
        ids = torch.randint(config.vocab_size, (batch_size, length), generator=draw)
        return {"input_ids": ids, "labels": ids.clone()}

    return make_batch


def _rotates(config: Any) -> bool:
    """Whether positions are angles, computed for any length, and not rows of a table that ends somewhere."""
    return bool(getattr(config, "rope_parameters", None))


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
    """The step of the configuration class, or configuration file, ``name``.

    Raises :class:`InvalidSubject`. The model is built in main memory; with ``wishes.without_bytes`` under fake tensors,
    so that its size does not matter.
    """
    library = _transformers()
    # It warns of token ids and loss names that matter to text and checkpoints, and there is neither here.
    library.logging.set_verbosity_error()
    config = configuration(library, name, wishes.config)
    kind = _kind(library, type(config))
    dtype = wishes.dtype or torch.float32
    make_batch = kind.make_batch(config, dtype)
    batch = make_batch(wishes.batch or BATCH, wishes.sequence)
    build = getattr(library, kind.auto).from_config
    if not wishes.without_bytes:
        _check_room(_refusing(lambda: build(config, dtype=dtype), name, torch.device("meta")), name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        mode = FakeTensorMode() if wishes.without_bytes else contextlib.nullcontext()
        model = _refusing(lambda: build(config, dtype=dtype), name, mode).train()
    make_optimizer = wishes.optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE))
    return Step(model, batch, optimizer=make_optimizer(model.parameters()), make_batch=make_batch)


def configuration(library: Any, name: str, overrides: Mapping[str, str]) -> Any:
    """The configuration that ``name``, a class or a file, stands for, with settings changed."""
    if name.endswith(".json") or Path(name).is_dir():
        file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        config_class, settings = _read_file(library, file)
    else:
        config_class, settings = _config_class(library, name), {}
    return _configure(config_class, settings, overrides)


def _read_file(library: Any, file: Path) -> tuple[Any, dict[str, Any]]:
    """The class and the settings of a configuration file. Nothing is fetched, whatever it names."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSubject(f"{file} cannot be read: {error.strerror}. Give the path of a config.json.") from error
    except ValueError as error:
        raise InvalidSubject(f"{file} is not JSON: {error}. Give a configuration file of transformers.") from error
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not kind:
        raise InvalidSubject(
            f'{file} does not say which model it configures: it has no "model_type". Add one, such as '
            '"model_type": "llama", or name a class: transformers:LlamaConfig with --config KEY=VALUE.'
        )
    known = library.CONFIG_MAPPING
    if kind not in known:
        close = difflib.get_close_matches(str(kind), list(known.keys()), n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise InvalidSubject(f"{file}: transformers {library.__version__} has no model_type {kind!r}.{hint}")
    return known[kind], {key: value for key, value in settings.items() if key != "model_type"}


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


def _configure(config_class: Any, settings: Mapping[str, Any], overrides: Mapping[str, str]) -> Any:
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
        config = config_class(**{**settings, **values})
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


def _refusing(build: Callable[[], torch.nn.Module], name: str, where: Any) -> torch.nn.Module:
    """The model, built under ``where``; settings that make no model are refused as such."""
    try:
        with where:
            return build()
    except Exception as error:
        raise InvalidSubject(
            f"transformers cannot build a model from {name} with these settings: {type(error).__name__}: {error}. "
            "Change them with --config KEY=VALUE."
        ) from error


def _check_room(model: torch.nn.Module, name: str) -> None:
    """Refuse weights that do not fit into memory before anything is allocated."""
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    available = available_bytes()
    if needed > available:
        raise InvalidSubject(
            f"the weights of {name} with these settings are {format_bytes(needed)} ({needed:,} bytes) and "
            f"{format_bytes(available)} of memory can be had; planning builds the model. Make it smaller, "
            "for example with --config num_hidden_layers=4 or --dtype bf16, or plan for a device (--device h100-80gb), "
            "for which it is built without bytes."
        )
