"""JSON text of files: what is accepted, and what is refused because it could do harm."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from autopar.core.json_text import MOST_LEVELS, read_json
from autopar.errors import CONTROL


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
def test_harmless_text_is_read_as_by_the_json_module(value: Any) -> None:
    assert read_json(json.dumps(value)) == value


def test_text_that_is_nested_too_deeply_is_refused_with_its_line() -> None:
    assert read_json("[" * MOST_LEVELS + "]" * MOST_LEVELS)
    with pytest.raises(ValueError, match=f"nested more than {MOST_LEVELS} levels deep: line 2"):
        read_json('[\n{"a": ' + "[" * MOST_LEVELS)


@pytest.mark.parametrize(
    "text",
    [
        "18446744073709551616",
        "-" + "9" * 5000,
        "1e999",
        "-1" + "0" * 400 + ".5",
        "NaN",
        "-Infinity",
    ],
)
def test_numbers_beyond_64_bits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text[:8])):
        read_json(f'{{"a": {text}}}')


def test_an_unterminated_text_is_scanned_only_once() -> None:
    with pytest.raises(ValueError, match="Unterminated string"):
        read_json('["' + '\\"' * 500_000)


def test_a_duplicate_key_in_an_object_is_refused() -> None:
    assert read_json('[{"a": 1}, {"a": {"a": 2}}]') == [{"a": 1}, {"a": {"a": 2}}]
    with pytest.raises(ValueError, match="the key 'a' occurs twice"):
        read_json('[{"b": {"a": 1, "b": 0, "a": 1}}]')


@pytest.mark.parametrize(
    "text",
    [
        '["x\\ud800"]',
        '{"\\udc00": 1}',
        '["\\udc00\\ud800"]',
        '{"a": [{"\\u001b[31m": 1}]}',
        '["\\b"]',
        '["\\r"]',
        '["\x9b31m"]',
        '["a", "\u202ex"]',
    ],
)
def test_control_characters_are_refused_in_displayed_text(text: str) -> None:
    assert read_json(text) == json.loads(text)
    with pytest.raises(ValueError, match=r"contains the control character '\\") as raised:
        read_json(text, without=CONTROL)
    assert str(raised.value).isascii()
    whole = '["\\ud83d\\ude00", "\\\\ud800", "\\n\\t\\u00e9", "é"]'
    assert read_json(whole, without=CONTROL) == json.loads(whole)
