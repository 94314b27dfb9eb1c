"""Plans and their parts."""

from autopar.plans.asked import OPTIONS
from autopar.plans.bucket import Bucket, Member
from autopar.plans.flip import COMPUTE, FARTHEST, NO_CHOICE, NO_DEARER, NO_FLIP, NO_OTHER, Flip, Flips
from autopar.plans.idle import idle_axes
from autopar.plans.load import beyond_shares_s, counted_time, forward_load, load_of, moved_load
from autopar.plans.overlap import Overlap, Piece
from autopar.plans.parts import (
    KERNELS_BUFFERS,
    RESTING,
    Communication,
    Crossed,
    Entry,
    Fingerprint,
    InKernel,
    Kept,
    NodeChoice,
    Prediction,
    RunnerUp,
)
from autopar.plans.plan import FORMAT, VERSION, Pipeline, Plan
from autopar.plans.proof import OnProfile, Potential, Proof, Version

__all__ = [
    "COMPUTE",
    "FARTHEST",
    "FORMAT",
    "KERNELS_BUFFERS",
    "NO_CHOICE",
    "NO_DEARER",
    "NO_FLIP",
    "NO_OTHER",
    "OPTIONS",
    "RESTING",
    "VERSION",
    "Bucket",
    "Communication",
    "Crossed",
    "Entry",
    "Fingerprint",
    "Flip",
    "Flips",
    "InKernel",
    "Kept",
    "Member",
    "NodeChoice",
    "OnProfile",
    "Overlap",
    "Piece",
    "Pipeline",
    "Plan",
    "Potential",
    "Prediction",
    "Proof",
    "RunnerUp",
    "Version",
    "beyond_shares_s",
    "counted_time",
    "forward_load",
    "idle_axes",
    "load_of",
    "moved_load",
]
