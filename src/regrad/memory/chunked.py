"""The peak of a step whose head and loss run over the rows in chunks: an estimate, from the record of the step as it is.

Everything that the loss makes of the scores, and the scores themselves, is in proportion to the rows that they are for.
With k chunks, each run again for its backward (a checkpoint around head and loss), 1/k of it is alive at a time. What
is not in proportion: the gradient of the head's weight, of which there are three while a further chunk's is added, and
the gradient of what the head is given, which is gathered chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.trace import BACKWARD, FORWARD, OPTIMIZER, WEIGHTS, Trace

_SOFTMAX = "aten._log_softmax.default"
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.linear.", "aten.matmul.")


@dataclass(frozen=True)
class LossPart:
    """Head and loss of a step, as places in its trace.

    start, softmax   the forward operations that make the scores, and that normalise them
    scaled           storages in proportion to the rows: scores, what the loss makes of them, gradients of both
    softmax_bytes    of the normalised scores
    weight_bytes     of the head's weight, hidden_bytes of what the head is given
    """

    start: int
    softmax: int
    scaled: frozenset[int]
    softmax_bytes: int
    weight_bytes: int
    hidden_bytes: int
    body: tuple[int, ...]


def find_loss(trace: Trace) -> LossPart | None:
    """Head and loss of a recorded step: the last log-softmax of its forward and the product whose result it normalises.

    None where there is no such pair.
    """
    stop = trace.phase_starts[BACKWARD]
    softmax = next((k for k in range(stop - 1, -1, -1) if trace.operations[k].name == _SOFTMAX), None)
    start = None if softmax is None else _product_before(trace, softmax)
    if softmax is None or start is None:
        return None
    reads = [trace.storages[index] for index in trace.operations[start].reads]
    weight = max((one.bytes for one in reads if one.category == WEIGHTS), default=0)
    hidden = max((one.bytes for one in reads if one.category != WEIGHTS), default=0)
    made = trace.operations[softmax].makes
    scaled = _forward_part(trace, start, stop) | _backward_part(trace, start, stop)
    body = tuple(k for k in range(start, stop) if set(trace.operations[k].makes + trace.operations[k].reads) & scaled)
    size = sum(trace.storages[index].bytes for index in made)
    return LossPart(start, softmax, frozenset(scaled), size, weight, hidden, body)


def _product_before(trace: Trace, softmax: int) -> int | None:
    """The matrix product that the argument of a log-softmax comes from, over casts, copies and scalings."""
    reads = trace.operations[softmax].reads
    while reads:
        storage = max(reads, key=lambda index: trace.storages[index].bytes)
        birth = trace.storages[storage].birth
        if birth < 0:
            return None
        if trace.operations[birth].name.startswith(_PRODUCTS):
            return birth
        reads = trace.operations[birth].reads
    return None


def _forward_part(trace: Trace, start: int, stop: int) -> set[int]:
    found = set(trace.operations[start].makes)
    for operation in trace.operations[start + 1 : stop]:
        if found.intersection(operation.reads):
            found.update(operation.makes)
    return found


def _backward_part(trace: Trace, start: int, stop: int) -> set[int]:
    """What the nodes above the head's own make in the backward."""
    head, last = trace.operations[start].sequence - 1, trace.operations[stop - 1].sequence
    found: set[int] = set()
    for operation in trace.operations[stop:]:
        if operation.phase == BACKWARD and head < operation.sequence <= last:
            found.update(operation.makes)
    return found


def chunked_peak(trace: Trace, part: LossPart, chunks: int) -> int:
    """The highest moment before the optimizer's step with head and loss in ``chunks`` chunks of rows."""
    stop, end = trace.phase_starts[BACKWARD], trace.phase_starts[OPTIMIZER]
    during, before = _scaled_levels(trace, part, chunks)
    # From the second chunk's backward on the first one's gradients are there.
    earlier = part.weight_bytes + part.hidden_bytes if chunks > 1 else 0
    head, last = trace.operations[part.start].sequence - 1, trace.operations[stop - 1].sequence
    moments = list(during[:end])
    loss_backward = [k for k in range(stop, end) if head < trace.operations[k].sequence <= last]
    moments += [during[k] + earlier for k in loss_backward]
    # A region lets go of what it replayed when its last node has run: the normalised scores are there until then.
    held = part.weight_bytes + _share(part.softmax_bytes, chunks) if chunks > 1 else 0
    moments += [during[k] + held for k in range(stop, end) if trace.operations[k].sequence == head]
    # The replay of a chunk: the forward of head and loss again, above what the backward starts from.
    alive = sum(
        _share(trace.storages[index].bytes, chunks)
        for index in part.scaled
        if trace.storages[index].birth < stop and (trace.storages[index].death or len(trace.operations)) > stop
    )
    base = before[stop] - alive
    climb = max((during[k] - before[part.start] for k in part.body), default=0)
    # Two gradients of the weight are summed into a third: those of a product are views, which no sum is written into.
    summing = base + (3 * part.weight_bytes + part.hidden_bytes if chunks > 1 else 0)
    return max([*moments, base + climb + earlier, summing])


def added_seconds(trace: Trace, part: LossPart) -> float:
    """Seconds of head and loss in the forward: they run once more."""
    return sum(trace.operations[k].seconds for k in part.body if trace.operations[k].phase == FORWARD)


def _share(size: int, chunks: int) -> int:
    return -(-size // chunks)


def _scaled_levels(trace: Trace, part: LossPart, chunks: int) -> tuple[list[int], list[int]]:
    """Bytes alive while each operation runs, and as it starts, with the loss's storages at their share."""
    count = len(trace.operations)
    change, base = [0] * (count + 1), 0
    made = [0] * (count + 1)
    for index, storage in enumerate(trace.storages):
        size = _share(storage.bytes, chunks) if index in part.scaled else storage.bytes
        if storage.birth < 0:
            base += size
        else:
            made[storage.birth] += size
        if storage.death is not None:
            change[storage.death] -= size
    level, during, before = base, [], []
    for slot, operation in enumerate(trace.operations):
        level += change[slot]
        before.append(level)
        level += made[slot]
        during.append(level + operation.workspace_bytes)
    before.append(level + change[count])
    return during, before
