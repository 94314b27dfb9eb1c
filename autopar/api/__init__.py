"""The public functions of autopar."""

from autopar.api.arguments import Example, MeshLike, as_call, as_mesh, default_hardware
from autopar.api.compiling import Deferred, compile
from autopar.api.plan_options import check_fits
from autopar.api.planning import check, plan, plan_model, verify
from autopar.api.what_if import WhatIf, flips, what_if

__all__ = [
    "Deferred",
    "Example",
    "MeshLike",
    "WhatIf",
    "as_call",
    "as_mesh",
    "check",
    "check_fits",
    "compile",
    "default_hardware",
    "flips",
    "plan",
    "plan_model",
    "verify",
    "what_if",
]
