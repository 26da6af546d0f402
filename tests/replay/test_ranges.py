"""Sets of byte ranges against sets of bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrad.replay import ByteRange, RangeSet

ranges = st.builds(
    lambda storage, start, size: ByteRange(storage, start, start + size),
    st.sampled_from("ab"),
    st.integers(0, 40),
    st.integers(1, 12),
)


def bytes_of(parts):
    return {(part.storage, at) for part in parts for at in range(part.start, part.stop)}


@given(st.lists(ranges, max_size=30), ranges)
def test_it_is_the_set_of_its_bytes(added, asked):
    found, model = RangeSet(), set()
    for one in added:
        new = found.add(one)
        assert bytes_of(new) == bytes_of([one]) - model
        assert sum(part.nbytes for part in new) == len(bytes_of(new))  # no byte twice
        model |= bytes_of([one])
    assert bytes_of(found) == model
    assert found.nbytes == len(model)
    assert bytes_of(found.missing(asked)) == bytes_of([asked]) - model
    assert (asked in found) == (bytes_of([asked]) <= model)


@given(st.lists(ranges, max_size=30))
def test_its_ranges_are_apart_and_in_order(added):
    parts = list(RangeSet(added))
    for one, two in pairwise(parts):
        assert one.storage < two.storage or one.stop < two.start


@given(ranges, ranges)
def test_overlap(one, two):
    assert one.overlaps(two) == bool(bytes_of([one]) & bytes_of([two]))


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (-1, 2)])
def test_an_empty_or_negative_range_is_refused(start, stop):
    with pytest.raises(ValueError, match="no byte range"):
        ByteRange("a", start, stop)
