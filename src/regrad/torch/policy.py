"""What a plan may do: recompute, pack, move elsewhere; and which torch calls it must leave alone."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from regrad.core.errors import InvalidPolicy
from regrad.torch.offload import FilePlace, HostPlace, Place

HOST = "host"
_MOST_NAMES = 40


@dataclass(frozen=True)
class Policy:
    """What a plan may do to make a step fit.

    recompute  run segments, or ranges of torch calls, again in the backward
    pack       hold saved tensors in fewer bytes where that is exact: masks and signs as bits, indices in narrower integers;
               and keep what dropout draws in a range as bits
    offload    where saved tensors may be moved to: "host" (its memory, for a step on CUDA) or a folder; None is nowhere
    keep       torch calls that are neither recomputed nor moved, by the last part of their names in ``plan.calls``:
               "linear", "scaled_dot_product_attention", "softmax"

    What is allowed is not done for its own sake: each way is taken where it is the cheapest that fits.
    """

    recompute: bool = True
    pack: bool = True
    offload: str | None = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keep: Any = self.keep
        if isinstance(keep, str):
            raise InvalidPolicy(f'keep={keep!r} is one text; give a tuple of names, such as ("linear",)')
        object.__setattr__(self, "keep", tuple(keep))
        if self.offload is not None:
            object.__setattr__(self, "offload", os.fspath(self.offload))

    def keeps(self, call: str) -> bool:
        """Whether the torch call of this name is left alone."""
        return call in self.keep or short_name(call) in self.keep

    def check(self, calls: tuple[str, ...], device: str) -> None:
        """Raise :class:`InvalidPolicy` for names that ``calls`` does not hold, and for a place that saves nothing on
        ``device``; :class:`InvalidPlace` for one that takes nothing."""
        self._check_names(calls)
        if self.offload == HOST and device != "cuda":
            raise InvalidPolicy(
                f'offload="host": the step runs on {device}, so its tensors are in that memory. Name a folder.'
            )
        place = self.place
        if place is not None:
            place.check()

    @property
    def place(self) -> Place | None:
        """Where moved tensors go."""
        if self.offload is None:
            return None
        return HostPlace() if self.offload == HOST else FilePlace(self.offload)

    def _check_names(self, calls: tuple[str, ...]) -> None:
        if self.keep and not calls:
            raise InvalidPolicy(
                f"keep={list(self.keep)}: the torch calls of this step have no numbers, because it does not call the model "
                "itself exactly once. Leave keep out."
            )
        known = sorted({short_name(call) for call in calls})
        for name in self.keep:
            if name not in known and name not in calls:
                near = difflib.get_close_matches(name, known, n=3)
                guess = f" Did you mean {_listed(near, 'or')}?" if near else ""
                raise InvalidPolicy(
                    f"keep names {name!r}, and no torch call of this step is called so.{guess} Its calls are "
                    f"{_listed(known[:_MOST_NAMES])}{' …' if len(known) > _MOST_NAMES else ''}."
                )


DEFAULT = Policy()
"""Recompute and pack; nothing is moved elsewhere."""


def short_name(call: str) -> str:
    """``view`` for ``Tensor.view``."""
    return call.rpartition(".")[2]


def _listed(names: Iterable[str], last: str = "and") -> str:
    *rest, final = names
    return f"{', '.join(rest)} {last} {final}" if rest else final
