"""Exact replay from scratch: a tape, segments, versions, a journal. Plain Python and numpy, nothing of regrad.

Run it: `python docs/from-scratch.py`. It prints what it finds, and stops with an AssertionError if a claim is wrong.
docs/concepts/replay.md says the same in words and pictures.

The problem. A layer reads a buffer, draws noise, and overwrites part of the buffer. To save memory we drop what its
backward needs and run the layer again. By then the buffer has moved on, and so has the generator: the second run sees
another world, and the gradient is wrong with no error. Below we make that happen, and then make it right.
"""

# ruff: noqa: T201

import numpy as np

# --- 1. A world of bytes ---------------------------------------------------------------------------------------------
# All state is bytes in named storages. An operation looks at them through views: (storage, first byte, count, stride).
# Two views that share bytes are aliases; nobody has to be told.


class World:
    def __init__(self, sizes, seed):
        self.bytes = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
        self.noise = np.random.Generator(np.random.PCG64(seed))
        # beside each byte: which write made it, and where among that write's elements. This is a version's name.
        self.version = {name: np.full((size, 2), -1) for name, size in sizes.items()}
        self.writes = 0
        self.before_write = lambda storage, start, stop: None  # a journal listens here

    def array(self, view):
        storage, first, count, stride = view
        return np.ndarray((count,), np.float64, self.bytes[storage].data, first, (stride,))

    def read(self, view):
        """Values, and for each the (write, element) that it is: what an operation used, whatever happens later."""
        storage, first, count, stride = view
        names = [tuple(self.version[storage][first + stride * k]) for k in range(count)]
        return self.array(view).copy(), names

    def write(self, view, values):
        storage, first, count, stride = view
        for k in range(count):
            self.before_write(storage, first + stride * k, first + stride * k + 8)
        self.array(view)[:] = values
        for k in range(count):
            self.version[storage][first + stride * k : first + stride * k + 8] = self.writes, k
        self.writes += 1
        return self.writes - 1

    def everything(self):
        """Bytes and the generator's position: what "exact" is judged by."""
        return {name: data.tobytes() for name, data in self.bytes.items()}, str(self.noise.bit_generator.state)


# --- 2. Operations and a tape ----------------------------------------------------------------------------------------
# One kind of operation is enough: target = tanh(sum of coefficient * operand + noise), or without the tanh. Operands
# are read before the target is written, also where they overlap.


def operate(world, target, terms, noise=0.0, curve=True, tape=None):
    total, operands = np.zeros(target[2]), []
    for view, coefficient in terms:
        values, names = world.read(view)
        total += coefficient * values
        operands.append((names, coefficient))
    if noise:
        total += noise * world.noise.standard_normal(target[2])
    write = world.write(target, np.tanh(total) if curve else total)
    if tape is not None:
        # the whole of what the backward needs: versions, coefficients, and the argument (the noise is in it)
        tape.append((write, operands, total if curve else None))


def reverse(tape, adjoint):
    """v̄[operand] += v̄[write] * f'(argument) * coefficient, from the last write to the first."""
    for write, operands, argument in reversed(tape):
        for k in range(len(operands[0][0])):
            bar = adjoint.get((write, k), 0.0)
            if argument is not None:
                bar *= 1.0 - np.tanh(argument[k]) ** 2
            for names, coefficient in operands:
                adjoint[names[k]] = adjoint.get(names[k], 0.0) + bar * coefficient


# --- 3. A step of three segments -------------------------------------------------------------------------------------
# Each segment reads a window of the buffer, draws, moves part of the buffer over itself, and writes another window that
# overlaps the first. That is a queue, a running statistic or a cache, whichever you like.

X, H = ("x", 0, 4, 8), ("h", 0, 4, 8)
LOW, HIGH = ("buffer", 0, 4, 8), ("buffer", 16, 4, 8)  # they share elements 2 and 3
STRIDED = ("buffer", 0, 4, 16)  # elements 0, 2, 4, 6 of the same bytes


def segment_0(world, tape):
    operate(world, H, [(X, 0.9), (LOW, 0.8)], noise=0.3, tape=tape)
    operate(world, HIGH, [(H, 0.7), (LOW, 0.5)], curve=False, tape=tape)


def segment_1(world, tape):
    operate(world, H, [(H, 1.1), (STRIDED, -0.6)], tape=tape)
    operate(world, LOW, [(HIGH, 1.0)], curve=False, tape=tape)  # an overlapping copy, two elements down
    operate(world, H, [(H, 0.8), (LOW, 0.9)], noise=0.5, tape=tape)


def segment_2(world, tape):
    operate(world, H, [(H, 1.0), (HIGH, 0.7)], tape=tape)
    operate(world, STRIDED, [(H, 0.4), (STRIDED, 0.5)], tape=tape)
    operate(world, H, [(H, 0.9), (LOW, -0.8)], noise=0.2, tape=tape)


SEGMENTS = [segment_0, segment_1, segment_2]


def new_world(x, buffer):
    world = World({"x": 32, "h": 32, "buffer": 64}, seed=7)
    world.write(X, x)
    world.write(("buffer", 0, 8, 8), buffer)
    return world  # write 0 is x, write 1 the buffer: their versions are what we differentiate by


def loss_of(world):
    return float(world.array(H).sum())


def gradient_from(adjoint):
    return np.array([adjoint.get((0, k), 0.0) for k in range(4)] + [adjoint.get((1, k), 0.0) for k in range(8)])


def start_adjoint(world):
    return dict.fromkeys(world.read(H)[1], 1.0)


# --- 4. Eager: keep the whole tape -----------------------------------------------------------------------------------


