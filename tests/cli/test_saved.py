"""``regrad saved``: the list as text and as JSON, and what it refuses."""

from __future__ import annotations

import pytest

import regrad as package


def test_json(regrad, subjects):
    said = regrad("saved", f"{subjects}:step", "--json")
    assert said.exit_code == 0, said.err
    answer = said.answer
    assert set(answer) == {"regrad", "command", "subject", "device", "saved"}
    assert (answer["regrad"], answer["command"], answer["device"]) == (package.__version__, "saved", "cpu")
    saved = answer["saved"]
    kept = [one for one in saved["storages"] if one["category"] == "activations"]
    assert saved["activation_bytes"] == sum(one["bytes"] for one in kept)
    assert all(one["saves"] for one in saved["storages"])
    assert {"node", "what", "index", "name", "shape", "dtype", "view", "module", "where"} == set(kept[0]["saves"][0])
    totals = {one["module"]: one for one in saved["modules"]}
    assert totals[""]["total_bytes"] == saved["activation_bytes"]
    assert any(name.startswith("blocks.") for name in totals)


def test_text(regrad, subjects):
    said = regrad("saved", f"{subjects}:step")
    assert said.exit_code == 0, said.err
    for words in ("autograd keeps", "saved its argument", "cli_subjects.py:", "with what is in it", "blocks.*"):
        assert words in said.out


def test_a_larger_batch_keeps_more(regrad, subjects):
    def kept(batch: int) -> int:
        return int(
            regrad("saved", f"{subjects}:step", "--batch", str(batch), "--json").answer["saved"]["activation_bytes"]
        )

    assert kept(64) == 2 * kept(32) > 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("saved", "absent.py:step"), 2, "absent.py"),
        (("saved", "step"), 2, "FILE:FACTORY"),
        (("saved",), 2, ""),
    ],
)
def test_bad_input(regrad, words, code, message):
    said = regrad(*words)
    assert (said.exit_code, said.out) == (code, "")
    assert message in said.err


def test_a_model_that_raises(regrad, subjects):
    said = regrad("saved", f"{subjects}:broken", "--json")
    assert said.exit_code == 3
    assert said.answer["error"]["type"] == "ArithmeticError"
