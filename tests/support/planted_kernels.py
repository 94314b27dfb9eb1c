"""A pytest plugin: the host's kernels are compiled from the folder that ``PLANTED_KERNELS``
names, in which a test has planted a fault."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from autopar.kernels import build

build.build_library = functools.partial(
    build.build_library, folder=Path(os.environ["PLANTED_KERNELS"])
)
