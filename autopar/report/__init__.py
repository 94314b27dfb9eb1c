"""Pictures of a plan: chosen layouts per module, memory by kind, time line; one page with all of
them; and what a notebook shows."""

from autopar.report.card import card
from autopar.report.charts import layouts, memory
from autopar.report.page import report
from autopar.report.timelines import schedule, stage_memory, timeline

__all__ = ["card", "layouts", "memory", "report", "schedule", "stage_memory", "timeline"]
