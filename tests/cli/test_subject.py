"""From a SUBJECT to a step, without planning it."""

from __future__ import annotations

import pytest
import torch

from regrad.cli import names
from regrad.torch.subject import Wishes, load_subject, read_value


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), ("0.5", 0.5), ("True", True), ("false", False), ("null", None), ("[1, 2]", [1, 2]), ("gelu", "gelu")],
)
def test_values_of_settings(text, value):
    assert read_value(text) == value


@pytest.mark.parametrize("name", names.DTYPES)
def test_every_dtype_of_the_table(name):
    assert isinstance(names.dtype(name), torch.dtype)


@pytest.mark.parametrize("name", names.OPTIMIZERS)
def test_every_optimizer_of_the_table(name):
    make = names.optimizer(name)
    assert make is not None
    assert isinstance(make([torch.nn.Parameter(torch.zeros(2))]), torch.optim.Optimizer)


def test_a_file_can_import_its_neighbour(subjects, tmp_path):
    (tmp_path / "neighbour_of_subject.py").write_text("WIDTH = 3")
    file = tmp_path / "with_neighbour.py"
    file.write_text(
        "import torch, regrad.torch as rt\nfrom neighbour_of_subject import WIDTH\n"
        "def make():\n    return rt.Step(torch.nn.Linear(WIDTH, 1), torch.zeros(1, WIDTH))\n"
    )
    assert load_subject(f"{file}:make").model.in_features == 3


SMALL = {
    "GPT2Config": {"n_layer": "1", "n_embd": "32", "n_head": "2", "vocab_size": "64"},
    "BertConfig": {"num_hidden_layers": "1", "hidden_size": "32", "num_attention_heads": "2", "vocab_size": "64"},
    "T5Config": {"num_layers": "1", "d_model": "32", "d_kv": "16", "num_heads": "2", "d_ff": "32", "vocab_size": "64"},
    "ViTConfig": {"num_hidden_layers": "1", "hidden_size": "32", "num_attention_heads": "2", "image_size": "32"},
}


@pytest.mark.parametrize("name", SMALL)
def test_families_of_transformers_make_a_step(name):
    step = load_subject(f"transformers:{name}", Wishes(batch=2, config=SMALL[name]))
    assert step.model.training
    assert step().isfinite()


def test_the_same_subject_is_the_same_step_and_leaves_the_generator_alone():
    before = torch.get_rng_state()
    wishes = Wishes(batch=2, sequence=8, dtype=torch.bfloat16, config=SMALL["GPT2Config"])
    one, two = (load_subject("transformers:GPT2Config", wishes) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.batch["input_ids"], two.batch["input_ids"])
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(torch.equal(a, b) and a.dtype == torch.bfloat16 for a, b in pairs)
    assert one.batch["input_ids"].shape == (2, 8)
    assert one.make_batch(3, 4)["input_ids"].shape == (3, 4)
