"""Misspelled or missing arguments are refused with the nearest name, and module patterns without a
match with the nearest path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.constraints import layout
from autopar.constraints.text import parse_constraint
from autopar.errors import ArgumentError, ConstraintError

MODEL, X = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
anything: Any = autopar


@pytest.mark.parametrize(
    ("call", "what", "remedy"),
    [
        (
            lambda: anything.plan(MODEL, 1, example_input=(X,)),
            "plan has no argument 'example_input'",
            "did you mean example_inputs=",
        ),
        (
            lambda: anything.plan(MODEL, 1),
            "autopar.plan is missing 'example_inputs'",
            "pass example_inputs=",
        ),
        (
            lambda: anything.plan(MODEL, example_inputs=(X,)),
            "autopar.plan is missing 'mesh'",
            "pass mesh=",
        ),
        (
            lambda: anything.plan(MODEL, 1, (X,)),
            "autopar.plan: too many positional arguments",
            "positional arguments are model, mesh",
        ),
        (
            lambda: anything.compile(MODEL, 1, optimiser="sgd"),
            "autopar.compile has no argument 'optimiser'",
            "did you mean optimizer=",
        ),
        (
            lambda: anything.compile(MODEL, 1, zzz=1),
            "autopar.compile has no argument 'zzz'",
            "compile takes model, mesh, example_inputs",
        ),
        (
            lambda: layout("*.up", wieght="S(0)"),
            "layout has no argument 'wieght'",
            "did you mean weight=",
        ),  # type: ignore[call-arg]
        (
            lambda: layout(weight="S(0)"),
            "autopar.constraints.layout is missing 'pattern'",
            "docs/constraints.md list the arguments",
        ),  # type: ignore[call-arg]
    ],
)
def test_misspelled_or_missing_arguments_are_refused_with_the_nearest_name(
    call: Callable[[], Any], what: str, remedy: str
) -> None:
    with pytest.raises(ArgumentError, match=what) as refused:
        call()
    assert (
        remedy in refused.value.remedy
        and "help(" in refused.value.remedy
        and "docs/" in refused.value.remedy
    )
    assert isinstance(refused.value, TypeError)  # the exception of Python


@pytest.mark.parametrize(
    "name",
    [
        "context_parallel",
        "ddp",
        "expert_parallel",
        "fsdp",
        "layout",
        "megatron",
        "offload",
        "pipeline",
        "tensor_parallel",
    ],
)
def test_every_constraint_names_unknown_arguments(name: str) -> None:
    make = getattr(autopar.constraints, name)
    with pytest.raises(ArgumentError, match=f"autopar.constraints.{name} has no argument 'sp'"):
        make(sp=True)


def test_a_misspelled_constraint_on_the_command_line_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConstraintError, match=r"'fspd' is not a constraint(.|\n)*mean fsdp\?"):
        parse_constraint("fspd")


def test_a_type_error_raised_inside_the_called_function_is_unchanged() -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise TypeError("of the model")

    with pytest.raises(Exception, match="of the model") as raised:
        autopar.plan(Wrong(), 1, example_inputs=(X,))
    assert not isinstance(raised.value, ArgumentError)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(4, 4)}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["up_proj"](x)
        return x.sum()


@pytest.mark.parametrize(
    ("pattern", "kind", "remedy"),
    [
        ("layers.*.up_porj", "weight", r"did you mean 'layers\.\*\.up_proj'"),
        ("layers.0.upproj", "weight", r"did you mean 'layers\.0\.up_proj'"),
        ("zzz", "weight", r"module paths are, for example, layers\.0\.up_proj"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_path(
    pattern: str, kind: str, remedy: str
) -> None:
    with pytest.raises(ConstraintError, match=remedy):
        autopar.plan(
            Deep(),
            autopar.Mesh({"gpu": 2}),
            example_inputs=(X,),
            constraints=[layout(pattern, **{kind: "S(0)"})],
        )


def test_a_pattern_of_a_module_without_the_forced_parameter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
    with pytest.raises(ConstraintError, match="module '0' exists, but has no bias"):
        autopar.plan(
            model,
            autopar.Mesh({"gpu": 2}),
            example_inputs=(X,),
            constraints=[layout("0", bias="S(0)")],
        )
