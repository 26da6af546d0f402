"""``regrad estimate``: the figures of the textbooks, models by trace, and what it refuses."""

from __future__ import annotations

import json

import pytest

import regrad as package
from regrad.cli.estimate import read_count

ALEXNET = ("estimate", "--parameters", "61e6", "--dtype", "fp32", "--json")
TINY = ("--config", "num_hidden_layers=3", "--config", "hidden_size=64", "--config", "num_attention_heads=4")
TINY_LLAMA = (*TINY, "--config", "intermediate_size=128", "--config", "vocab_size=128")
SHAPE = ("--layers", "2", "--hidden", "256", "--heads", "4", "--batch", "4", "--sequence", "512")


@pytest.mark.parametrize(("optimizer", "megabytes"), [("sgd", 488), ("momentum", 732), ("adam", 976)])
def test_alexnet(regrad, optimizer, megabytes):
    answer = regrad(*ALEXNET, "--optimizer", optimizer).answer
    assert answer["parameter_memory_bytes"] == megabytes * 10**6
    assert answer["estimate"]["parameter_memory_bytes"] == megabytes * 10**6
    assert answer["inference_bytes"] == 244 * 10**6
    assert (answer["regrad"], answer["command"]) == (package.__version__, "estimate")
    assert (answer["subject"], answer["device"]) == ("61e6 parameters", None)


def kept_by_a_layer(regrad, *words):
    blocks = regrad("estimate", *words, "--dtype", "bf16", "--json").answer["estimate"]["blocks"]
    return blocks[0]["activation_bytes"]


def test_gpt_3s_layer(regrad):
    shape = ("--layers", "96", "--hidden", "12288", "--heads", "96", "--sequence", "2048", "--batch", "1")
    unit = 2048 * 12288
    assert kept_by_a_layer(regrad, *shape) == (34 + 80) * unit
    assert kept_by_a_layer(regrad, *shape, "--recompute", "selective") == 34 * unit
    assert kept_by_a_layer(regrad, *shape, "--recompute", "full") == 2 * unit
    assert kept_by_a_layer(regrad, *shape, "--tensor", "8") == (10 + 24 / 8 + 80 / 8) * unit
    assert kept_by_a_layer(regrad, *shape, "--tensor", "8", "--sequence-parallel") == (34 + 80) / 8 * unit


def test_a_layer_of_another_kind(regrad):
    fused = kept_by_a_layer(regrad, *SHAPE, "--attention", "fused", "--no-dropout")
    assert fused == (32 + 4 * 4 / 256) * 4 * 512 * 256
    gated = ("--mlp", "swiglu", "--norm", "rms", "--attention", "fused", "--no-dropout")
    assert kept_by_a_layer(regrad, *SHAPE, *gated) == (60 + 4 * 4 / 256) * 4 * 512 * 256


