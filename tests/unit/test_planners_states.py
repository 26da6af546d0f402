"""State in a plan, by hand: what the walk charges, what is illegal, what controls do, when journalling does not pay."""

from dataclasses import replace

import pytest

import regrad.planners
from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Problem, Segment
from regrad.core.codec import dump, load
from regrad.core.errors import IllegalSchedule, InvalidPlan, PlannerMismatch
from regrad.core.plan import Choice, Status, one_level
from regrad.core.schedule import PutBack, Schedule, schedule_of
from regrad.core.simulate import simulate, walk
from regrad.core.state import (
    JOURNAL,
    READ_SET,
    SNAPSHOT,
    STAYS_BACK,
    UNION,
    Bandwidth,
    LogEntry,
    Moves,
    StateCost,
    StateVariable,
)
from regrad.core.state_options import with_states, without_states
from regrad.planners import (
    Frontier,
    KeepOrSnapshot,
    Optimal,
    Planner,
    Portfolio,
    StateAgnostic,
    Why,
    journalling,
)

GIB = 2**30

#   a queue of 100 bytes: segments 0, 2 and 3 overwrite 8, 4 and 2 bytes of it (the 2 are among the 8), header 1 each
QUEUE = StateVariable(
    "queue",
    100,
    (LogEntry(0, "queue", 0, 8, 1), LogEntry(2, "queue", 20, 4, 1), LogEntry(3, "queue", 6, 2, 1)),
    bandwidth=Bandwidth(4.0, 2.0),
)


def chain(count=4, kept=50):
    keep = Option(KEEP, kept, 5, 60)
    again = Option(RECOMPUTE, 10, 45, 60, added_seconds=1.0, recomputes=True)
    return Chain(tuple(Segment(f"s{i}", (keep, again)) for i in range(count)), 1000)


def plan(problem, *engines):
    """``keep`` where the engine is empty, else the option that uses it."""
    names = [
        next(o.name for o in s.options if (not e and o.name == KEEP) or any(u.engine == e for u in o.states))
        for s, e in zip(problem.chain.segments, engines, strict=True)
    ]
    return one_level(names)


SHARED = Problem(with_states(chain(), [QUEUE]), states=(QUEUE,))
LOCAL = Problem(with_states(chain(), [QUEUE], (SNAPSHOT, UNION)), states=(QUEUE,))


def test_options_are_multiplied_by_engines_where_a_segment_touches_state():
    assert [len(s.options) for s in SHARED.chain.segments] == [4, 2, 4, 4]  # keep, and recompute by three engines
    names = [option.name for option in SHARED.chain.segments[2].options]
    assert names == [
        "keep",
        "recompute, queue by snapshot",
        "recompute, queue by journal",
        "recompute, queue by journal (stays back)",
    ]
    whole, log = SHARED.chain.segments[2].options[1:3]
    # a copy of 100 bytes: out in the forward; the present out, the copy in and the present back in the backward
    assert (whole.retained_bytes, whole.transient_bytes, whole.forward_bytes) == (110, 145, 160)
    assert whole.added_seconds == 1 + 200 / 4 + 200 / 2
    assert (log.retained_bytes, log.transient_bytes, log.added_seconds, log.engine) == (10, 45, 1.0, JOURNAL)
    # the union of segment 0: 8 and 4 bytes, and nothing for the 2 that it has already
    union = LOCAL.chain.segments[0].options[2]
    assert (union.retained_bytes, union.transient_bytes, union.added_seconds) == (10 + 12 + 2, 45 + 12, 1 + 6 + 12)
    assert without_states(SHARED.chain).segments[2].options[1].retained_bytes == 10
    with pytest.raises(InvalidPlan, match="touched by segment 3 of 3"):
        with_states(chain(3), [QUEUE])
    with pytest.raises(InvalidPlan, match="none of the engines read_set has a cost for state 'queue'"):
        with_states(chain(), [QUEUE], (READ_SET,))
    many = [replace(QUEUE, name=f"v{i}") for i in range(13)]
    with pytest.raises(InvalidPlan, match="segment 's0' has more than 4,096 options"):
        with_states(chain(), many, (SNAPSHOT, JOURNAL))


