"""Where results go and what they say of the machine: ``[theme]_[hardware]_[date].json``."""

from __future__ import annotations

import json
import os
import platform
import re
from datetime import date
from pathlib import Path
from typing import Any

import torch

import regrad


def machine() -> dict[str, Any]:
    """The machine and the versions that a result was found with; ``memory_bytes`` is None where nobody says."""
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory_bytes = None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "regrad": regrad.__version__,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_result(theme: str, body: dict[str, Any], folder: Path) -> Path:
    """Write ``body`` with the machine and the date on top; returns the file. A result of the same day is replaced."""
    about = machine()
    hardware = re.sub(r"[^a-z0-9]+", "-", f"cpu-{about['cores']}-cores".lower()).strip("-")
    path = folder / f"{theme}_{hardware}_{date.today().isoformat()}.json"
    folder.mkdir(parents=True, exist_ok=True)
    head = {"theme": theme, "date": date.today().isoformat(), "machine": about}
    path.write_text(json.dumps(head | body, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path
