"""The text of errors."""

from __future__ import annotations

from autopar.errors import AutoparError, Where, printable


def test_an_error_that_quotes_a_file_shows_its_control_characters_escaped() -> None:
    error = AutoparError(
        "no field '\x1b[31mred\x9b' of\na\tfile",
        where=Where(module="layers.\x07"),
        remedy="mend '\ud800\u202e'",
    )
    assert str(error).splitlines() == [
        r"no field '\x1b[31mred\x9b' of",
        "a\tfile",
        r"  where: in module layers.\x07",
        r"  what to do: mend '\ud800\u202e'",
    ]
    assert printable("é 😀 \t\n") == "é 😀 \t\n"
