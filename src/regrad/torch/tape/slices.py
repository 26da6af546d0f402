"""Which calls of a section must run again for the saved tensors that are still wanted: a backward slice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from regrad.torch.tape.recording import Recording, Ref, Saved


@dataclass(slots=True)
class Slice:
    """What one replay of a section does.

    run       positions of the calls that run
    copies    (position, which saved tensor) of those that are arguments of their call, or views of them: it need not run
    lends     for each section directly inside: what it will need of this one
    borrows   what this one needs of the section around it
    """

    run: set[int] = field(default_factory=set)
    copies: list[tuple[int, int]] = field(default_factory=list)
    lends: dict[int, list[Ref]] = field(default_factory=dict)
    borrows: dict[tuple[int, int], Ref] = field(default_factory=dict)


def slice_of(recording: Recording, index: int, wanted: Callable[[Saved], Any] = Saved.pending) -> Slice:
    """The slice of section ``index`` for the saved tensors that are ``wanted``, those of sections inside included."""
    section, stop, found = recording.sections[index], recording.stop_of(index), Slice()

    def use(ref: Ref, before: int) -> None:
        if ref.position >= section.start:
            found.run.add(ref.position)
        else:
            found.borrows[ref.key] = ref
        for writer in ref.storage.writers:
            if section.start <= writer < before and recording.within(recording.calls[writer].section, index):
                found.run.add(writer)

    for position in range(section.start, stop):
        call = recording.calls[position]
        if call.saved and recording.owner(call.section) == index:
            for at, saved in enumerate(call.saved):
                if wanted(saved):
                    if saved.source is None:
                        found.run.add(position)
                    else:
                        found.copies.append((position, at))
                        use(saved.source, position)
    for child in recording.children(index):
        inner = slice_of(recording, child, wanted)
        if inner.borrows:
            found.lends[child] = list(inner.borrows.values())
            for ref in found.lends[child]:
                use(ref, recording.stop_of(child))
    for position in range(stop - 1, section.start - 1, -1):
        if position in found.run:
            for ref in recording.calls[position].given:
                use(ref, position)
    return found


def forget_unneeded(recording: Recording) -> None:
    """Let go of what only calls hold that no replay will run: the other operand of a last sum, for one."""

    def alive(saved: Saved) -> bool:
        return saved.holder is not None and saved.holder() is not None

    needed: set[int] = set()
    for index, section in enumerate(recording.sections):
        if not section.dissolved:
            needed |= slice_of(recording, index, alive).run
    for position, call in enumerate(recording.calls):
        if position not in needed:
            call.forget()
