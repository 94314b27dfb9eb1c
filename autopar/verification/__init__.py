"""All ranks of a program in one process, compared with the plain model."""

from autopar.verification.check import verify_program
from autopar.verification.comparison import relative_error
from autopar.verification.report import Verification

__all__ = ["Verification", "relative_error", "verify_program"]
