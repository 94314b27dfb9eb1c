"""The text of an assembled plan is the same on every machine."""

from __future__ import annotations

import os
import sys
import sysconfig

import pytest

from autopar.planner.plan_assembly import portable_line


def test_a_source_line_has_the_file_path_relative_to_the_import_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = sysconfig.get_paths()["purelib"]
    assert (
        portable_line(os.path.join(packages, "transformers/pytorch_utils.py:12: x = 1"))
        == "transformers/pytorch_utils.py:12: x = 1"
    )
    monkeypatch.setattr(sys, "path", ["/one", "/one/deeper"])
    assert portable_line("/one/deeper/model.py:3: y") == "model.py:3: y"
    assert portable_line("/onely/model.py:3: y") == "/onely/model.py:3: y"
    assert portable_line("") == ""
