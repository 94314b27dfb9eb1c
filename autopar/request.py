"""The options of planning. Each is declared once, with its default, its check, its texts and its
command line flag: a field of `PlanOptions` with an `Option`. Signatures and docstrings of the
functions that take options (`autopar.api.options`), flags (`autopar.cli.shared_options`) and what a
plan records follow from it. The table in `docs/planning.md` is tested against it.

The functions take ``**options: Unpack[PlanKeywords]``: type checkers read names and types from
`PlanKeywords`, `help` shows the defaults, and a function can tell which options were passed.
`compile` refuses options together with a plan.

This module does not import torch, so that help texts and mistyped options are shown at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from autopar.core.terminal import parse_size
from autopar.option_checks import (
    Check,
    Precision,
    among,
    as_constraints,
    at_least,
    check_budget,
    check_constraints,
    check_gap,
    check_limit,
    check_name,
    check_precision,
    check_switch,
    read_budget,
)

if TYPE_CHECKING:
    from autopar.constraints import Constraint
    from autopar.core.hardware import HardwareProfile

Backend = Literal["eager", "inductor"]
Batch = Literal["global", "local"]
Outputs = Literal["full", "local", "dtensor", "loss", "auto"]
Auto = Literal["auto"]
Effort = Literal["quick", "normal", "thorough"]
Call = Literal["plan", "compile", "what_if"]
OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "none")
UNLIMITED = 2**60
"""Bytes of a budget that limits nothing."""
RESERVED_SHARE = 0.1
"""Share of the device memory for the allocator, workspaces of kernels and communication buffers."""
_BEHIND = 0.25  # share of a time limit that is reserved for what follows the last solve


@dataclass(frozen=True, slots=True)
class Flag:
    """An option on the command line.

    Attributes:
        name: its name, with dashes.
        help: its help text.
        kind: type of the value that typer returns.
        default: the value if the flag is not given.
        metavar: placeholder of the value in the help text.
        least: least number that typer accepts.
        read: converts the value that typer returns to the value of the option.
    """

    name: str
    help: str
    kind: Any
    default: Any = None
    metavar: str | None = None
    least: int | None = None
    read: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of an option, apart from its name, type and default.

    Attributes:
        help: its text in docstrings.
        check: raises an error if a value is not allowed.
        brief: its text in the table of `docs/planning.md`; empty if it is not in the table.
        default_in_words: the default in the table, if it is not written as a value.
        unit: unit of the value.
        calls: the functions that take it.
        is_recorded: whether plans record it.
        flag: its command line flag, if it has one.
    """

    help: str
    check: Check
    brief: str = ""
    default_in_words: str = ""
    unit: str = ""
    calls: tuple[Call, ...] = ("plan", "compile")
    is_recorded: bool = True
    flag: Flag | None = None


def _option(help: str, check: Check, **more: Any) -> Mapping[str, Option]:
    return {"option": Option(help, check, **more)}


def _read_constraints(texts: Sequence[str] | None) -> tuple[Constraint, ...]:
    if not texts:
        return ()
    from autopar.constraints.text import parse_constraint  # which needs torch

    return tuple(parse_constraint(text) for text in texts)


class WhatIfKeywords(TypedDict, total=False):
    """The options that `autopar.what_if` takes. A plan does not record them."""

    time_limit_s: float
    solver: str
    effort: Effort


class SearchKeywords(WhatIfKeywords, total=False):
    """The options that control the search of `autopar.plan`."""

    gap: float
    cache: bool


class PlanKeywords(SearchKeywords, total=False):
    """The options that `autopar.plan` takes, for type checkers; defaults are in `PlanOptions`."""

    memory_bytes: int | str | None
    optimizer: str
    constraints: Sequence[Constraint]
    strict: bool
    num_microbatches: int | Auto
    loss_rows: int | Auto
    precision: Precision | None
    inference: bool
    batch: Batch
    outputs: Outputs


