"""Versions are named by writes, and the log says whose bytes were read."""

from __future__ import annotations

import pytest

from regrad.replay import ByteRange, Slot, StateSpec, Tag, Version, variables
from regrad.replay.machine.program import Affine, Copy, Program, Segment
from regrad.replay.machine.record import record
from regrad.replay.machine.views import View
from regrad.verify.programs import random_job


def test_aliases_share_versions_where_they_share_bytes(job):
    second = job.log.segments[1]
    copied = [one for one in second.reads if one.operation == 0]
    # `high` spans elements 2 … 5; write 2 (of the first segment) made all of them
    assert {one.version for one in copied} == {Version(2)}
    later = [one for one in second.reads if one.operation == 1 and one.where.storage == "state"]
    # the copy (write 3) made elements 0 … 3, so a view of 2 … 5 now has bytes of two versions
    assert [(one.where.start, one.where.stop, one.version.write) for one in later] == [(16, 32, 3), (32, 48, 2)]


def test_an_operation_reads_what_was_there_before_its_own_write():
    x, low, high = View("x", "float64", 0, 3), View("s", "float64", 0, 3), View("s", "float64", 8, 3)
    program = Program(
        (("x", 24), ("s", 32)), (), (x,), (Segment("one", (Affine(low, ((x, 1.0),)), Copy(low, low))),), low, (1.0,) * 3
    )
    log = record(program, ((x, [1.0, 2.0, 3.0]), (View("s", "float64", 0, 4), [0.0] * 4)))
    assert [one.version.write for one in log.segments[0].reads] == [0, 1]
    assert [one.version.write for one in log.segments[0].writes] == [1, 2]
    assert high.overlaps(low)


def test_what_a_segment_needs_of_the_state_it_found(job):
    first, second, third = job.log.segments
    assert list(first.read_at_entry()) == [ByteRange("state", 0, 32), ByteRange("x", 0, 32)]
    # the copy writes elements 0 … 3 before the next operation reads 2 … 5
    assert ByteRange("state", 16, 48) in second.read_at_entry()
    assert third.generators == ()
    assert first.generators == second.generators == ("noise",)
    assert job.log.needed_versions(0) == (Version(0),)


def test_live_versions(job):
    # all three segments read state that they or later ones overwrite
    assert job.log.live_versions("state") == 3
    assert job.log.live_versions("x") == 0
    by_name = {variable.name: variable for variable in variables(job.log)}
    assert by_name["state"].live_versions == 3
    assert by_name["state"].nbytes == 64


def test_slots_are_tagged():
    log = random_job(1, 0).log
    spec = StateSpec.discovered(log, assumed=["single"])
    tags = {slot.name: slot.tag for slot in spec.slots}
    assert tags["state"] is Tag.DISCOVERED
    assert tags["noise"] is Tag.DISCOVERED
    assert set(tags.values()) <= set(Tag)
    assert spec.tags()[Tag.DECLARED] == 0
    declared = StateSpec.declared(dict(log.storages), ["noise"])
    assert declared.nbytes == log.state_bytes
    assert {slot.tag for slot in declared.slots} == {Tag.DECLARED}


def test_an_assumed_slot_covers_what_no_one_touched(make_job):
    log = make_job(storages=(("x", 32), ("h", 32), ("state", 64), ("spare", 16))).log
    spec = StateSpec.discovered(log, assumed=["spare", "state"])
    assert {slot.name: slot.tag for slot in spec.slots}["spare"] is Tag.ASSUMED
    assert spec.tags() == {Tag.DECLARED: 0, Tag.DISCOVERED: 4, Tag.ASSUMED: 1}
    assert ByteRange("spare", 0, 16) in spec.covered


def test_a_slot_is_bytes_or_a_generator():
    with pytest.raises(ValueError, match="not both"):
        Slot("s", Tag.DECLARED)
    with pytest.raises(ValueError, match="not both"):
        Slot("s", Tag.DECLARED, where=ByteRange("s", 0, 1), generator="noise")


def test_inputs_are_version_zero(job):
    assert {one.version.write for one in job.log.segments[0].reads if one.operation == 0} == {0}
