"""JSON of files: what is read, and what is refused before it can do harm."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from autopar.json_text import MOST_LEVELS, read_json


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -2.5e-300, True, None, "x"], "": {}},
        2**64 - 1,
        -(2**64) + 1,
        ["[" * 1000, '"' + "{" * 1000, "\\" + "[" * 1000, "\n" * 5],
        [[]] * 1000,
    ],
)
def test_all_that_is_harmless_is_read_as_json_reads_it(value: Any) -> None:
    assert read_json(json.dumps(value)) == value


def test_depth_is_bounded_and_said_with_its_line() -> None:
    assert read_json("[" * MOST_LEVELS + "]" * MOST_LEVELS)
    with pytest.raises(ValueError, match=f"nested more than {MOST_LEVELS} levels deep: line 2"):
        read_json('[\n{"a": ' + "[" * MOST_LEVELS)


@pytest.mark.parametrize("text", ["18446744073709551616", "-" + "9" * 5000, "1e999", "-1" + "0" * 400 + ".5", "NaN", "-Infinity"])
def test_numbers_that_no_64_bits_hold_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text[:8])):
        read_json(f'{{"a": {text}}}')


def test_a_text_without_end_is_scanned_once() -> None:
    with pytest.raises(ValueError, match="Unterminated string"):
        read_json('["' + '\\"' * 500_000)
