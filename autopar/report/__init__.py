"""Pictures of a plan: chosen layouts per module, memory by kind, time line; and one page with all of them."""

from autopar.report.figures import layouts, memory
from autopar.report.page import report
from autopar.report.pipeline import schedule, stage_memory
from autopar.report.timeline import timeline

__all__ = ["layouts", "memory", "report", "schedule", "stage_memory", "timeline"]
