"""How much memory this process may still take: what the machine has free, and what its limits leave."""

from __future__ import annotations

import resource
from pathlib import Path


def _status(field: str) -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def available_bytes() -> int:
    """The least of: memory available on the machine, the control group's room, and the room under RLIMIT_DATA and
    RLIMIT_AS. On a system without /proc only the limits count."""
    rooms = [1 << 62]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                rooms.append(int(line.split()[1]) * 1024)
        for limit, field in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            soft, used = resource.getrlimit(limit)[0], _status(field)
            if soft != resource.RLIM_INFINITY and used is not None:
                rooms.append(max(0, soft - used))
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if most != "max":
            rooms.append(max(0, int(most) - int(Path("/sys/fs/cgroup/memory.current").read_text())))
    except OSError:
        pass
    return min(rooms)
