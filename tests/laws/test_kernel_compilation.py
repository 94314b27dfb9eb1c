"""All kernels compile for the three architectures, and none spills registers."""

from __future__ import annotations

import re

import pytest
from native import needs_nvcc

from autopar.kernels import build

pytestmark = [pytest.mark.slow, needs_nvcc]
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def spills(report: str) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the bytes of stack, spill stores and spill loads reported by ptxas, by architecture
    and entry."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    current = None
    for line in report.splitlines():
        if entry := _ENTRY.search(line):
            current = (entry[2], entry[1])
        elif (numbers := _SPILLS.search(line)) and current is not None:
            found[current] = tuple(map(int, numbers.groups()))
    return found


@pytest.mark.parametrize("variant", ("release", "debug"))
def test_every_kernel_compiles_for_every_architecture_without_spills(variant: str) -> None:
    found = spills(build.build_library("cuda", variant).report)
    entries = {
        architecture: {name for own, name in found if own == architecture}
        for architecture in build.ARCHITECTURES
    }
    names = re.findall(
        r"(ap_\w+_kernel)\(",
        "\n".join(path.read_text(encoding="utf-8") for path in build.sources()),
    )
    for architecture, own in entries.items():
        missing = {name for name in names if not any(name in entry for entry in own)}
        assert not missing, f"sm_{architecture}"
    assert {key: numbers for key, numbers in found.items() if numbers[1:] != (0, 0)} == {}


def test_a_register_spill_is_detected() -> None:
    properties = "8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads"
    report = f"ptxas info    : Compiling entry function '_Z1kv' for 'sm_80'\n    {properties}\n"
    assert spills(report) == {("80", "_Z1kv"): (8, 12, 16)}
