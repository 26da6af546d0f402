"""The public surface of regions; :mod:`regrad.torch` exports it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from regrad.core.errors import InvalidRegion
from regrad.torch.regions import frames
from regrad.torch.regions.forward import Planned, run
from regrad.torch.regions.kept import retained_bytes
from regrad.torch.regions.region import RegionKept, RegionReport, reports
from regrad.torch.regions.settings import AUTO, Settings, StateSpec

_disabled: Callable[..., Any] | None = None


def _run(*args: Any) -> Any:
    """Run a region out of the sight of torch.compile, whose graph breaks here."""
    global _disabled
    if _disabled is None:
        _disabled = torch.compiler.disable(run)
    return _disabled(*args)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Any] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Call ``function(*args, **kwargs)``, keep its arguments and not its activations, and run it again in the backward.

    Drop-in for ``torch.utils.checkpoint.checkpoint``. The backward's run finds the state that the first run found:
    buffers, attributes, containers, generators, modes, arguments; afterwards the present is back, also after an
    exception. Loss, gradients and state come out with the bits of the eager step, or an error says what cannot be
    reproduced. A call that did what cannot be rewound (it wrote a file, consumed an iterator) keeps its activations and
    warns once with :class:`RegionKept`.

    torch's keywords are accepted. ``context_fn`` and ``determinism_check="none"`` mean what they mean there. One engine
    serves both values of ``use_reentrant``; generators are preserved and the replay runs to its end whatever
    ``preserve_rng_state`` and ``early_stop`` say; ``debug`` adds nothing, since errors name their line anyway.

    Raises :class:`InvalidRegion` at the call for what cannot be called or an argument that was freed;
    :class:`ReplayDivergence`, :class:`ModifiedArgument` or :class:`UnsupportedState` in the backward.

    Cost: one more forward in the backward; about 0.1 ms a call for a block of five modules; the first two calls of each
    kind about 4 µs an operation more. Not for: effects reached by names made at run time (docs/limits.md).
    """
    if determinism_check not in ("default", "none"):
        raise InvalidRegion(f'determinism_check={determinism_check!r} is not known; it is "default" or "none"')
    return _run(AUTO, function, args, kwargs, context_fn, determinism_check == "default")


class Checkpoint:
    """:func:`checkpoint` with settings: ``ck = Checkpoint(engine="journal"); y = ck(block, x)``.

    state   "auto" finds the state; a :class:`StateSpec` replaces the search; ``None`` does what torch does (torch's and
            Python's generators and the modes are brought back, nothing else)
    guard   compares what a replay computes with the forward: "first" the first replay of each kind of call and again
            when the footprint changes, "always" (0.2 ms per MiB and call), or "off"
    engine  how large state that a region writes is kept: "snapshot" copies it at the entry, "journal" copies the parts
            that are overwritten, "read_set" those that are read, "guarded" is "auto" and checks a digest of the state
            after it was put back; "auto" takes the journal where less than a quarter is written. State of up to 256 KiB
            is always copied

    Raises :class:`InvalidRegion` for settings that are unknown or exclude each other.
    """

    def __init__(self, state: str | StateSpec | None = "auto", guard: str = "first", engine: str = "auto") -> None:
        self.settings = Settings(state, guard, engine)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` as a region; all keyword arguments are the function's."""
        return _run(self.settings, function, args, kwargs)

    def planned(self, planned: Planned, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)`` as a region that brings each of these large tensors back by the engine that
        stands with it: "snapshot" copies it at the entry, "journal" undoes the log that regions share, "read_set" copies
        what is read. With a copy of its own a region asks nothing of what ran after it."""
        return _run(self.settings, function, args, kwargs, None, True, False, planned)

    def log(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` as eager does, and keep what it overwrites of large state for the replays of other regions.

        A region can only be replayed if everything that large state lost since its call was logged. Cost: the old bytes
        of what is written, for as long as an earlier region may need them.
        """
        return _run(self.settings, function, args, kwargs, None, True, True)

    def report(self) -> tuple[RegionReport, ...]:
        """For each region that ran under these settings: its calls, replays, and calls that kept activations, by reason."""
        return reports(self.settings)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for use in a region: a replay does not call it and gets the result of the first run.

    For effects that must happen once (a line in a file, a draw from the operating system). Outside a region it is
    ``function``. Raises :class:`UnsupportedState` if the result is a tensor that requires a gradient. Cost: the results
    are held until the backward.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return frames.run_once(function, args, kwargs)

    return call


def is_replaying() -> bool:
    """Whether this thread is running a region again. Danger: a region that computes something else then is refused."""
    return frames.replaying()


__all__ = [
    "Checkpoint",
    "RegionKept",
    "RegionReport",
    "StateSpec",
    "checkpoint",
    "is_replaying",
    "once",
    "reports",
    "retained_bytes",
]
