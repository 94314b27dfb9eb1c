"""Comparison of a program with the plain model. All ranks run in one process."""

from autopar.verification.check import verify_program
from autopar.verification.comparison import Verification, relative_error

__all__ = ["Verification", "relative_error", "verify_program"]
