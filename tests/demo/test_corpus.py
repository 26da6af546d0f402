"""The corpus is real text, the same in every process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regrad.core.errors import InvalidSubject
from regrad.demo.corpus import CORPUS_BYTES, Batches, read_corpus


def test_it_is_the_standard_library() -> None:
    text = read_corpus()
    assert len(text) == CORPUS_BYTES
    assert CORPUS_BYTES >= 2 * 2**20
    for line in (b"class ArgumentParser(", b"class Future:", b"import sys\n", b"def main("):
        assert line in text, line
    readable = sum(byte in b"\t\n\r" or 32 <= byte < 127 for byte in text)
    assert readable / len(text) > 0.99
    assert len(set(text)) > 90
    assert b"site-packages" not in text[:1000]


def test_another_process_reads_the_same() -> None:
    program = (
        "import hashlib; from regrad.demo.corpus import read_corpus; print(hashlib.sha256(read_corpus()).hexdigest())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    import hashlib

    assert there.stdout.strip() == hashlib.sha256(read_corpus()).hexdigest()


def test_order_and_what_is_left_out(tmp_path: Path) -> None:
    for name, text in {
        "b.py": "bb",
        "a/z.py": "zz",
        "a/test/t.py": "no",
        "site-packages/x.py": "no",
        "c.txt": "no",
        "c.py": "cc",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_corpus(6, tmp_path) == b"zzbbcc"
    assert read_corpus(3, tmp_path) == b"zzb"
    with pytest.raises(InvalidSubject, match=r"hold 6 bytes, the demo reads 7"):
        read_corpus(7, tmp_path)


def test_batches() -> None:
    text = bytes(range(256)) * 4
    batches = Batches(text, batch_size=3, sequence=10, seed=1)
    tokens, targets = batches[5]
    assert tokens.shape == targets.shape == (3, 10)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal((tokens + 1) % 256, targets)
    assert torch.equal(batches[5][0], tokens)
    assert not torch.equal(batches[6][0], tokens)
    assert not torch.equal(Batches(text, 3, 10, seed=2)[5][0], tokens)
    with pytest.raises(InvalidSubject, match="too short"):
        Batches(b"short", 1, 10)


def test_batches_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    Batches(bytes(1000), 2, 10)[0]
    assert torch.equal(torch.get_rng_state(), before)
