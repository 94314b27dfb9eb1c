"""Problem → Choices: the only package that imports pulp and highspy."""

from autopar.solve.evaluate import Evaluation, evaluate, variant_time
from autopar.solve.least import least_budget
from autopar.solve.search import fits
from autopar.solve.solver import solve

__all__ = ["Evaluation", "evaluate", "fits", "least_budget", "solve", "variant_time"]
