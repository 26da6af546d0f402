"""Trains with everything offloaded to FOLDER in processes that are killed at random points: crashes.py FOLDER COUNT SEED

Prints one line of JSON: how many were killed, how many of them while they held an open file there, after how many a file was
left, and how many steps they had done. One process imports torch, and each of the others is a fork of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from training import batch, net, planned, step

from regrad.torch.offload import FilePlace


def train(folder: Path, pipe: int) -> None:
    """Steps without end; one byte for each."""
    model, x = net(), batch()
    planned(model, FilePlace(folder))
    while True:
        step(model, x)
        os.write(pipe, b".")


def has_file(pid: int, folder: Path) -> bool:
    """Whether a stopped process has a file open in the folder."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(entry).startswith(f"{folder}/"):
                return True
        except OSError:
            continue
    return False


def main(folder: Path, count: int, seed: int) -> None:
    """Kill ``count`` of them, one after the other."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    killed = held = left = steps = 0
    for _ in range(count):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            try:
                train(folder, writing)
            finally:
                os._exit(1)
        os.close(writing)
        os.read(reading, 1)  # it trains
        time.sleep(rng.uniform(0, 0.03))
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        held += has_file(pid, folder)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        steps += 1 + len(os.read(reading, 1 << 16))
        os.close(reading)
        left += bool(os.listdir(folder))
    sys.stdout.write(json.dumps({"killed": killed, "held": held, "left": left, "steps": steps}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
