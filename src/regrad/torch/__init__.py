"""regrad for PyTorch: plan a training step into a memory budget, run it under the plan, measure it."""

from regrad.core.advice import Advice
from regrad.core.audit import Audit, Divergence
from regrad.core.fit import Fit
from regrad.core.frontier_curve import Frontier, FrontierPoint
from regrad.memory.estimate import Estimate
from regrad.torch.advise import advise
from regrad.torch.audit.audit import audit
from regrad.torch.estimate import estimate
from regrad.torch.execute import apply, is_applied, remove
from regrad.torch.fit import fit
from regrad.torch.frontier import frontier
from regrad.torch.measure import Measurement, Pair, measure, measure_from_start, measure_pair
from regrad.torch.offload import FilePlace, HostPlace, Place
from regrad.torch.oom import explain_oom
from regrad.torch.plan import plan, plan_profile, profile
from regrad.torch.policy import Policy
from regrad.torch.profile import Profile
from regrad.torch.real_trace import trace
from regrad.torch.regions.public import Checkpoint, StateSpec, checkpoint, is_replaying, once
from regrad.torch.saved import saved
from regrad.torch.step import Step
from regrad.torch.timeline import timeline

__all__ = [
    "Advice",
    "Audit",
    "Checkpoint",
    "Divergence",
    "Estimate",
    "FilePlace",
    "Fit",
    "Frontier",
    "FrontierPoint",
    "HostPlace",
    "Measurement",
    "Pair",
    "Place",
    "Policy",
    "Profile",
    "StateSpec",
    "Step",
    "advise",
    "apply",
    "audit",
    "checkpoint",
    "estimate",
    "explain_oom",
    "fit",
    "frontier",
    "is_applied",
    "is_replaying",
    "measure",
    "measure_from_start",
    "measure_pair",
    "once",
    "plan",
    "plan_profile",
    "profile",
    "remove",
    "saved",
    "timeline",
    "trace",
]
