"""Real text that every machine with Python has: the sources of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from regrad.core.errors import InvalidSubject

CORPUS_BYTES = 4 * 1024 * 1024
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def read_corpus(size_bytes: int = CORPUS_BYTES, root: Path | None = None) -> bytes:
    """The first ``size_bytes`` of the ``.py`` files under ``root``, in the order of their paths.

    ``root`` is the standard library unless given; installed packages and test folders are left out. Raises
    :class:`InvalidSubject` if the files hold less than that.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _sources(root):
        text += path.read_bytes()
        if len(text) >= size_bytes:
            return bytes(text[:size_bytes])
    raise InvalidSubject(
        f"the Python sources under {root} hold {len(text):,} bytes, the demo reads {size_bytes:,}. Is the standard "
        "library installed without its sources?"
    )


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.is_dir() and path.name not in _LEFT_OUT:
            yield from _sources(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


class Batches:
    """Batches of text and the text one byte further on, drawn at places that a seed decides.

    ``batches[i]`` is batch ``i``: two int64 tensors [batch_size, sequence], the same for every reader and whatever was
    read before.
    """

    def __init__(self, text: bytes, batch_size: int, sequence: int, seed: int = 0) -> None:
        if len(text) <= sequence:
            raise InvalidSubject(f"a text of {len(text)} bytes is too short for sequences of {sequence}")
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._shape = (batch_size, sequence)
        self._seed = seed

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch_size, sequence = self._shape
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        starts = torch.randint(len(self._text) - sequence, (batch_size, 1), generator=generator)
        places = starts + torch.arange(sequence)
        return self._text[places].long(), self._text[places + 1].long()
