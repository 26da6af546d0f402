"""``regrad estimate``: what a training step takes, from a model by trace or from bare numbers by formula."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from regrad.cli import names, options
from regrad.cli.output import Answer, Report, answering, progress_bar
from regrad.core.codec import plain
from regrad.core.errors import UsageError
from regrad.memory.devices import Device, as_device
from regrad.memory.estimate import Estimate
from regrad.memory.formula import Numbers, estimate_numbers
from regrad.memory.optimizers import RULES, element_bytes
from regrad.memory.transformer import Layer, Model, Split
from regrad.report.estimate import estimate_report

_COUNT = re.compile(r"^(\d+(?:\.\d+)?)(e\d{1,2})?\s*([kmbt]?)$")
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def _shape(words: str, **more: Any) -> Any:
    return typer.Option(help=words, rich_help_panel="shape of the layers", **more)


def _spread(words: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=words, rich_help_panel="spread over devices", **more)


Subject = Annotated[str | None, typer.Argument(metavar="[SUBJECT]", help="As of plan, or a config.json; or none.")]
Parameters = Annotated[str | None, typer.Option(help="How many, such as 61e6, 7B or 125000000.")]
OptimizerName = Annotated[
    Literal["sgd", "momentum", "adam", "adamw", "adamw-8bit", "adafactor"] | None,
    typer.Option(help="Its state counts.", show_default="adamw"),
]
Master = Annotated[bool, typer.Option("--master-weights", help="An FP32 copy beside 16-bit weights.")]
Layers = Annotated[int | None, _shape("Layers.", min=1)]
Hidden = Annotated[int | None, _shape("Hidden size.", min=1)]
Heads = Annotated[int | None, _shape("Attention heads.", min=1)]
KeyHeads = Annotated[int | None, _shape("Heads of key and value.", min=1)]
Inner = Annotated[int | None, _shape("Width of the MLP.", min=1, show_default="4 x hidden")]
Vocabulary = Annotated[int, _shape("Tokens; 0: no embedding and no head.", min=0)]
Mlp = Annotated[Literal["gelu", "swiglu"], _shape("Kind of the MLP.")]
Norm = Annotated[Literal["layer", "rms", "rms-rounded"], _shape("Kind of the norms.")]
Attention = Annotated[Literal["unfused", "fused"], _shape("How attention is computed.")]
Dropout = Annotated[bool, _shape("Whether there is any.")]
Recompute = Annotated[Literal["none", "selective", "full"], _shape("What of a layer is computed again.")]
Tensor = Annotated[int, _spread("Tensor-parallel devices.", min=1)]
SequenceParallel = Annotated[bool, _spread("The sequence too, beside --tensor.", "--sequence-parallel")]
Data = Annotated[int, _spread("Data-parallel devices.", min=1)]
Zero = Annotated[int, _spread("ZeRO stage.", min=0, max=3)]


def estimate(
    subject: Subject = None,
    parameters: Parameters = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    kv_heads: KeyHeads = None,
    inner: Inner = None,
    vocabulary: Vocabulary = 0,
    mlp: Mlp = "gelu",
    norm: Norm = "layer",
    attention: Attention = "unfused",
    dropout: Dropout = True,
    recompute: Recompute = "none",
    tensor: Tensor = 1,
    sequence_parallel: SequenceParallel = False,
    data: Data = 1,
    zero: Zero = 0,
    batch: options.BatchSize = None,
    sequence: options.SequenceLength = None,
    dtype: options.Dtype = None,
    optimizer: OptimizerName = None,
    optimizer_dtype: options.OptimizerDtype = None,
    master_weights: Master = False,
    device: options.DeviceName = None,
    device_memory: options.DeviceMemory = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """What a training step takes, by category, by block and by optimizer, beside an inference.

    Of a SUBJECT a step is recorded without its memory; models of transformers are built without bytes. Without one, bare
    numbers are put into published formulas: --parameters alone, or --layers, --hidden and --heads with --batch and
    --sequence. Batches are those of one device.
    """
    shape = _Shape(layers, hidden, heads, kv_heads, inner, vocabulary, mlp, norm, attention, dropout, parameters)
    training = _Training(batch, sequence, dtype, optimizer, optimizer_dtype, master_weights, recompute)
    with answering(Answer("estimate", subject or shape.title(), as_json)) as answer:
        target = as_device(device, device_memory)
        settings = options.read_config(config)
        split = Split(tensor, sequence_parallel, data, zero)
        if subject is None:
            found = _by_formula(shape, training, split, target)
        else:
            _only_by_formula(shape, training, split)
            with progress_bar() as report:
                found = _by_trace(subject, training, settings, shape, target, report)
            answer.device = "cpu"
        answer.device = target.name if target is not None else answer.device
        answer.body = _body(found)
        answer.shown = [estimate_report(found)]


@dataclass(frozen=True)
class _Training:
    """How the model is trained, as it was given."""

    batch: int | None
    sequence: int | None
    dtype: names.DtypeName | None
    optimizer: str | None
    optimizer_dtype: names.DtypeName | None
    master_weights: bool
    recompute: str


@dataclass(frozen=True)
class _Shape:
    """The numbers that describe a model, as they were given."""

    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    inner: int | None
    vocabulary: int
    mlp: str
    norm: str
    attention: str
    dropout: bool
    parameters: str | None

    def title(self) -> str:
        """What stands in the place of a SUBJECT."""
        if self.parameters is not None:
            return f"{self.parameters} parameters"
        given = (("layers", self.layers), ("hidden", self.hidden), ("heads", self.heads))
        return ", ".join(f"{name} {value}" for name, value in given if value is not None) or "nothing"

    def layer(self, element_bytes: int = 2) -> Layer | None:
        """The layer; None where its size was not given. Raises :class:`UsageError` if half of it was."""
        if self.hidden is None and self.heads is None:
            return None
        if self.hidden is None or self.heads is None:
            missing = "--hidden" if self.hidden is None else "--heads"
            raise UsageError(f"a layer is described by its hidden size and its heads; {missing} is missing.")
        return Layer(
            self.hidden, self.heads, self.kv_heads or 0, self.inner or 0, self.mlp == "swiglu", self.norm, self.attention,
            self.dropout, element_bytes,
        )  # fmt: skip

    def model(self, element_bytes: int, sequence: int) -> Model | None:
        """The model; None where only a count of parameters was given."""
        layer = self.layer(element_bytes)
        if layer is None and self.layers is None:
            return None
        if layer is None or self.layers is None:
            missing = "--layers is" if layer is not None else "--hidden and --heads are"
            raise UsageError(f"a model is described by --layers, --hidden and --heads; {missing} missing.")
        # Learned positions and biases are those of GPT; models with root-mean-square norms have neither.
        plain = self.norm == "layer"
        return Model(layer, self.layers, self.vocabulary, sequence if plain and self.vocabulary else 0, biases=plain)


def _by_formula(shape: _Shape, training: _Training, split: Split, target: Device | None) -> Estimate:
    dtype, batch, sequence = training.dtype or "fp32", training.batch, training.sequence
    model = shape.model(element_bytes(dtype), sequence or 1)
    if model is not None and (batch is None or sequence is None):
        missing = " and ".join(name for name, value in (("--batch", batch), ("--sequence", sequence)) if value is None)
        raise UsageError(f"activations are in proportion to batch and sequence: give {missing} as well.")
    if model is not None and shape.parameters is not None:
        raise UsageError(
            "--parameters counts what --layers, --hidden and --heads give already: leave out one of the two."
        )
    if model is None and shape.parameters is None:
        raise UsageError(
            "there is nothing to estimate. Give a SUBJECT (transformers:GPT2Config, train.py:make_step, a config.json), "
            "--parameters 7e9, or --layers, --hidden, --heads, --batch and --sequence."
        )
    numbers = Numbers(
        parameters=0 if shape.parameters is None else read_count(shape.parameters),
        model=model,
        batch=batch or 1,
        sequence=sequence or 1,
        dtype=dtype,
        optimizer=training.optimizer or "adamw",
        optimizer_dtype=training.optimizer_dtype,
        master_weights=training.master_weights,
        split=split,
        recompute=training.recompute,
    )
    return estimate_numbers(numbers, target)


def read_count(text: str) -> int:
    """``"61e6"``, ``"7B"``, ``"125_000_000"`` as a whole number of 1 or more. Raises :class:`UsageError`."""
    match = _COUNT.match(text.strip().lower().replace("_", "").replace(",", ""))
    if match is not None:
        value = float(match[1] + (match[2] or "")) * _SCALE[match[3]]
        if 1 <= value == int(value) <= 10**16:
            return int(value)
    raise UsageError(f"cannot read {text!r} as a number of parameters: write 61e6, 7B or 125000000.")


def _only_by_formula(shape: _Shape, training: _Training, split: Split) -> None:
    """Refuse, beside a SUBJECT, what only a formula can answer."""
    told = {
        "--parameters": shape.parameters is not None,
        "--layers": shape.layers is not None,
        "--tensor": split.tensor > 1,
        "--data": split.data > 1,
        "--recompute": training.recompute != "none",
        "--master-weights": training.master_weights,
    }
    given = [name for name, is_given in told.items() if is_given]
    if given:
        raise UsageError(
            f"{', '.join(given)}: a formula answers that, and a SUBJECT is traced. Leave out the SUBJECT and describe the "
            "model by --layers, --hidden and --heads."
        )
    if training.optimizer in RULES and training.optimizer not in names.OPTIMIZERS:
        raise UsageError(
            f"a traced step cannot run {training.optimizer}; every estimate of a model shows it beside the others. "
            f"Trace with one of {', '.join(names.OPTIMIZERS)}."
        )


def _by_trace(
    subject: str,
    training: _Training,
    settings: dict[str, str],
    shape: _Shape,
    target: Device | None,
    report: Report,
) -> Estimate:
    import regrad.torch as rt
    from regrad.torch.moments import with_moments
    from regrad.torch.subject import Wishes, with_subject

    chosen = next((name for name in names.OPTIMIZERS if name == training.optimizer), None)
    optimizer = with_moments(names.optimizer(chosen), names.dtype(training.optimizer_dtype))
    dtype = names.dtype(training.dtype)
    wishes = Wishes(training.batch, training.sequence, dtype, optimizer, settings, without_bytes=True)
    report("building the model", 0.0)
    return with_subject(
        subject, wishes, lambda step: rt.estimate(step, device=target, layer=shape.layer(), progress=report)
    )


def _body(found: Estimate) -> dict[str, Any]:
    """The estimate, its headline figures once more on top, and what a block keeps over s·b·h."""
    body = plain(found)
    if found.device is not None:
        body["device"] = found.device.facts()
    if found.comparison is not None:
        for name in ("textbook", "formula", "trace"):
            kept = getattr(found.comparison, f"{name}_bytes")
            body["comparison"][f"{name}_ratio"] = found.comparison.over_unit(kept)
    return {
        "parameter_memory_bytes": found.parameter_memory_bytes,
        "peak_bytes": found.peak_bytes,
        "inference_bytes": found.inference.peak_bytes,
        "fits": found.fits,
        "estimate": body,
    }