class CompileKeywords(PlanKeywords, total=False):
    """The options that `autopar.compile` takes."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of planning. The `Option` of each field describes it.

    Attributes:
        ends: the time on the monotonic clock, in seconds, at which the time limit of a planning
            that has begun is over (`begun`). It is not an option.
    """

    memory_bytes: int | None = field(
        default=None,
        metadata=_option(
            'memory budget per device, as a number or as text, such as ``"80GiB"``; by default 90 %'
            " of the device memory in the hardware profile.",
            check_budget,
            brief="memory budget per device; every plan fits it",
            default_in_words="90 % of the device memory",
            unit="bytes",
            flag=Flag(
                "--memory",
                "Memory per device, for example 72GiB; by default 90 % of the device memory.",
                str | None,
                metavar="SIZE",
                read=parse_size,
            ),
        ),
    )
    optimizer: str = field(
        default="adamw",
        metadata=_option(
            "the optimizer whose state is stored next to the parameters: ``adamw``, ``adam``,"
            " ``sgd``, ``momentum`` or ``none``.",
            among(OPTIMIZERS, form="{name} {value!r}"),
            brief=(
                'optimizer whose state is stored next to the parameters: `"adamw"`, `"adam"`,'
                ' `"sgd"`, `"momentum"` or `"none"`'
            ),
            flag=Flag(
                "--optimizer",
                "Optimizer whose state is stored: adamw, adam, sgd, momentum or none.",
                str,
                "adamw",
            ),
        ),
    )
    constraints: tuple[Constraint, ...] = field(
        default=(),
        metadata=_option(
            "decisions that the plan must follow (`autopar.constraints`).",
            check_constraints,
            brief="[what you decide yourself](constraints.md)",
            flag=Flag(
                "--constraint",
                "A decision that the plan must follow, written as in Python: 'megatron(tp=8,"
                " zero=3)' or fsdp. Can be repeated.",
                list[str] | None,
                metavar="CALL",
                read=_read_constraints,
            ),
        ),
    )
    strict: bool = field(
        default=False,
        metadata=_option(
            "refuse the model if an op would run replicated because it has no sharding rule.",
            check_switch,
            brief="refuse a model if an op would run replicated because it has no rule",
            flag=Flag(
                "--strict/--no-strict",
                "Refuse the model if an op would run replicated because it has no sharding rule.",
                bool,
                False,
            ),
        ),
    )
    gap: float = field(
        default=0.01,
        metadata=_option(
            "relative distance between the plan and the proven bound at which the search stops.",
            check_gap,
            brief="relative distance to the proven bound at which the search stops",
            flag=Flag(
                "--gap",
                "Relative distance to the proven bound at which the search stops.",
                float,
                0.01,
            ),
        ),
    )
    time_limit_s: float = field(
        default=math.inf,
        metadata=_option(
            "time limit for all of planning. Shortly before it is reached, the best plan so far is"
            " returned with its gap; only finding the first plan that fits may take longer. There"
            " is no limit by default. All other limits count work instead of seconds, so the same"
            " input gives the same plan, byte for byte. If the time limit ends a solve, a warning"
            " says that the next run may give another plan.",
            check_limit,
            brief="time limit for all of planning; the best plan so far is returned with its gap",
            default_in_words="none",
            unit="seconds",
            calls=get_args(Call),
            is_recorded=False,
            flag=Flag(
                "--time-limit",
                "Time limit of planning, after which the best plan so far is taken, with its gap."
                " By default none.",
                float | None,
                metavar="SECONDS",
                read=lambda limit_s: math.inf if limit_s is None else limit_s,
            ),
        ),
    )
    solver: str = field(
        default="highs",
        metadata=_option(
            '``"highs"``, or a solver that PuLP finds on this machine: ``"cbc"``, ``"scip"``,'
            ' ``"gurobi"``, or its full name in PuLP, in upper or lower case. ``"pulp:highs"`` is'
            " HiGHS through PuLP. Solvers through PuLP are slower.",
            check_name,
            brief="which [solver](#solvers) solves the integer program",
            calls=get_args(Call),
            is_recorded=False,
            flag=Flag(
                "--solver",
                "highs, or a solver that PuLP finds on this machine, such as cbc, scip or gurobi,"
                " which is slower.",
                str,
                "highs",
                metavar="NAME",
            ),
        ),
    )
    effort: Effort = field(
        default="normal",
        metadata=_option(
            "how much work is spent on alternatives to the first plan: other mesh shapes, named"
            ' plans, and pipeline stages that no constraint asks for. ``"quick"``: none, unless no'
            ' plan fits without them; ``"normal"``: about as much as one search on a mesh of three'
            ' axes; ``"thorough"``: all alternatives that bounds do not exclude. Alternatives that'
            " were not tried are listed in the plan's proof, with their bounds.",
            among(get_args(Effort)),
            brief="how much work [alternatives to the first plan](#alternatives) may take",
            calls=get_args(Call),
            is_recorded=False,
            flag=Flag(
                "--quick/--thorough",
                "Search no alternatives to the first plan (other mesh shapes, stages), or all that"
                " bounds do not exclude; by default those that take little work.",
                bool | None,
                read=lambda quick: {None: "normal", True: "quick", False: "thorough"}[quick],
            ),
        ),
    )
    num_microbatches: int | Auto = field(
        default="auto",
        metadata=_option(
            'the number of microbatches, which run one after another. With ``"auto"`` it is 1, or'
            " the smallest number that fits into memory; in a pipeline"
            " (`autopar.constraints.pipeline`) the planner chooses it, and it is 1 if samples"
            " depend on each other. Stages that no constraint asks for are tried on GPUs if there"
            " are no constraints and the step returns the loss only, unless the number is 1.",
            at_least(1, "microbatches"),
            brief=(
                "number of parts that the batch is cut into; 1 also rules out stages that no"
                " constraint asks for"
            ),
            flag=Flag(
                "--microbatches",
                "Number of microbatches that the batch is cut into.",
                int | None,
                least=1,
                read=lambda number: number or "auto",
            ),
        ),
    )
    loss_rows: int | Auto = field(
        default="auto",
        metadata=_option(
            "the number of rows of logits that a cross entropy computes at a time on a device; 0"
            ' for all. With ``"auto"`` the planner chooses it if the model does not return the'
            ' logits (see ``outputs="loss"``). With a number above 0, `tensor_parallel` and'
            " `megatron` do not split the output layer, and an embedding tied to it, by the"
            " vocabulary.",
            at_least(0, "rows"),
            brief="number of rows of logits that exist at a time",
        ),
    )
    precision: Precision | None = field(
        default=None,
        metadata=_option(
            '``"bf16"`` or ``"fp16"``: parameters are stored in the model\'s dtypes, as are their'
            " gradients and optimizer state, and gathered and used in this dtype. Floating inputs"
            " are cast to it; buffers keep theirs. Gradients are summed in the dtype of the"
            " parameters. Training in fp16 needs a `torch.amp.GradScaler`. None: the dtypes of the"
            " model, or of an active `torch.autocast`.",
            check_precision,
            brief='`"bf16"` or `"fp16"`: parameters are stored in fp32 and used in this dtype',
            default_in_words="the model's",
            flag=Flag(
                "--precision",
                "bf16 or fp16: the dtype in which parameters are gathered and used; they are stored"
                " in the model's dtype.",
                str | None,
            ),
        ),
    )
    inference: bool = field(
        default=False,
        metadata=_option(
            "plan forward only, without gradients and optimizer state. This is implied if no"
            " parameter requires a gradient.",
            check_switch,
            brief="plan forward only",
            flag=Flag(
                "--inference",
                "Plan forward only: no labels, no gradients, no optimizer state.",
                bool,
                False,
            ),
        ),
    )
    batch: Batch = field(
        default="global",
        metadata=_option(
            '``"global"``: every rank passes the whole batch, and computes its part of it;'
            ' ``"local"``: every rank passes its part of the batch.',
            among(get_args(Batch)),
        ),
    )
    outputs: Outputs = field(
        default="auto",
        metadata=_option(
            'how outputs other than the loss are returned. ``"dtensor"``: as DTensors;'
            " ``.full_tensor()`` gathers one, and operations that would read only this rank's part"
            ' are refused. ``"full"``: whole on every rank. ``"local"``: this rank\'s part.'
            ' ``"loss"``: not at all (None), so that the logits of a language model need not exist'
            ' at once and the planner may compute the loss by rows. ``"auto"``: ``"dtensor"`` in'
            ' training with a loss, else ``"full"``. With several microbatches or stages, outputs'
            ' are returned with ``"full"`` only, because parts of microbatches have no place in a'
            " whole tensor. If the model returns a loss, backward starts at the loss only. Without"
            " a loss, backward starts at what every rank computes from the outputs; with"
            ' ``"local"``, the gradient of an output is this rank\'s part of the gradient.',
            among(get_args(Outputs)),
            brief=(
                'how outputs other than the loss are returned: `"dtensor"`, `"full"`, `"local"`, or'
                ' `"loss"` for not at all'
            ),
            flag=Flag(
                "--outputs",
                "How outputs other than the loss are returned: loss (not at all, so that the logits"
                " of a language model need not exist at once), full or dtensor.",
                str,
                "auto",
            ),
        ),
    )
    cache: bool = field(
        default=True,
        metadata=_option(
            "read the plan, or else the capture, from the cache on disk if nothing that it depends"
            " on has changed, and write new ones to the cache.",
            check_switch,
            brief="use the [cache of plans](#the-cache-of-plans) and captures",
            is_recorded=False,
            flag=Flag(
                "--cache/--no-cache",
                "Read the plan, or the capture, from the cache on disk, and write new ones to it.",
                bool,
                True,
            ),
        ),
    )
    ends: float = field(default=math.inf, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constraints", as_constraints(self.constraints))
        object.__setattr__(self, "memory_bytes", read_budget(self.memory_bytes))
        for name, option in OPTIONS.items():
            option.check(name, getattr(self, name))
        if self.num_microbatches != "auto" and self.constraints:
            from autopar.constraints import check_number  # which needs torch

            check_number(self.constraints, self.num_microbatches)

    def begun(self) -> PlanOptions:
        """Return the options with the end of the time limit set, if it is not set yet."""
        return (
            self
            if math.isfinite(self.ends)
            else replace(self, ends=time.monotonic() + self.time_limit_s)
        )

    def of_a_trace(self) -> PlanOptions:
        """Return the options for a trace, in which outputs that are returned whole are whole."""
        return replace(self, outputs="dtensor") if self.outputs == "auto" else self

    def worth_s(self, step_s: float) -> float:
        """Return the seconds that another plan may take at most to be worth a search.

        Args:
            step_s: seconds of a known plan. Smaller savings are within the gap.
        """
        return step_s * (1.0 - self.gap)

    @property
    def solve_s(self) -> float:
        """Seconds that a solve may take that starts now."""
        return (
            max(self.ends - _BEHIND * self.time_limit_s - time.monotonic(), 0.0)
            if math.isfinite(self.ends)
            else self.time_limit_s
        )

    @property
    def is_late(self) -> bool:
        """Whether no further solve may start if a plan is known."""
        return self.solve_s <= 0.0

    @property
    def is_over(self) -> bool:
        """Whether no time is left at all."""
        return time.monotonic() >= self.ends

    def budget(self, profile: HardwareProfile) -> int:
        """Return the bytes per device that a plan may use."""
        return self.memory_bytes or int(profile.device_memory_bytes * (1 - RESERVED_SHARE))

    def to_json(self, profile: HardwareProfile) -> Mapping[str, Any]:
        """Return the options that a plan records, as JSON data."""
        data = {name: getattr(self, name) for name, option in OPTIONS.items() if option.is_recorded}
        return {
            **data,
            "memory_bytes": self.budget(profile),
            "constraints": [c.to_json() for c in self.constraints],
        }


_FIELDS = {f.name: f for f in fields(PlanOptions) if "option" in f.metadata}
OPTIONS: Mapping[str, Option] = {name: each.metadata["option"] for name, each in _FIELDS.items()}
DEFAULTS: Mapping[str, Any] = {name: each.default for name, each in _FIELDS.items()}


def options_of(call: Call) -> dict[str, Option]:
    """Return the options that a function takes."""
    return {name: option for name, option in OPTIONS.items() if call in option.calls}
