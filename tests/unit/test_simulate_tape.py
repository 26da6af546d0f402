"""What a replay runs of a call that copies an operand and then multiplies: the copy alone, where nobody reads the product."""

from __future__ import annotations

import pytest

from regrad.core.simulate_tape import TapeArithmetic, TapeRange
from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.trace import Operation, Save, Storage, Trace


def two_calls(*, product_is_saved: bool) -> Trace:
    """Call 0 makes something; call 1 copies it (operation 1) and multiplies the copy (2), whose node saves the copy; call 2
    may save the product (3)."""
    storages = [Storage(8, "weights", -1), Storage(10, "activations", 0, drop=2), Storage(20, "activations", 1, drop=3)]
    storages.append(Storage(40, "activations", 2, drop=4))
    storages[2].saved_by = (Save(2, 12, 2, 0),)
    if product_is_saved:
        storages[3].saved_by = (Save(3, 13, 3, 1),)
    storages.append(Storage(80, "activations", 3, drop=4))
    operations = [
        Operation("make", "forward", -1, 11, (0,), (1,), seconds=1.0, torch_call=0),
        Operation("copy", "forward", -1, 12, (1,), (2,), seconds=2.0, torch_call=1),
        Operation("product", "forward", -1, 13, (2,), (3,), seconds=4.0, torch_call=1),
        Operation("use", "forward", -1, 14, (3,), (4,), seconds=8.0, torch_call=2),
        Operation("use backward", "backward", -1, 13),
        Operation("product backward", "backward", -1, 12),
    ]
    return Trace(operations, storages, [], "fake", "fresh", "cpu")


@pytest.mark.parametrize(
    ("saved", "products", "expected"),
    [(False, (1,), [1]), (False, (), [1, 2]), (True, (1,), [1, 2]), (True, (), [1, 2])],
)
def test_a_product_runs_where_its_result_is_wanted(saved: bool, products: tuple[int, ...], expected: list[int]) -> None:
    tape = TapeArithmetic(TraceArithmetic(two_calls(product_is_saved=saved)), 0, products=products)
    one = TapeRange(1, 4)
    assert tape.slice_of(one) == (expected, {1})
    levels = tape.levels([one])
    assert [k for k, again in zip(levels.operations, levels.replayed, strict=True) if again] == expected
    assert levels.added_seconds == tape.seconds_of(one) == sum((1.0, 2.0, 4.0, 8.0)[k] for k in expected)


def test_what_is_not_run_is_not_there() -> None:
    trace = two_calls(product_is_saved=False)
    at = [TapeArithmetic(TraceArithmetic(trace), 0, products=one).levels([TapeRange(1, 4)]) for one in ((), (1,))]
    assert max(at[0].during[4:]) - max(at[1].during[4:]) == 40
