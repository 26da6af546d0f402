"""``rt.timeline``: the live bytes of a profiled step over time, under a plan or without one."""

from __future__ import annotations

from regrad.core.errors import PlanMismatch
from regrad.core.plan import Plan, leaves
from regrad.core.timeline import Timeline, make_timeline
from regrad.torch.move_plan import planned_moves
from regrad.torch.profile import Profile
from regrad.torch.tape_plan import tape_ranges


def timeline(source: Profile, plan: Plan | None = None) -> Timeline:
    """The timeline of the step that ``source`` profiles, under ``plan``; without a plan that of the eager step.

    It has the eager step beside it and, with a plan, the plan's budget. Cost: milliseconds; nothing is run. Raises
    :class:`regrad.core.errors.PlanMismatch` for a plan of another model, or of other segments.
    """
    if plan is None:
        return make_timeline(source.arithmetic, eager=source.trace, names=source.eager.names)
    options = tuple(leaf.option for leaf in leaves(plan.choices))
    if plan.fingerprint != source.fingerprint:
        raise PlanMismatch(plan.fingerprint, source.fingerprint, "the profile is of another one")
    if len(options) != len(source.pieces):
        detail = f"it has {len(options)} segments, the profile {len(source.pieces)}"
        raise PlanMismatch(plan.fingerprint, source.fingerprint, detail)
    search = source.masked_search if plan.masks else source.search
    taped = bool(plan.ranges or plan.moves) and search is not None
    return make_timeline(
        search.tape.with_moves(planned_moves(source.arithmetic.trace, plan.moves))
        if taped and search is not None
        else source.arithmetic,
        tape_ranges(source.arithmetic.trace, plan.ranges) if taped else source.ranges(options),
        eager=source.trace,
        names=source.eager.names,
        budget_bytes=plan.budget_bytes,
    )
