"""What one of several devices holds of the parameters' memory.

ZeRO (Rajbhandari et al. 2020) spreads over the data-parallel devices: stage 1 the optimizer's state (and master weights),
stage 2 the gradients too, stage 3 the weights too. Activations are not spread by it. What is spread is padded to a
multiple of the devices, so a share is rounded up.
"""

from __future__ import annotations

from dataclasses import replace

from regrad.memory.optimizers import ParameterMemory
from regrad.memory.transformer import Split

OPTIMIZER_STAGE, GRADIENTS_STAGE, WEIGHTS_STAGE = 1, 2, 3


def shard(memory: ParameterMemory, split: Split) -> ParameterMemory:
    """``memory`` of one tensor-parallel device (see :meth:`regrad.memory.transformer.Model.shapes`), spread by ZeRO."""

    def share(count: int, stage: int) -> int:
        return -(-count // split.data) if split.zero >= stage else count

    return replace(
        memory,
        weights_bytes=share(memory.weights_bytes, WEIGHTS_STAGE),
        gradients_bytes=share(memory.gradients_bytes, GRADIENTS_STAGE),
        optimizer_bytes=share(memory.optimizer_bytes, OPTIMIZER_STAGE),
        master_bytes=share(memory.master_bytes, OPTIMIZER_STAGE),
        step_bytes=share(memory.step_bytes, OPTIMIZER_STAGE),
    )
