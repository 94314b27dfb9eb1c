"""All ranks of a program in one process, compared with the plain model."""

from autopar.verification.check import verify_program
from autopar.verification.comparison import Verification, relative_error

__all__ = ["Verification", "relative_error", "verify_program"]
