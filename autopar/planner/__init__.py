"""The search over plans."""

from autopar.planner.candidates import TooSlow
from autopar.planner.pipeline.stage_construction import make_staged_plan
from autopar.planner.search import Planned, make_plan
from autopar.request import PlanOptions

__all__ = ["PlanOptions", "Planned", "TooSlow", "make_plan", "make_staged_plan"]
