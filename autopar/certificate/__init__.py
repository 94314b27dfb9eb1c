"""An independent certificate of a plan. It derives every claim from the model, the mesh and the
profile, without a solver."""

from autopar.certificate.marks import named_so
from autopar.certificate.plan_certificate import StagedTrace, certify
from autopar.certificate.report import Certificate, Finding, Unverified

__all__ = ["Certificate", "Finding", "StagedTrace", "Unverified", "certify", "named_so"]
