"""Where a training run is, written down as it goes, so that it can still be read after the process was killed."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

WHOLE = "the model"
_FILE = "board"
_WIDTH = 512


def read_board(folder: Path) -> tuple[str, str]:
    """Phase and module that were written last; empty if nothing was."""
    path = folder / _FILE
    if not path.exists():
        return "", ""
    phase, _, module = path.read_bytes().rstrip(b"\0 ").decode().partition("\t")
    return phase, module


class Board:
    """Follows a model's step: which module's forward runs, or whose output's gradient has arrived last.

    It hangs hooks into torch for all modules, also of copies, but names only those of ``model``. The hooks return
    nothing and keep nothing. Use it as a context.
    """

    def __init__(self, folder: Path) -> None:
        self.phase = ""
        self.module = ""
        self._file = os.open(folder / _FILE, os.O_WRONLY | os.O_CREAT, 0o600)
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._handles: list[Any] = []

    def say(self, phase: str, module: str = "") -> None:
        """Note where the run is."""
        self.phase, self.module = phase, module
        os.pwrite(self._file, f"{phase}\t{module}".encode().ljust(_WIDTH)[:_WIDTH], 0)

    def follow(self, model: nn.Module) -> Board:
        """Follow ``model`` while the context is open."""
        self._names = {id(module): name or WHOLE for name, module in model.named_modules()}
        return self

    def __enter__(self) -> Board:
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=False),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            if name == WHOLE:
                self._stack.clear()  # a replay that was cut short has left modules without a word
            self._stack.append(name)
            self.say("forward" if self.phase != "backward" else "backward", name)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        if self._stack:
            self._stack.pop()
        if self._stack:
            self.say(self.phase, self._stack[-1])
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: self.say("backward", name))
                return
