"""The dense chain: recomputation on a network small enough to check every number by hand.

    h_0[i] = x (i + 1) / W        h_l = tanh((alpha / W) 1 1ᵀ h_{l-1})        output = mean of h_L

L layers of width W, gradients with respect to the input vector h_0 and the shared alpha. Once with the full tape, once
with only the ends of blocks of B layers kept and each block's inside computed again before its backward, by the same
operations in the same order, so that both give the same bits. What is counted is what the closed forms say: vectors
that are alive at the most, and multiplications of the dense products. An example of the block scheme of Chen et al.
2016 ("Training Deep Nets with Sublinear Memory Cost", one level, equal blocks), not a way to train anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """What a run holds and computes.

    values           numbers alive at the most: W for each vector
    boundaries       vectors kept from the forward pass
    recomputed       layers computed a second time
    multiplications  in dense products, forward, again and backward
    """

    values: int
    boundaries: int
    recomputed: int
    multiplications: int

    def size_bytes(self, bytes_per_value: int) -> int:
        """``values`` in bytes: an estimate for 4 or 8 bytes each, the arithmetic is the same."""
        return self.values * bytes_per_value


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run and what was counted while it ran."""

    output: float
    input_gradient: Vector
    alpha_gradient: float
    costs: Costs


@dataclass(frozen=True, slots=True)
class DenseChain:
    """``layers`` (L) of ``width`` (W), all with the same ``alpha``, for the input ``x``."""

    layers: int
    width: int
    alpha: float = 1.0
    x: float = 0.5

    def full_costs(self) -> Costs:
        """Closed form for the full tape: (L + 3) W values, 2 L W² multiplications."""
        length, width = self.layers, self.width
        return Costs((length + 3) * width, length + 1, 0, 2 * length * width**2)

    def block_costs(self, block: int) -> Costs:
        """Closed form for blocks of B layers: (⌈L/B⌉ + min(B, L) + 2) W values, (3 L - ⌈L/B⌉) W² multiplications.

        ⌈L/B⌉ + 1 vectors are kept and L - ⌈L/B⌉ layers computed again: a block's end is kept, so it is not.
        """
        length, width = self.layers, self.width
        blocks = -(-length // block)
        values = (blocks + min(block, length) + 2) * width
        return Costs(values, blocks + 1, length - blocks, (3 * length - blocks) * width**2)

    def run_full(self) -> Outcome:
        """Forward and backward with every layer's vector kept."""
        return _Run(self).outcome(self.layers, 1)

    def run_blocks(self, block: int) -> Outcome:
        """Forward and backward with the ends of blocks of ``block`` layers kept."""
        return _Run(self).outcome(-(-self.layers // block), block)


class _Run:
    """One forward and backward; counts what is alive and what is multiplied."""

    def __init__(self, chain: DenseChain) -> None:
        self.chain = chain
        self.ones = np.ones((chain.width, chain.width))
        self.alive = self.most = self.products = self.recomputed = 0

    def outcome(self, blocks: int, block: int) -> Outcome:
        chain = self.chain
        stops = [min(block * (index + 1), chain.layers) for index in range(blocks)]
        kept = {0: self._hold(chain.x * np.arange(1, chain.width + 1) / chain.width)}
        for start, stop in zip([0, *stops], stops, strict=False):
            state = kept[start]
            for _ in range(start, stop):
                state = self._layer(state)
            kept[stop] = self._hold(state)
        output = float(kept[chain.layers].mean())
        adjoint, alpha_gradient = self._hold(np.full(chain.width, 1.0 / chain.width)), 0.0
        for start, stop in zip(reversed([0, *stops[:-1]]), reversed(stops), strict=True):
            states = [kept[start]]
            for _ in range(start + 1, stop):
                states.append(self._hold(self._layer(states[-1])))
                self.recomputed += 1
            states.append(kept[stop])
            for before, after in zip(reversed(states[:-1]), reversed(states[1:]), strict=True):
                # both adjoints are alive while one is made from the other
                product = self._product(adjoint * (1.0 - after * after))
                alpha_gradient += float(before @ product) / chain.width
                adjoint = self._hold(chain.alpha / chain.width * product)
                self.alive -= 1
            self.alive -= stop - start - 1
        costs = Costs(self.most * chain.width, len(kept), self.recomputed, self.products * chain.width**2)
        return Outcome(output, adjoint, alpha_gradient, costs)

    def _layer(self, state: Vector) -> Vector:
        return np.tanh(self.chain.alpha / self.chain.width * self._product(state))

    def _product(self, vector: Vector) -> Vector:
        self.products += 1
        result: Vector = self.ones @ vector
        return result

    def _hold(self, vector: Vector) -> Vector:
        self.alive += 1
        self.most = max(self.most, self.alive)
        return vector


def table(chain: DenseChain, blocks: tuple[int, ...], bytes_per_value: int = 4) -> list[tuple[int, int, int, int, int]]:
    """(block, boundaries, recomputed layers, bytes, multiplications), counted in a run for each length of a block."""
    rows = []
    for block in blocks:
        costs = chain.run_blocks(block).costs
        size = costs.size_bytes(bytes_per_value)
        rows.append((block, costs.boundaries, costs.recomputed, size, costs.multiplications))
    return rows
