"""The dense chain: every row of the published table, counted in runs and by the closed forms; gradients agree."""

import numpy as np
import pytest

from regrad.bench.dense_chain import DenseChain, table
from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.simulate import simulate
from regrad.planners.spans import span

CHAIN = DenseChain(layers=16, width=8, alpha=1.0, x=0.5)
# block, boundaries, recomputed layers, bytes at 4 a value, multiplications
ROWS = [
    (1, 17, 0, 608, 2_048),
    (2, 9, 8, 384, 2_560),
    (3, 7, 10, 352, 2_688),
    (4, 5, 12, 320, 2_816),
    (5, 5, 12, 352, 2_816),
    (6, 4, 13, 352, 2_880),
    (7, 4, 13, 384, 2_880),
    (8, 3, 14, 384, 2_944),
    *((block, 3, 14, 416 + 32 * (block - 9), 2_944) for block in range(9, 16)),
    (16, 2, 15, 608, 3_008),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"B={row[0]}")
def test_a_row_of_the_table(row):
    block, boundaries, recomputed, size, multiplications = row
    assert table(CHAIN, (block,)) == [row]
    closed = CHAIN.block_costs(block)
    assert (closed.boundaries, closed.recomputed, closed.multiplications) == (boundaries, recomputed, multiplications)
    assert (closed.size_bytes(4), closed.size_bytes(8)) == (size, 2 * size)


def test_the_full_tape():
    full = CHAIN.run_full()
    assert round(full.output, 5) == 0.20686
    assert full.costs == CHAIN.full_costs()
    assert (full.costs.size_bytes(4), full.costs.multiplications) == (608, 2_048)


@pytest.mark.parametrize("block", range(1, 20))
@pytest.mark.parametrize("chain", [CHAIN, DenseChain(7, 5, alpha=1.3, x=-0.8), DenseChain(1, 3)])
def test_both_runs_agree_to_the_bit_and_with_the_closed_forms(chain, block):
    full, blocks = chain.run_full(), chain.run_blocks(block)
    assert blocks.output == full.output
    assert np.array_equal(blocks.input_gradient, full.input_gradient)
    assert blocks.alpha_gradient == full.alpha_gradient
    assert blocks.costs == chain.block_costs(block)
    assert full.costs == chain.full_costs()


def output(chain, state):
    for _ in range(chain.layers):
        state = np.tanh(chain.alpha / chain.width * np.ones((chain.width, chain.width)) @ state)
    return state.mean()


def test_gradients_are_those_of_the_function():
    chain, step = DenseChain(6, 4, alpha=1.2, x=0.7), 1e-6
    start = chain.x * np.arange(1, 5) / 4
    found = chain.run_blocks(4)
    assert found.output == pytest.approx(output(chain, start), abs=1e-15)
    for i in range(4):
        nudge = step * (np.arange(4) == i)
        slope = (output(chain, start + nudge) - output(chain, start - nudge)) / (2 * step)
        assert found.input_gradient[i] == pytest.approx(slope, abs=1e-9)
    more, less = DenseChain(6, 4, 1.2 + step, 0.7), DenseChain(6, 4, 1.2 - step, 0.7)
    assert found.alpha_gradient == pytest.approx((output(more, start) - output(less, start)) / (2 * step), abs=1e-9)


@pytest.mark.parametrize("block", range(1, 17))
def test_the_simulator_counts_the_same_recomputes_and_the_same_vectors(block):
    """Beside a chain's own vectors the lab holds the last state and two adjoints."""
    keep, again = Option(KEEP, 1, 0, holds_input=True), Option(RECOMPUTE, 1, 0, holds_input=True)
    unit = Segment("layer", (keep, again), boundary_bytes=1, forward_seconds=1.0, tail_seconds=0.0)
    problem = Problem(Chain((unit,) * 16))
    plan = tuple(span(problem, start, min(start + block, 16)) for start in range(0, 16, block))
    walked, costs = simulate(plan, problem.chain), CHAIN.run_blocks(block).costs
    assert walked.total_recomputes == costs.recomputed
    if 16 % block == 0:  # else the last block is a short one and the closed form, which holds all boundaries, is above
        assert walked.peak_bytes + 3 == costs.values // CHAIN.width
    assert walked.peak_bytes + 3 <= costs.values // CHAIN.width
