"""A pytest plugin that compiles the host kernels from the folder in ``PLANTED_KERNELS``, in which a
test has planted a fault."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from autopar.kernels import build

build.build_library = functools.partial(
    build.build_library, folder=Path(os.environ["PLANTED_KERNELS"])
)
