"""What a call does to the outside world, and other things that happen once and cannot be rewound.

A call that did one of them keeps its activations instead of being replayed (KEEP).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from regrad.torch.regions.frames import LOCAL

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_EFFECTS = {
    "socket.connect": "connected a socket",
    "socket.sendto": "sent on a socket",
    "socket.sendmsg": "sent on a socket",
    "subprocess.Popen": "started a process",
    "os.system": "ran a command",
    "os.exec": "ran a command",
    "os.posix_spawn": "started a process",
    "os.fork": "started a process",
    "os.remove": "removed a file",
    "os.rename": "renamed a file",
    "os.mkdir": "made a folder",
    "os.rmdir": "removed a folder",
    "os.truncate": "truncated a file",
    "os.link": "linked a file",
    "os.symlink": "linked a file",
    "os.putenv": "changed the environment",
    "shutil.move": "moved a file",
    "urllib.Request": "made a network request",
    "sqlite3.connect": "opened a database",
    "builtins.input": "read from the terminal",
    "signal.pthread_kill": "sent a signal",
}
_installed = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" and event not in _EFFECTS:
        return
    stack = LOCAL.stack
    if not stack or stack[-1].replaying or LOCAL.in_once or stack[-1].effect is not None:
        return
    if event == "open":
        path, mode, flags = args
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITES)
        name = os.fspath(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
        if not writes or str(name).endswith(".pyc") or ".pyc." in str(name) or str(name) == os.devnull:
            return
        what = f"opened the file {name!r} for writing"
    else:
        what = _EFFECTS[event]
    for frame in stack:
        if not frame.replaying and frame.effect is None:
            frame.effect = what


def watch_effects() -> None:
    """Install the audit hook, once a process. Python has no way to take one off again; outside regions it does nothing."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_hook)


def position(iterator: Any) -> Any:
    """A fingerprint of where an iterator or a generator stands; equal before and after if nothing was consumed."""
    frame: Any = getattr(iterator, "gi_frame", MISSING)
    if frame is not MISSING:
        return None if frame is None else (frame.f_lasti, tuple(map(id, frame.f_locals.values())))
    try:
        return repr(iterator.__reduce__())
    except (TypeError, AttributeError):
        return repr(iterator)


def file_position(file: Any) -> Any:
    """Where a file object stands, or whether it is closed."""
    try:
        return "closed" if file.closed else file.tell()
    except (OSError, ValueError):
        return None


MISSING = object()
