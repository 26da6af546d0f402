"""The replay contract, with no framework in it: what a segment owes when it is run again, and engines that see to it.

    ranges, log, spec     byte ranges; versions named by the write that made them; which state there is
    contract              what each segment owes, and how it can fail to
    store, place          the memory that an engine serves; where it keeps what it retains
    retention, engines/   what engines share; one engine a file
    pricing               what an engine will cost, as values of :mod:`regrad.core.state`
    machine/, derivatives/   the reference machine that all of it is proved on (needs numpy)

docs/concepts/replay.md tells it with pictures.
"""

from regrad.replay.contract import Fingerprint, Moment, ReplayContract, Verdict, Violation
from regrad.replay.engines.eager import Eager
from regrad.replay.engines.guarded import Guarded
from regrad.replay.engines.journal import Accounting, Journal
from regrad.replay.engines.read_set import ReadSet
from regrad.replay.engines.snapshot import Snapshot
from regrad.replay.frame import Meter
from regrad.replay.log import AccessLog, Draw, Read, SegmentLog, Version, Write
from regrad.replay.place import FilePlace, HostMemory, Place, SameMemory
from regrad.replay.pricing import StatePrice, price, variables
from regrad.replay.ranges import ByteRange, RangeSet
from regrad.replay.retention import Engine, Retention, Subject
from regrad.replay.spec import Slot, StateSpec, Tag
from regrad.replay.store import Store

__all__ = [
    "AccessLog",
    "Accounting",
    "ByteRange",
    "Draw",
    "Eager",
    "Engine",
    "FilePlace",
    "Fingerprint",
    "Guarded",
    "HostMemory",
    "Journal",
    "Meter",
    "Moment",
    "Place",
    "RangeSet",
    "Read",
    "ReadSet",
    "ReplayContract",
    "Retention",
    "SameMemory",
    "SegmentLog",
    "Slot",
    "Snapshot",
    "StatePrice",
    "StateSpec",
    "Store",
    "Subject",
    "Tag",
    "Verdict",
    "Version",
    "Violation",
    "Write",
    "price",
    "variables",
]
