"""Devices that a step can be planned for without being there: how much memory they have, and how fast they are.

The table holds figures that others published; none of them was measured by regrad, and no prediction made from them has
been validated on the device. Sources:

* memory: what torch reports as total capacity (``torch.cuda.get_device_properties``), the lowest figure met in public
  out-of-memory reports, because it depends on the driver and on error correction;
* speed: the makers' data sheets, dense (without sparsity), tensor cores where there are any. ``fp32`` is without TF32,
  which torch leaves off for matrix products unless it is asked for;
* workspace: torch's default for cuBLAS, 32 MiB on compute capability 9.0 and 8,519,680 bytes before it
  (``aten/src/ATen/cuda/CUDABlas.cpp``), for cuBLAS and cuBLASLt each.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from regrad.core.errors import UsageError
from regrad.core.units import format_bytes, parse_bytes

GIB, MIB = 1 << 30, 1 << 20
TERA = 10**12

CONTEXT_BYTES = 512 * MIB
"""What a process takes on the device before its first tensor: driver context, loaded kernels, library handles. Reports
range from 300 to 600 MiB."""
OTHER_WORKSPACE_BYTES = 64 * MIB
"""Set aside for kernels that allocate for themselves (sorts, reductions, convolutions' scratch), which no record shows."""
LAUNCH_SECONDS = 5e-6
PRODUCT_SHARE, BANDWIDTH_SHARE = 0.6, 0.8
"""What a kernel usually reaches of the figures in the data sheet. Round figures: ratios between operations matter."""
GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class Device:
    """A device as planning sees it. Bytes are bytes, rates are per second.

    memory_bytes         all of it, as torch reports it
    context_bytes        reserve for what a process takes before its first tensor
    workspace_bytes      reserve for the libraries' workspaces
    bandwidth_bytes      bytes per second to and from its memory
    flops                floating-point operations per second of matrix products, by name of the type
    flash                whether it has a fused attention kernel for 16-bit types (compute capability 8.0 and later)
    source               where the figures come from
    """

    name: str
    title: str
    memory_bytes: int
    bandwidth_bytes: float
    fp32_flops: float
    fp16_flops: float
    bf16_flops: float
    flash: bool = True
    context_bytes: int = CONTEXT_BYTES
    workspace_bytes: int = 2 * 8_519_680 + OTHER_WORKSPACE_BYTES
    source: str = ""

    validated_on_hardware = False
    """No prediction for any device of the table has been compared with a run on it."""

    @property
    def usable_bytes(self) -> int:
        """What a step may use: memory less the two reserves."""
        return max(0, self.memory_bytes - self.context_bytes - self.workspace_bytes)

    def flops(self, dtype: str) -> float:
        """Peak rate of matrix products for ``dtype`` ("fp32", "fp16", "bf16"; anything else counts as fp32)."""
        return {"fp16": self.fp16_flops, "bf16": self.bf16_flops}.get(dtype, self.fp32_flops)

    def seconds(self, *, flops: float, moved_bytes: float, dtype: str) -> float:
        """Roofline: a launch, and the longer of computing and moving, each at the share of its peak that is usual."""
        computing = flops / (PRODUCT_SHARE * self.flops(dtype))
        return LAUNCH_SECONDS + max(computing, moved_bytes / (BANDWIDTH_SHARE * self.bandwidth_bytes))

    def facts(self) -> dict[str, object]:
        """What was assumed, for reports and JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "memory_bytes": self.memory_bytes,
            "context_bytes": self.context_bytes,
            "workspace_bytes": self.workspace_bytes,
            "usable_bytes": self.usable_bytes,
            "validated_on_hardware": self.validated_on_hardware,
            "source": self.source,
        }

    def in_words(self) -> str:
        """One line: what of the memory is taken to be usable, and that nobody has checked it."""
        return (
            f"{self.title}: {format_bytes(self.usable_bytes)} usable ({self.usable_bytes:,} bytes) of "
            f"{format_bytes(self.memory_bytes)}, less {format_bytes(self.context_bytes)} for the context and "
            f"{format_bytes(self.workspace_bytes)} for workspaces; not validated on hardware"
        )


_HOPPER = 2 * 32 * MIB + OTHER_WORKSPACE_BYTES


def _device(
    name: str, title: str, memory_gib: float, bandwidth: float, fp32: float, half: float, bf16: float, **more: object
) -> Device:
    """A row: GiB as torch shows them, GB/s and TFLOP/s as data sheets give them."""
    made = Device(
        name, title, int(memory_gib * GIB), bandwidth * 1e9, fp32 * TERA, half * TERA, bf16 * TERA,
        source=f"memory: torch's total capacity, {memory_gib} GiB; speed: {title} data sheet, dense",
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


_TABLE = (
    # name, title, GiB, GB/s, TFLOP/s: fp32, fp16, bf16
    _device("h200", "NVIDIA H200 SXM", 139.7, 4800, 66.9, 989.4, 989.4, workspace_bytes=_HOPPER),
    _device("h100-80gb", "NVIDIA H100 SXM 80 GB", 79.1, 3350, 66.9, 989.4, 989.4, workspace_bytes=_HOPPER),
    _device("h100-pcie-80gb", "NVIDIA H100 PCIe 80 GB", 79.1, 2000, 51.2, 756.4, 756.4, workspace_bytes=_HOPPER),
    _device("a100-80gb", "NVIDIA A100 SXM 80 GB", 79.14, 2039, 19.5, 312, 312),
    _device("a100-40gb", "NVIDIA A100 SXM 40 GB", 39.39, 1555, 19.5, 312, 312),
    _device("l40s", "NVIDIA L40S", 44.39, 864, 91.6, 362, 362),
    _device("l4", "NVIDIA L4", 21.95, 300, 30.3, 121, 121),
    _device("a10", "NVIDIA A10", 21.98, 600, 31.2, 125, 125),
    _device("a6000", "NVIDIA RTX A6000", 47.4, 768, 38.7, 154.8, 154.8),
    _device("rtx-4090", "NVIDIA GeForce RTX 4090", 23.5, 1008, 82.6, 165.2, 165.2),
    _device("rtx-3090", "NVIDIA GeForce RTX 3090", 23.5, 936, 35.6, 71, 71),
    # Before compute capability 8.0: no bf16 on the tensor cores (torch computes it as fp32) and no flash attention.
    _device("v100-32gb", "NVIDIA V100 SXM2 32 GB", 31.73, 900, 15.7, 125, 15.7, flash=False),
    _device("v100-16gb", "NVIDIA V100 SXM2 16 GB", 15.77, 900, 15.7, 125, 15.7, flash=False),
    _device("t4", "NVIDIA T4", 14.56, 320, 8.1, 65, 8.1, flash=False),
)
DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}
"""By name, the largest families first."""
ALIASES = {
    "h100": "h100-80gb",
    "a100": "a100-80gb",
    "a100-80g": "a100-80gb",
    "a100-40g": "a100-40gb",
    "h200-141gb": "h200",
    "l4-24gb": "l4",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "3090": "rtx-3090",
    "rtx3090": "rtx-3090",
    "v100": "v100-16gb",
    "t4-16gb": "t4",
    "rtx-a6000": "a6000",
}


def find_device(name: str | None = None, memory: str | int | None = None) -> Device:
    """The device called ``name``, with ``memory`` in place of its own if that is given.

    ``memory`` alone ("24 GiB") is a device nobody named: its reserves are the usual ones, its speed that of an A100.
    Raises :class:`UsageError` for a name that is not in the table, for nothing at all, and for a memory that the
    reserves alone would fill; :class:`InvalidQuantity` for an amount that cannot be read.
    """
    total = None if memory is None else parse_bytes(memory)
    if name is None:
        if total is None:
            raise UsageError(f"no device is named and no memory given. Name one of {_names()}, or say how much it has.")
        base = replace(DEVICES["a100-80gb"], name=GENERIC, title=f"a device of {format_bytes(total)}")
        base = replace(base, source="memory: as given; speed: that of an A100 80 GB")
    else:
        key = name.strip().lower().replace("_", "-").replace(" ", "-")
        found = DEVICES.get(ALIASES.get(key, key))
        if found is None:
            raise UsageError(_unknown(name, key))
        base = found
    if total is None:
        return base
    device = replace(base, memory_bytes=total)
    if not device.usable_bytes:
        raise UsageError(
            f"a device of {format_bytes(total)} has no room for a step: the context takes "
            f"{format_bytes(device.context_bytes)} and workspaces {format_bytes(device.workspace_bytes)}. Give more."
        )
    return device


def as_device(device: str | Device | None, memory: str | int | None = None) -> Device | None:
    """A device as an argument may name it: itself, by name, by its memory, or None for none. Raises :func:`find_device`'s
    errors."""
    if isinstance(device, Device) or (device is None and memory is None):
        return device
    return find_device(device, memory)


def _unknown(name: str, key: str) -> str:
    close = difflib.get_close_matches(key, [*DEVICES, *ALIASES], n=2, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"there is no device {name!r} in the table. {hint}It has {_names()}; for another give --device-memory 24GiB."


def _names() -> str:
    return ", ".join(DEVICES)