def test_the_log_lives_from_the_first_replayed_writer_to_that_segments_backward():
    # forward   1000+60; 1010+60; 1060+(4+1)+60 where the entry of 2 is born; 1075+(2+1)+60
    # backward  5 above all of it, and for 2 what its replay puts aside (4+2) and its own 45; then the log is gone
    walked = simulate(plan(SHARED, "", "", JOURNAL, ""), SHARED.chain, states=(QUEUE,))
    assert walked.levels[:4] == (1060, 1110, 1100 + 5 + 60, 1110 + 5 + 3 + 60)
    assert walked.levels[4:] == (1160 + 8 + 5, 1110 + 8 + 45 + 6, 1100 + 5, 1050 + 5, 1000)
    # gather 6 in the forward and 6 for the redo, scatter 6 back and 6 forth
    assert walked.moves == Moves(12, 12)
    assert walked.added_seconds == 1 + 12 / 4 + 12 / 2
    static = simulate(plan(SHARED, "", "", JOURNAL, ""), SHARED.chain, "static", (QUEUE,))
    assert static.peak_bytes == 1000 + 160 + 8 + (45 + 6)


def test_staying_back_holds_the_present_between_replays_and_moves_less():
    returns = simulate(plan(SHARED, JOURNAL, "", "", JOURNAL), SHARED.chain, states=(QUEUE,))
    stays = simulate(plan(SHARED, STAYS_BACK, "", "", STAYS_BACK), SHARED.chain, states=(QUEUE,))
    # log 9 + 5 + 3 = 17. 3: redo 2; between them the 2 stay aside, and nothing of the log but what 0 still needs: all
    assert returns.levels[4:] == (1120 + 17 + 45 + 2, 1110 + 17 + 5, 1060 + 17 + 5, 1010 + 17 + 45 + 12, 1000)
    assert stays.levels[4:] == (1120 + 17 + 45 + 2, 1110 + 17 + 2 + 5, 1060 + 17 + 2 + 5, 1010 + 17 + 45 + 12, 1000)
    # forward 14; 3: 2 undone, 2 redone; 0: 14 undone, 12 redone
    assert returns.moves == Moves(14 + 2 + 12, 2 + 2 + 14 + 12)
    # the 2 are put aside once; 0 undoes from where 3 ended, and all 12 return at the end
    assert stays.moves == Moves(14 + 12, 2 + 14 + 12)
    assert schedule_of(plan(SHARED, STAYS_BACK, "", "", STAYS_BACK), SHARED.chain).actions[-1] == PutBack(0, "queue")


def test_entries_that_a_rolled_back_state_has_passed_are_dropped():
    stays = simulate(plan(SHARED, STAYS_BACK, "", STAYS_BACK, ""), SHARED.chain, states=(QUEUE,))
    # 2 is replayed: the entry of 3 (3 bytes) goes with its backward, and 4 + 2 bytes stay aside
    assert stays.levels[6:8] == (1060 + 14 + 6 + 5, 1010 + 14 + 45 + 12)