def test_zero_and_master_weights(regrad):
    words = ("estimate", "--parameters", "8e6", "--dtype", "bf16", "--optimizer", "adam", "--master-weights", "--json")
    assert regrad(*words).answer["parameter_memory_bytes"] == 16 * 8_000_000
    assert regrad(*words, "--data", "4", "--zero", "1").answer["parameter_memory_bytes"] == (4 + 12 // 4) * 8_000_000
    assert regrad(*words, "--data", "4", "--zero", "3").answer["parameter_memory_bytes"] == 4 * 8_000_000


def test_text(regrad):
    said = regrad("estimate", *SHAPE, "--device", "t4")
    assert said.exit_code == 0, said.err
    flat = " ".join(said.out.split())
    for words in (
        "training peak",
        "inference peak",
        "at the peak",
        "AdamW (this one)",
        "not validated on hardware",
        "fits",
    ):
        assert words in flat


def test_a_model_of_transformers_by_trace(regrad):
    said = regrad("estimate", "transformers:LlamaConfig", "--batch", "2", "--sequence", "32", *TINY_LLAMA, "--json")
    assert said.exit_code == 0, said.err
    answer = said.answer
    found = answer["estimate"]
    assert (answer["device"], found["method"], found["optimizer"]) == ("cpu", "fake trace", "adamw")
    assert answer["peak_bytes"] == found["training"]["peak_bytes"]
    names = [block["name"] for block in found["blocks"]]
    assert "model.layers.0 … 2" in names
    assert found["comparison"]["textbook_bytes"] == 2 * 32 * 64 * (34 + 5 * 4 * 32 // 64)
    assert all(one["why"] for one in found["comparison"]["differences"] if one["trace_bytes"] != one["formula_bytes"])
    assert {choice["name"] for choice in found["optimizers"]} >= {"sgd", "adamw-8bit", "adafactor"}


def test_a_configuration_file(regrad, tmp_path):
    settings = {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 128,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    words = ("--batch", "2", "--sequence", "32", "--json")
    by_class = regrad("estimate", "transformers:LlamaConfig", *TINY_LLAMA, *words).answer
    for subject in (str(file), f"transformers:{file}", f"transformers:{tmp_path}"):
        said = regrad("estimate", subject, *words)
        assert said.exit_code == 0, said.err
        assert said.answer["peak_bytes"] == by_class["peak_bytes"]


def test_a_factory_beside_the_formula(regrad, subjects):
    said = regrad("estimate", f"{subjects}:step", "--batch", "64", "--device", "l4", "--json")
    assert said.exit_code == 0, said.err
    found = said.answer["estimate"]
    assert said.answer["device"] == "l4"
    assert found["device"]["validated_on_hardware"] is False
    assert found["usable_bytes"] == found["device"]["usable_bytes"] > found["reserved_peak_bytes"] > 0
    assert found["fits"] is said.answer["fits"] is True
    assert found["comparison"] is None


BLOCKS = """
import torch
import torch.nn.functional as F
from torch import nn
import regrad.torch as rt
from regrad.bench.zoo.attention import GPT, MLP, Block, FusedAttention, GatedMLP

WIDTH, HEADS, BATCH, LENGTH = 256, 4, 4, 512  # a·s/h = 8

class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), GatedMLP(WIDTH, 4 * WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
    def forward(self, x):
        y = self.first(x)
        heads = (f(y).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))

def step(kind):
    model = GPT(WIDTH, HEADS, LENGTH, 3, dropout=0.1 if kind == "dropout" else 0.0)
    if kind == "fused":
        model.blocks = nn.ModuleList(Block(WIDTH, FusedAttention(WIDTH, HEADS, True), MLP(WIDTH)) for _ in range(3))
    if kind == "llama":
        model.blocks = nn.ModuleList(Llama() for _ in range(3))
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return rt.Step(model.bfloat16(), (tokens, tokens))
"""


@pytest.mark.parametrize(
    ("kind", "words", "formula", "trace"),
    [
        ("dropout", (), 84, 84.5),
        ("plain", (), 48, 48.5),
        ("fused", (), 32, 32.1),
        ("llama", ("--mlp", "swiglu", "--norm", "rms"), 60, 60.1),
        ("dropout", ("--device", "h100-80gb"), 74, 74.5),
    ],
)
def test_formula_beside_trace(regrad, tmp_path, kind, words, formula, trace):
    file = tmp_path / "blocks_subject.py"
    file.write_text(BLOCKS)
    shape = ("--hidden", "256", "--heads", "4", "--config", f"kind={kind}", "--json")
    said = regrad("estimate", f"{file}:step", *shape, *words)
    assert said.exit_code == 0, said.err
    found = said.answer["estimate"]["comparison"]
    assert found["textbook_ratio"] == 74
    assert (round(found["formula_ratio"]), round(found["trace_ratio"], 1)) == (formula, trace)


VALUES = """
import torch
from torch import nn
import regrad.torch as rt

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        y = self.linear(x)
        return (y * 2 if y.sum().item() > 0 else y).square().mean()

def step():
    return rt.Step(Branching(), torch.ones(4, 8))
"""


def test_a_model_that_needs_values(regrad, tmp_path):
    file = tmp_path / "branching_subject.py"
    file.write_text(VALUES)
    said = regrad("estimate", f"{file}:step", "--json")
    assert said.exit_code == 0, said.err
    assert said.answer["estimate"]["method"] == "trace"
    assert any("a real step was run on a copy and measured" in note for note in said.answer["estimate"]["notes"])


@pytest.mark.parametrize(
    ("text", "count"), [("61e6", 61_000_000), ("7B", 7 * 10**9), ("1.5b", 1_500_000_000), ("125_000,000", 125_000_000)]
)
def test_counts(text, count):
    assert read_count(text) == count


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to estimate"),
        (("--parameters", "many"), "many"),
        (("--parameters", "1.5"), "1.5"),
        (("--parameters", "0"), "0"),
        (("--parameters", "1e6", *SHAPE), "leave out one"),
        (("--layers", "2"), "--hidden and --heads are missing"),
        (("--layers", "2", "--hidden", "8"), "--heads is missing"),
        (("--hidden", "8", "--heads", "2"), "--layers is missing"),
        (("--layers", "2", "--hidden", "8", "--heads", "2", "--batch", "1"), "--sequence"),
        (("--layers", "2", "--hidden", "9", "--heads", "2", "--batch", "1", "--sequence", "8"), "does not divide"),
        ((*SHAPE, "--tensor", "3"), "do not divide by 3"),
        ((*SHAPE, "--zero", "2"), "ZeRO stage 2"),
        ((*SHAPE, "--sequence-parallel"), "sequence parallelism"),
        (("--parameters", "1e6", "--device", "h1000"), "Did you mean"),
        (("--parameters", "1e6", "--device-memory", "24 GX"), "GX"),
        (("--parameters", "1e6", "--device-memory", "100 MiB"), "no room"),
        (("--parameters", "1e6", "--master-weights"), "own master weights"),
        (("--parameters", "1e6", "--dtype", "fp8"), "fp8"),
        (("--parameters", "1e6", "--optimizer", "lion"), "lion"),
        (("absent.py:step",), "absent.py"),
        (("absent.json",), "absent.json"),
        (("transformers:LlamaConfig", "--zero", "1", "--data", "2"), "a formula answers that"),
        (("transformers:LlamaConfig", "--optimizer", "adamw-8bit"), "adamw-8bit"),
        (("transformers:LlamaConfigs",), "LlamaConfig"),
        (("transformers:GPT2Config", "--sequence", "4096"), "1024 positions"),
        (
            ("transformers:LlamaConfig", *TINY_LLAMA, "--optimizer", "sgd", "--optimizer-dtype", "bf16"),
            "adam and adamw",
        ),
    ],
)
def test_bad_input(regrad, words, message):
    said = regrad("estimate", *words)
    assert (said.exit_code, said.out) == (2, "")
    assert message in " ".join(said.err.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "model_type"),
        ("[]", "model_type"),
        ('{"model_type": "lama"}', "Did you mean llama"),
        ('{"model_type": "llama", "num_attention_heads": 7}', "7"),
        ('{"model_type": "clip_vision_model"}', "none of the families"),
    ],
)
def test_configuration_files_that_name_no_model(regrad, tmp_path, text, message):
    file = tmp_path / "config.json"
    file.write_text(text)
    said = regrad("estimate", str(file))
    assert (said.exit_code, said.out) == (2, "")
    assert message in " ".join(said.err.split())


def test_a_model_that_raises(regrad, subjects):
    said = regrad("estimate", f"{subjects}:broken", "--json")
    assert said.exit_code == 3
    assert said.answer["error"]["type"] == "ArithmeticError"
