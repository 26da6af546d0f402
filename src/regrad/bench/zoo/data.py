"""Real data that a development machine has: the sources of Python's standard library, scikit-learn's digits."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F

from regrad.core.errors import InvalidSubject

VOCABULARY = 256
TEXT_BYTES = 1 << 18


@functools.cache
def _text() -> torch.Tensor:
    folder = Path(sysconfig.get_path("stdlib"))
    found = bytearray()
    for path in sorted(folder.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= TEXT_BYTES:
            return torch.frombuffer(found[:TEXT_BYTES], dtype=torch.uint8)
    raise InvalidSubject(
        f"the Python sources in {folder} hold {len(found):,} bytes, the models of text read {TEXT_BYTES:,}. Is the "
        "standard library installed without its sources?"
    )


def text(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of text and the bytes that follow each: two int64 tensors [batch, length], below 256.

    The places are drawn from the global generator.
    """
    starts = torch.randint(TEXT_BYTES - length - 1, (batch, 1))
    places = starts + torch.arange(length)
    return _text()[places].long(), _text()[places + 1].long()


def digits(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``count`` handwritten digits, at most 1,797: images [count, 1, size, size] in [0, 1] and labels [count].

    They are 8 × 8 and scaled up. Raises :class:`InvalidSubject` without scikit-learn, or if there are not as many.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidSubject(
            f"the models of images read scikit-learn's digits, which cannot be imported: {error}. "
            "Install it: pip install 'regrad[dev]'."
        ) from None
    found = load_digits()
    if count > len(found.images):
        raise InvalidSubject(f"{count:,} digits were asked for, scikit-learn has {len(found.images):,}")
    images = torch.tensor(found.images[:count], dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target[:count], dtype=torch.int64)
    return F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False), labels
