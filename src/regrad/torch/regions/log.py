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
    """The entries of one storage in write order.

    ``signatures`` are those of its aliases when the last region that wrote it ended, by the alias's identity.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[int, Old]] = []
        self.signatures: dict[int, Any] = {}


_LOGS = {}


def begin() -> int:
    """The epoch of a new call."""
    epoch = next(_EPOCHS)
    _LIVE[epoch] = frozenset()
    return epoch


def reaches(epoch: int, storages: Iterable[int]) -> None:
    """The call of ``epoch`` can reach ``storages``."""
    _LIVE[epoch] = frozenset(storages)


def reached_before(epoch: int, storage: int) -> bool:
    """Whether a call from before ``epoch`` that may be replayed can reach ``storage``."""
    return any(one < epoch and storage in storages for one, storages in _LIVE.items())


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


def mark() -> tuple[int, dict[int, dict[int, Any]]]:
    """Where the logs stand before a replay."""
    return next(_EPOCHS), {key: log.signatures for key, log in _LOGS.items()}


def back_to(before: tuple[int, dict[int, dict[int, Any]]]) -> None:
    """Forget what calls inside a replay logged: what they wrote has been undone."""
    newest, signatures = before
    for key in list(_LOGS):
        log = _LOGS[key]
        log.entries = [entry for entry in log.entries if entry[0] < newest]
        log.signatures = signatures.get(key, {})
        if not log.entries:
            del _LOGS[key]


def withdraw(epoch: int, storage: int) -> None:
    """The call of ``epoch`` did not write ``storage`` after all."""
    log = _LOGS.get(storage)
    if log is not None:
        log.entries = [entry for entry in log.entries if entry[0] != epoch]
        if not log.entries:
            del _LOGS[storage]


def sign(storage: int, signatures: dict[int, Any]) -> None:
    """A region that wrote ``storage`` ended and left its aliases with ``signatures``."""
    log = _LOGS.get(storage)
    if log is not None:
        log.signatures = signatures


def since(epoch: int, storage: int) -> list[Old]:
    """What must be undone, newest first, to bring ``storage`` to what the call of ``epoch`` saw."""
    log = _LOGS.get(storage)
    return [] if log is None else [old for at, old in reversed(log.entries) if at >= epoch]


def is_as_left(epoch: int, storage: int, alias: int, own: Any, now: Any) -> bool:
    """Whether nothing but regions wrote ``storage`` since the call of ``epoch`` ended, by one alias's signature.

    ``own`` is what that call left it with and ``now`` what it has. Aliases lie at different places of one storage and
    may count versions apart, so each is held against its own; one that the last region did not know, against any.
    """
    log = _LOGS.get(storage)
    if log is None or not log.signatures or not any(at >= epoch for at, _ in log.entries):
        return bool(now == own)
    if alias in log.signatures:
        return bool(now == log.signatures[alias])
    version, address, peek = now
    return address == own[1] and any((version, peek) == (left[0], left[2]) for left in log.signatures.values())
