"""Hardware profiles: what a device and its links can do, each figure with its unit, source and
date."""

from autopar.core.hardware.figures import (
    FLOP_KINDS,
    KERNELS,
    LINKS,
    MEMORY_KINDS,
    Curve,
    Figure,
    Host,
    Link,
    WorkKind,
)
from autopar.core.hardware.mixed import (
    Hardware,
    Mixed,
    profile_of,
    slowest,
    slowest_link,
    slowest_of,
)
from autopar.core.hardware.profile import FORMAT, VERSION, HardwareProfile

__all__ = [
    "FLOP_KINDS",
    "FORMAT",
    "KERNELS",
    "LINKS",
    "MEMORY_KINDS",
    "VERSION",
    "Curve",
    "Figure",
    "Hardware",
    "HardwareProfile",
    "Host",
    "Link",
    "Mixed",
    "WorkKind",
    "profile_of",
    "slowest",
    "slowest_link",
    "slowest_of",
]
