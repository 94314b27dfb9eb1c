"""Advice in Python syntax is printed as flags on the command line."""

from __future__ import annotations

import pytest

from autopar.cli.shared_options import as_flags


@pytest.mark.parametrize(
    ("python", "flags"),
    [
        ("or pass a larger memory_bytes", "or pass a larger --memory"),
        ('pass outputs="full": every', "pass --outputs full: every"),
        ("pass constraints=(autopar.constraints.pipeline(),)", "pass --constraint 'pipeline()'"),
        (
            "To force sharding: constraints=[autopar.constraints.fsdp()]",
            "To force sharding: --constraint 'fsdp()'",
        ),
        (
            "constraints=[autopar.constraints.pipeline('node')] gives",
            "--constraint 'pipeline(\"node\")' gives",
        ),
        ("or pass num_microbatches=1", "or pass --microbatches 1"),
        ("prediction.memory_bytes is 'x', not int", "prediction.memory_bytes is 'x', not int"),
        (
            "a model without options, its path model.memory",
            "a model without options, its path model.memory",
        ),
    ],
)
def test_options_of_plan_become_flags_and_other_text_is_unchanged(python: str, flags: str) -> None:
    assert as_flags(python) == flags
