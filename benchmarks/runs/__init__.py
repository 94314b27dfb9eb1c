"""Published training runs as data (`published_runs.csv`; its README has sources and caveats), and
as inputs of autopar's planner.

A run has the sizes of a model, a cluster, degrees of parallelism, a batch, and measurements:
seconds of a step, bytes of a device's peak. `setups` determines which of them can be planned and
how, and why others cannot.
"""

from benchmarks.runs.reading import RUNS, Run
from benchmarks.runs.setups import Setup, setup_of, why_skipped

__all__ = ["RUNS", "Run", "Setup", "setup_of", "why_skipped"]