ILLEGAL = {
    "its present never returns": (lambda a: [x for x in a if not isinstance(x, PutBack)], "of 'queue' never returned"),
    "its present returns twice": (lambda a: [*a, PutBack(0, "queue")], "'queue' does not stand rolled back"),
    "its present returns too early": (
        lambda a: [x for x in a[:5] if x != a[-1]] + [a[-1]] + a[5:-1],
        "dropped when its present returned",
    ),
    "its present returns before any replay": (lambda a: [PutBack(0, "queue"), *a], "does not stand rolled back"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_a_schedule_is_illegal_if_a_state(name):
    change, why = ILLEGAL[name]
    actions = list(schedule_of(plan(SHARED, STAYS_BACK, "", "", STAYS_BACK), SHARED.chain).actions)
    assert walk(Schedule(tuple(actions)), SHARED.chain, states=(QUEUE,)).recomputes == (1, 0, 0, 1)
    with pytest.raises(IllegalSchedule, match=why):
        walk(Schedule(tuple(change(actions))), SHARED.chain, states=(QUEUE,))


def test_replays_that_do_not_go_together_are_illegal():
    for engines, why in (
        ((JOURNAL, "", STAYS_BACK, ""), "dropped when its present returned"),
        ((STAYS_BACK, "", JOURNAL, STAYS_BACK), "stays back stays back too"),
    ):
        with pytest.raises(IllegalSchedule, match=why):
            simulate(plan(SHARED, *engines), SHARED.chain, states=(QUEUE,))
    reader = replace(QUEUE, present_readers=(1,))
    both = plan(SHARED, STAYS_BACK, "", STAYS_BACK, "")
    with pytest.raises(IllegalSchedule, match="it reads the present of 'queue', which stands rolled back"):
        simulate(both, SHARED.chain, states=(reader,))
    with pytest.raises(InvalidPlan, match="needs the log of 'queue', of which nothing is known"):
        simulate(both, SHARED.chain)
    with pytest.raises(InvalidPlan, match="segment 's0' has an option that needs the log of state 'queue'"):
        Problem(SHARED.chain)


def test_a_span_brings_no_state_back():
    keep, again = chain().segments[0].options
    segments = [Segment(f"s{i}", (keep, again)) for i in range(4)]
    stateful = with_states(Chain(tuple(segments)), [QUEUE], (SNAPSHOT,))
    mixed = replace(stateful.segments[2], options=(*stateful.segments[2].options, again))
    spanned = replace(stateful, segments=(segments[0], segments[1], mixed, segments[3]))
    inner = (Choice(1, 2, KEEP), Choice(2, 3, "recompute, queue by snapshot"))
    choices = (Choice(0, 1, KEEP), Choice(1, 3, RECOMPUTE, inner), Choice(3, 4, KEEP))
    with pytest.raises(IllegalSchedule, match="not brought back inside a span"):
        simulate(choices, spanned, states=(QUEUE,))
    with pytest.raises(PlannerMismatch, match="plans no replays from a log that segments share"):
        Optimal(nested=True)(SHARED, 2000)
    with pytest.raises(PlannerMismatch, match="plans no replays from a log"):
        Optimal(nested=True).curve(SHARED)
    assert Portfolio(spans=True)(SHARED, 1140).added_seconds <= Optimal()(SHARED, 1140).added_seconds


def test_a_plan_with_states_stays_readable_as_json():
    solution = Optimal()(SHARED, 1140)
    text = dump(solution)
    assert "recompute, queue by journal" in text
    assert load(type(solution), text) == solution


def test_controls_leave_out_what_they_say():
    budget = 1140
    best, agnostic, whole = Optimal()(SHARED, budget), StateAgnostic()(SHARED, budget), KeepOrSnapshot()(SHARED, budget)
    assert any("journal" in choice.option for choice in best.plan)
    # without state costs a copy looks as good as a journal, and it stands first; charged, no plan with one fits
    assert agnostic.plan is None or agnostic.added_seconds > best.added_seconds
    assert whole.plan is None
    assert {choice.option for choice in KeepOrSnapshot()(SHARED, whole.least_bytes).plan} <= {
        KEEP,
        RECOMPUTE,
        "recompute, queue by snapshot",
    }
    journals = Problem(with_states(chain(), [QUEUE], (JOURNAL,)), states=(QUEUE,))
    only = replace(journals, shape=Chain(tuple(replace(s, options=s.options[1:]) for s in journals.chain.segments)))
    with pytest.raises(PlannerMismatch, match="neither be kept nor replayed from a copy"):
        KeepOrSnapshot()(only, 2000)


PUBLIC = [value for value in vars(regrad.planners).values() if isinstance(value, type) and issubclass(value, Planner)]


@pytest.mark.parametrize("kind", [kind for kind in PUBLIC if kind is not Planner])
def test_every_public_planner_names_its_papers_and_its_bound(kind):
    planner = kind()
    assert planner.papers
    assert all(len(paper) > 10 for paper in planner.papers)
    assert len(planner.validity) > 20
    text = planner.cite()
    assert text.startswith(planner.label)
    assert planner.validity in text
    assert all(paper in text for paper in planner.papers)


def test_there_are_planners_to_cite():
    assert len(PUBLIC) >= 14
    assert {Optimal, Frontier, StateAgnostic, KeepOrSnapshot} <= set(PUBLIC)


def regime(*, versions=64, buffer=GIB, fraction=0.001, activations=GIB // 2, engines=(SNAPSHOT, JOURNAL, STAYS_BACK)):
    """A buffer that each of ``versions`` segments overwrites a share of, elsewhere than the others where there is room.

    Replay costs time: 1 ms a segment, and moves at 1 TB/s. A step keeps ``activations`` for each segment.
    """
    share = int(buffer * fraction)
    entries = tuple(LogEntry(k, "buffer", (k * share) % (buffer - share + 1), share, 32) for k in range(versions))
    variable = StateVariable("buffer", buffer, entries, bandwidth=Bandwidth(1e12, 1e12))
    keep = Option(KEEP, activations, 0)
    again = Option(RECOMPUTE, 2**20, activations, added_seconds=1e-3, recomputes=True)
    blocks = Chain(tuple(Segment(f"s{i}", (keep, again)) for i in range(versions)), buffer)
    return Problem(with_states(blocks, [variable], engines), states=(variable,))


def test_sparse_writes_and_a_tight_budget_pay():
    problem = regime(activations=GIB)
    for planner, rule in ((Optimal(), "timeline"), (Frontier(), "static")):
        ruled = replace(problem, rule=rule)
        solution = planner(ruled, 32 * GIB)
        verdict = journalling(ruled, solution, 32 * GIB)
        assert solution.status is Status.OPTIMAL
        assert verdict.pays
        assert [finding.why for finding in verdict.findings] == [Why.PAYS]
        assert verdict.findings[0].ours_bytes < 0.01 * verdict.findings[0].other_bytes
        assert "whole copies 64.0 GiB" in str(verdict)
        # eager and whole copies alone have no plan at all
        assert KeepOrSnapshot()(ruled, 32 * GIB).plan is None


def test_a_roomy_budget_is_all_eager():
    """The third regime of the paper: 20 GiB hold the eager step, and both planners keep everything."""
    problem = regime(activations=GIB // 4)
    for planner, rule in ((Optimal(), "timeline"), (Frontier(), "static")):
        ruled = replace(problem, rule=rule)
        solution = planner(ruled, 20 * GIB)
        assert {choice.option for choice in solution.plan} == {KEEP}
        assert solution.plan == KeepOrSnapshot()(ruled, 20 * GIB).plan
        verdict = journalling(ruled, solution, 20 * GIB)
        assert not verdict.pays
        assert Why.ROOMY_BUDGET in [finding.why for finding in verdict.findings]
        assert "the eager step needs 17.0 GiB of 20.0 GiB" in str(verdict)


def test_where_activations_are_small_keeping_is_smaller_and_faster_than_every_replay():
    problem = regime(activations=2**20)
    verdict = journalling(problem, Optimal()(problem, 2 * GIB), 2 * GIB)
    assert not verdict.pays
    assert [finding.why for finding in verdict.findings] == [Why.ROOMY_BUDGET, Why.EAGER_IS_SMALLER]


@pytest.mark.parametrize("engines", [(SNAPSHOT, JOURNAL), (SNAPSHOT, UNION)])
def test_dense_writes_hold_as_much_as_copies_and_their_bookkeeping(engines):
    problem = regime(versions=8, buffer=2**20, fraction=1.0, activations=2**23, engines=engines)
    solution = Optimal()(problem, 40 * 2**20)
    verdict = journalling(problem, solution, 40 * 2**20)
    finding = next(finding for finding in verdict.findings if finding.why is Why.DENSE_WRITES)
    assert finding.ours_bytes - finding.other_bytes == 8 * 32
    assert not verdict.pays
    assert any("snapshot" in choice.option for choice in solution.plan)
    assert "writes are dense: the journal of 8 replays holds 8.00 MiB" in finding.text


def test_what_else_there_is_to_say():
    entries = (LogEntry(0, "codebook", 0, 64, 0), LogEntry(3, "codebook", 64, 64, 0))
    read = tuple(StateCost(k, READ_SET, 1, 1, Moves(1), Moves(1, 2)) for k in (0, 3))
    state = StateVariable("codebook", 1000, entries, costs=read, bandwidth=Bandwidth(1.0, 1.0))
    problem = Problem(with_states(chain(kept=500), [state], (READ_SET, JOURNAL)), states=(state,))
    curve = Optimal().curve(problem)
    tight = curve.at(curve.least_bytes)
    assert any("read_set" in choice.option for choice in tight.plan)
    (finding,) = journalling(problem, tight, curve.least_bytes).findings
    assert finding.why is Why.ANOTHER_ENGINE
    assert "faster with read_set" in finding.text
    copies = Problem(with_states(chain(), [QUEUE], (SNAPSHOT,)), states=(QUEUE,))
    (finding,) = journalling(copies, Optimal()(copies, 5000), 5000).findings
    assert finding.why is Why.NOT_OFFERED
