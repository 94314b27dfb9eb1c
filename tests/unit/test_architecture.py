"""The page on the structure of the package (`autopar/README.md`) matches the package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "autopar"
PAGE = (PACKAGE / "README.md").read_text(encoding="utf-8")
FLOW = PAGE.split("```")[1]
STEPS = re.findall(r"│  ([a-z_.]+)", FLOW) + re.findall(
    r"^([a-z_]+\.[a-z_.]+\.[A-Z]\w+)", FLOW, re.M
)


def test_each_step_of_the_flow_has_a_function() -> None:
    assert len(STEPS) >= 7


@pytest.mark.parametrize("name", STEPS)
def test_each_function_and_type_of_the_flow_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(f"autopar.{module}"), attribute)


def test_each_package_has_a_row_in_the_table() -> None:
    table = PAGE[PAGE.index("## Where things are") : PAGE.index("## Five data types")]
    rows = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    units = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    units |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert units <= rows, f"without a row: {sorted(units - rows)}"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_/]+\.py|[a-z_]+/)`", PAGE))))
def test_each_named_file_exists(path: str) -> None:
    root = (
        PACKAGE.parent if path.startswith(("tests/", "autopar_csrc/", "cost_models/")) else PACKAGE
    )
    assert (root / path).exists()
