"""The epoch log: old bytes of large storages, each kept once for all calls that may need them.

Every call has an epoch. What a call saw at its entry is the first entry with an epoch at or after its own, else the
present; so undoing the entries from the newest back to its epoch brings a storage to what it saw. An entry is dropped
when the last call that is as old as it and can reach the storage dies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from regrad.torch.regions.old import Old

_EPOCHS = itertools.count(1)
_LIVE: dict[int, frozenset[int]] = {}  # epoch -> the large storages that its call can reach
_LOGS: dict[int, StorageLog]


class StorageLog:
    """The entries of one storage in write order, and its signature when the last region that wrote it ended."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, Old]] = []
        self.signature: Any = None


_LOGS = {}


def begin() -> int:
    """The epoch of a new call."""
    epoch = next(_EPOCHS)
    _LIVE[epoch] = frozenset()
    return epoch


def reaches(epoch: int, storages: Iterable[int]) -> None:
    """The call of ``epoch`` can reach ``storages``."""
    _LIVE[epoch] = frozenset(storages)


def end(epoch: int) -> None:
    """The call of ``epoch`` will not be replayed again."""
    _LIVE.pop(epoch, None)
    for key in list(_LOGS):
        log = _LOGS[key]
        oldest = next((one for one, storages in _LIVE.items() if key in storages), None)
        if oldest is None:
            del _LOGS[key]
        else:
            log.entries = [entry for entry in log.entries if entry[0] >= oldest]
            if not log.entries:
                del _LOGS[key]


def add(epoch: int, storage: int, old: Old) -> None:
    """The call of ``epoch`` is about to overwrite what ``old`` copied."""
    _LOGS.setdefault(storage, StorageLog()).entries.append((epoch, old))


def mark() -> tuple[int, dict[int, Any]]:
    """Where the logs stand before a replay."""
    return next(_EPOCHS), {key: log.signature for key, log in _LOGS.items()}


def back_to(before: tuple[int, dict[int, Any]]) -> None:
    """Forget what calls inside a replay logged: what they wrote has been undone."""
    newest, signatures = before
    for key in list(_LOGS):
        log = _LOGS[key]
        log.entries = [entry for entry in log.entries if entry[0] < newest]
        log.signature = signatures.get(key)
        if not log.entries:
            del _LOGS[key]


def withdraw(epoch: int, storage: int) -> None:
    """The call of ``epoch`` did not write ``storage`` after all."""
    log = _LOGS.get(storage)
    if log is not None:
        log.entries = [entry for entry in log.entries if entry[0] != epoch]
        if not log.entries:
            del _LOGS[storage]


def sign(storage: int, signature: Any) -> None:
    """A region that wrote ``storage`` ended and left it with ``signature``."""
    log = _LOGS.get(storage)
    if log is not None:
        log.signature = signature


def since(epoch: int, storage: int) -> list[Old]:
    """What must be undone, newest first, to bring ``storage`` to what the call of ``epoch`` saw."""
    log = _LOGS.get(storage)
    return [] if log is None else [old for at, old in reversed(log.entries) if at >= epoch]


def expected(epoch: int, storage: int, own: Any) -> Any:
    """The signature that ``storage`` must have now if nothing but regions wrote it."""
    log = _LOGS.get(storage)
    if log is None or log.signature is None or not any(at >= epoch for at, _ in log.entries):
        return own
    return log.signature
