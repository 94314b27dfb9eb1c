"""Problem → Solution: the only package that imports pulp and highspy."""

from autopar.solve.branch_and_cut import SearchRequest
from autopar.solve.cases import Cases
from autopar.solve.common import Common
from autopar.solve.evaluate import Evaluation, evaluate, evaluate_choices, fits
from autopar.solve.min_budget import Least, Lightest, least_budget
from autopar.solve.multipliers import quickest
from autopar.solve.pick_kernels import KernelUse, within
from autopar.solve.prices import op_load, routed_load
from autopar.solve.pulp_models import check_solver, write_lp
from autopar.solve.smaller import SmallerProblem
from autopar.solve.solver import choices_or_least, shortage, solve
from autopar.solve.tensor_moves import variant_load

__all__ = [
    "Cases",
    "Common",
    "Evaluation",
    "KernelUse",
    "Least",
    "Lightest",
    "SearchRequest",
    "SmallerProblem",
    "check_solver",
    "choices_or_least",
    "evaluate",
    "evaluate_choices",
    "fits",
    "least_budget",
    "op_load",
    "quickest",
    "routed_load",
    "shortage",
    "solve",
    "variant_load",
    "within",
    "write_lp",
]
