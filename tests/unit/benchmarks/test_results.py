"""Files of results contain no paths of a machine."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from benchmarks import common

RESULTS = Path(common.ROOT) / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_contain_no_absolute_paths(path: Path) -> None:
    assert not re.search(r"(/home|/work|/root|/tmp|/Users)/", path.read_text(encoding="utf-8"))


def test_errors_contain_file_names_relative_to_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = str(tmp_path / "lib" / "packages")
    monkeypatch.setattr(sys, "path", [str(tmp_path), packages, *sys.path])
    row = {
        "error": (
            f"at {os.path.join(packages, 'models', 'yoso.py')}:3: x, {tmp_path / 'train.py'}:1: y,"
            f" {common.ROOT / 'a.py'}:2: z"
        )
    }
    common._write(str(tmp_path / "out.json"), [row])
    (read,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    assert read["error"] == f"at {os.path.join('models', 'yoso.py')}:3: x, train.py:1: y, a.py:2: z"