def eager(x, buffer):
    world, tape = new_world(x, buffer), []
    for segment in SEGMENTS:
        segment(world, tape)
    adjoint = start_adjoint(world)
    reverse(tape, adjoint)
    return world, gradient_from(adjoint)


# --- 5. Recompute as it is often done: run the segment again on what is there ----------------------------------------


def replay(world, index, names_at_entry):
    """Run a segment again for its tape. The names are set to what they were: they are the graph, not the state."""
    names, writes = {name: v.copy() for name, v in world.version.items()}, world.writes
    entry_names, entry_writes = names_at_entry[index]
    for name in names:
        world.version[name][:] = entry_names[name]
    world.writes, tape = entry_writes, []
    SEGMENTS[index](world, tape)
    for name in names:
        world.version[name][:] = names[name]
    world.writes = writes
    return tape


def run_forward(world, at_entry=lambda index: None):
    names_at_entry = []
    for index, segment in enumerate(SEGMENTS):
        names_at_entry.append(({name: v.copy() for name, v in world.version.items()}, world.writes))
        at_entry(index)
        segment(world, None)  # no tape: this is the memory that we save
    return names_at_entry


def naive(x, buffer):
    world = new_world(x, buffer)
    names_at_entry = run_forward(world)
    adjoint = start_adjoint(world)
    for index in (2, 1, 0):
        reverse(replay(world, index, names_at_entry), adjoint)
    return world, gradient_from(adjoint)


# --- 6. A journal ----------------------------------------------------------------------------------------------------
# Before a byte is overwritten for the first time in a segment, its old value goes into the log, once. Undoing the log
# from its end back to a segment's entry gives the bytes that the segment saw: the oldest entry of a byte is written last
# and stands. The generator's state is kept too. Redo bytes bring the present back afterwards, whatever happens.


class Journal:
    def __init__(self, world):
        self.world, self.log, self.generators, self.seen = world, [], [], set()
        self.aside = None
        world.before_write = self.before_write

    def enter(self, index):
        self.generators.append(self.world.noise.bit_generator.state)
        self.log.append([])
        self.seen = set()

    def before_write(self, storage, start, stop):
        for at in range(start, stop):
            if self.aside is not None:  # a replay is writing: save the present, not the past
                self.aside.setdefault((storage, at), self.world.bytes[storage][at])
            elif self.log and (storage, at) not in self.seen:
                self.seen.add((storage, at))
                self.log[-1].append((storage, at, self.world.bytes[storage][at]))

    def replaying(self, index, work):
        """``work()`` in the world that segment ``index`` saw at its entry; the present is back when this returns."""
        present = self.world.noise.bit_generator.state
        self.aside = {}
        try:
            for entries in reversed(self.log[index:]):
                for storage, at, old in reversed(entries):
                    self.aside.setdefault((storage, at), self.world.bytes[storage][at])
                    self.world.bytes[storage][at] = old
            self.world.noise.bit_generator.state = self.generators[index]
            return work()
        finally:
            for (storage, at), now in self.aside.items():
                self.world.bytes[storage][at] = now
            self.world.noise.bit_generator.state = present
            self.aside = None

    @property
    def bytes_held(self):
        return sum(map(len, self.log))


def journalled(x, buffer):
    world = new_world(x, buffer)
    journal = Journal(world)
    names_at_entry = run_forward(world, journal.enter)
    adjoint = start_adjoint(world)
    for index in (2, 1, 0):
        tape = journal.replaying(index, lambda index=index: replay(world, index, names_at_entry))
        reverse(tape, adjoint)
    return world, gradient_from(adjoint), journal


# --- 7. The proof ----------------------------------------------------------------------------------------------------


def finite_differences(x, buffer, step=1e-5):
    """A judge that knows nothing of tapes or versions: change one input, run, look at the loss."""
    given, found = np.concatenate([x, buffer]), []
    for k in range(given.size):
        ends = []
        for sign in (1, -1):
            moved = given.copy()
            moved[k] += sign * step
            world = new_world(moved[:4], moved[4:])
            run_forward(world)
            ends.append(loss_of(world))
        found.append((ends[0] - ends[1]) / (2 * step))
    return np.array(found)


def main():
    random = np.random.default_rng(0)
    x, buffer = random.standard_normal(4), random.standard_normal(8)
    judge = finite_differences(x, buffer)
    world, right = eager(x, buffer)
    print(f"loss {loss_of(world):.6f}, largest gradient {np.abs(right).max():.3f}")
    print(f"eager     against finite differences: {np.abs(right - judge).max():.1e}")
    assert np.abs(right - judge).max() < 1e-8

    broken_world, wrong = naive(x, buffer)
    print(f"naive     against eager:              {np.abs(wrong - right).max():.1e}, and no error was raised")
    assert np.abs(wrong - right).max() > 1e-2
    assert broken_world.everything() != world.everything()  # and it wrote the state and drew the noise twice

    replayed_world, same, journal = journalled(x, buffer)
    print(f"journal   against eager:              {np.abs(same - right).max():.1e}")
    assert same.tobytes() == right.tobytes()
    assert replayed_world.everything() == world.everything()
    print("every byte of the state and the generator are where the eager step leaves them")
    whole = len(SEGMENTS) * sum(data.size for data in world.bytes.values())
    print(f"the journal held {journal.bytes_held} bytes, snapshots at each entry would have held {whole}")
    assert journal.bytes_held < whole

    def fails():
        segment_1(replayed_world, None)
        raise InterruptedError("in the middle of a replay")

    try:
        journal.replaying(1, fails)
    except InterruptedError as error:
        print(f"a replay that ends with '{error}' leaves the present intact")
    assert replayed_world.everything() == world.everything()


if __name__ == "__main__":
    main()
