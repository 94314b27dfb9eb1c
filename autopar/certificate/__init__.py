"""An independent certificate of a plan: every claim derived anew from the model, the mesh and
the profile, without a solver."""

from autopar.certificate.marks import named_so
from autopar.certificate.plan_claims import certify
from autopar.certificate.report import Certificate, Finding, Unverified
from autopar.certificate.staged import certify_staged

__all__ = ["Certificate", "Finding", "Unverified", "certify", "certify_staged", "named_so"]
