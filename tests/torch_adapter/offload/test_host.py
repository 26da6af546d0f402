"""The order of copies to the host's memory and back, with streams that only write down what they are told.

There is no GPU here: this shows what is asked of CUDA, not that CUDA does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from regrad.core.errors import PlaceFailed
from regrad.torch import offload
from regrad.torch.offload import HostPlace


class Device:
    """Stands in for ``torch`` in the module: ``told`` is what streams and events were told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []
        self.cuda, self.on = self, "user"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def is_available(self) -> bool:
        return True

    def current_stream(self, device: Any) -> Stream:
        return Stream(self, "user")

    def Stream(self, device: Any) -> Stream:
        return Stream(self, "side")

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.on = self.on, stream.name
        yield
        self.on = before

    def empty(self, size: int, *, dtype: torch.dtype, pin_memory: bool = False, device: Any = None) -> OnDevice:
        made = torch.zeros(size, dtype=dtype).as_subclass(OnDevice)
        made.where, made.world = "host" if pin_memory else "device", self
        self.told.append(("new", made.where, self.on))
        return made


class Stream:
    """Writes down who waits for whom."""

    def __init__(self, world: Device, name: str) -> None:
        self.world, self.name = world, name

    def wait_stream(self, other: Stream) -> None:
        self.world.told.append((self.name, "waits for", other.name))

    def wait_event(self, event: str) -> None:
        self.world.told.append((self.name, "waits for", event))

    def record_event(self) -> str:
        return f"event after {len(self.world.told)}"


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a device."""

    is_cuda = True  # type: ignore[assignment]
    where = "device"
    world: Device

    def record_stream(self, stream: Any) -> None:
        self.world.told.append(("kept for", stream.name))

    def copy_(self, other: Any, non_blocking: bool = False) -> Any:
        assert non_blocking
        self.world.told.append(("copy", other.where, "to", self.where, self.world.on))
        torch.Tensor.copy_(self.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))
        return self


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(offload, "torch", made)
    return made


def row_of(world: Device, value: int) -> OnDevice:
    row = torch.full((8,), value, dtype=torch.uint8).as_subclass(OnDevice)
    row.world = world
    return row


def test_what_goes_out_waits_for_its_maker_and_is_kept_until_it_is_out(world: Device) -> None:
    HostPlace().open().put(row_of(world, 1))
    assert world.told == [
        ("side", "waits for", "user"),
        ("new", "host", "side"),
        ("copy", "device", "to", "host", "side"),
        ("kept for", "side"),
    ]


def test_one_is_fetched_ahead_and_each_is_fetched_once(world: Device) -> None:
    spool = HostPlace().open()
    tickets = [spool.put(row_of(world, value)) for value in range(4)]
    for value, fetches in ((3, 2), (2, 1), (1, 1), (0, 0)):
        world.told.clear()
        row = spool.get(tickets[value], row_of(world, 9))
        assert row.tolist() == [value] * 8
        assert [told for told in world.told if told[0] == "copy"] == [
            ("copy", "host", "to", "device", "side")
        ] * fetches
        assert [told[:2] for told in world.told if told[0] == "user"] == [("user", "waits for")]
        assert world.told[-1] == ("kept for", "user")
        spool.free(tickets[value])
    assert spool._pieces == {}  # type: ignore[attr-defined]


def test_a_second_node_fetches_again(world: Device) -> None:
    spool = HostPlace().open()
    ticket = spool.put(row_of(world, 5))
    assert [spool.get(ticket, row_of(world, 9)).tolist() for _ in range(2)] == [[5] * 8] * 2


def test_a_tensor_of_the_cpu_is_refused(world: Device) -> None:
    with pytest.raises(PlaceFailed, match=r"10 bytes is on cpu, and only CUDA tensors.*FilePlace"):
        HostPlace().open().put(torch.zeros(10, dtype=torch.uint8))
