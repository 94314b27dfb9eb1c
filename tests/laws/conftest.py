"""Makes the modules of the laws importable: the cases in this folder and the models in the parent
folder."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (str(Path(__file__).parent), str(Path(__file__).parent.parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
