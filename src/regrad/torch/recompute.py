"""The seam between plans and the engine that runs a segment again. Nothing above this file knows which engine it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint


def recompute(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run ``forward(*args, **kwargs)`` keeping only its arguments; its backward runs it again.

    Every tensor argument, however deep it stands in tuples and dicts, goes to the engine as an argument of its own: the
    engine then holds it under autograd's version check, so that an argument that is changed in place afterwards is an
    error and not another result. An argument that is given twice is handed over once, and is one object in the replay
    too: a forward may ask whether its query *is* its key.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    given = {id(leaf): leaf for leaf in leaves}
    place = {identity: position for position, identity in enumerate(given)}
    order = [place[id(leaf)] for leaf in leaves]

    def run(*once: Any) -> Any:
        again_args, again_kwargs = pytree.tree_unflatten([once[position] for position in order], structure)
        return forward(*again_args, **again_kwargs)

    return checkpoint(run, *given.values(), use_reentrant=False, preserve_rng_state=True)
