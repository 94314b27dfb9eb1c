"""The options of planning: each is declared once, with its default, its check, its texts and its
flag of the command line.

A field of `PlanOptions` is an option. Its `Option` says all else. Derived from these are the
signatures and docstrings of the functions that take options (`autopar.api.options`), the flags of
``autopar plan`` (`autopar.cli.shared_options`), and what a plan records. The table of options in
`docs/planning.md` is tested against them. A new option is a field here, and in `PlanKeywords`.

The functions take ``**options: Unpack[PlanKeywords]``, and not a list of parameters each: type
checkers and editors read the names and types from `PlanKeywords`, `help` and `inspect.signature`
show them with their defaults, and the function still knows which were passed, as `compile` has to,
which refuses options beside a plan.

Nothing here needs torch, so that help and mistyped options of the command line do not wait for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

from autopar.core.terminal import parse_size
from autopar.errors import AutoparError, ConstraintError

if TYPE_CHECKING:
    from autopar.constraints import Constraint
    from autopar.core.hardware import HardwareProfile

Backend = Literal["eager", "inductor"]
Batch = Literal["global", "local"]
Outputs = Literal["full", "local", "dtensor", "loss", "auto"]
Precision = Literal["bf16", "fp16"]
Auto = Literal["auto"]
Effort = Literal["quick", "normal", "thorough"]
Call = Literal["plan", "compile"]
OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "none")
UNLIMITED = 2**60
"""Bytes of a budget that limits nothing."""
# of the device's memory, left to the allocator, kernels' workspaces and communication buffers
RESERVED_SHARE = 0.1
# share of a time limit that is left to emission, memory and the order of communications
_BEHIND = 0.25

Check: TypeAlias = Callable[[str, Any], None]
"""Raises AutoparError if the option of this name cannot have this value."""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option on the command line.

    Attributes:
        name: its name, with dashes.
        help: its help text.
        kind: type of the value as typer reads it.
        default: the value if the flag is not given.
        metavar: placeholder of the value in the help text.
        least: least number that typer accepts.
        read: converts the value of typer to that of the option.
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
        check: the check of a value.
        brief: its text in the table of `docs/planning.md`; empty if it is not in the table.
        default_in_words: the default in the table, if it is not written as a value.
        unit: unit of the value.
        calls: the functions that take it.
        is_recorded: whether plans record it.
        flag: its flag of ``autopar plan``, if it has one.
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


def check_choice(
    name: str,
    value: object,
    choices: Sequence[str],
    *,
    form: str = "{name}={value!r}",
    otherwise: str = "",
) -> None:
    """Raise AutoparError if a value is none of the choices.

    Args:
        name: name of the option.
        value: the value.
        choices: the values that are allowed.
        form: format of the option and its value in the message.
        otherwise: further values that may be passed, in words.
    """
    if value not in choices:
        remedy = f"pass one of {', '.join(choices)}{otherwise}"
        raise AutoparError(f"{form.format(name=name, value=value)} is not known", remedy=remedy)


def _among(choices: Sequence[str], **how: str) -> Check:
    return lambda name, value: check_choice(name, value, choices, **how)


def _check_budget(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, int | float) and value > 0):
        raise AutoparError(
            f"{name}={value!r} is no budget", remedy="pass bytes per device, for example 80 * 2**30"
        )


def _check_precision(name: str, value: Any) -> None:
    if value is not None:
        check_choice(name, value, get_args(Precision), otherwise=", or None")


def _at_least(least: int, what: str) -> Check:
    """The check of an option that is ``"auto"`` or a number of `what` from `least`."""

    def check(name: str, value: Any) -> None:
        """Raise AutoparError if the value is none of these."""
        _check_count(name, value, least, what)

    return check


def _check_count(name: str, value: Any, least: int, what: str) -> None:
    if value != "auto" and not (isinstance(value, int) and value >= least):
        raise AutoparError(
            f"{name}={value!r} is no number of {what}",
            remedy=f'pass a number from {least}, or "auto"',
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real)


def _check_gap(name: str, value: Any) -> None:
    if not (_is_number(value) and 0 <= value < 1):
        raise AutoparError(
            f"{name}={value} is no relative gap",
            remedy="pass a number from 0 to below 1, for example 0.01",
        )


def _check_limit(name: str, value: Any) -> None:
    if not (_is_number(value) and value > 0.0):
        raise AutoparError(
            f"{name}={value} is no limit",
            remedy="pass seconds of planning, for example 60, or leave it out",
        )


def _check_name(name: str, value: Any) -> None:
    """The check of the type alone: `autopar.solve.check_solver` checks whether a solver of that
    name is installed, which needs PuLP."""
    if not isinstance(value, str):
        raise AutoparError(
            f"{name}={value!r} is not the name of a solver",
            remedy='pass a name, for example "highs" or "cbc"',
        )


def _check_switch(name: str, value: Any) -> None:
    if value not in (False, True):
        raise AutoparError(
            f"{name}={value!r} is neither True nor False", remedy="pass True or False"
        )


def as_constraints(constraints: Any) -> tuple[Constraint, ...]:
    """What `constraints` was given, as a tuple.

    Raises:
        ConstraintError: where it is no sequence, as one constraint alone.
    """
    if not isinstance(constraints, Iterable) or isinstance(constraints, str):
        raise ConstraintError(
            f"constraints={constraints} is no sequence",
            remedy="put constraints into a list: constraints=[...]",
        )
    return tuple(constraints)


def _check_constraints(_: str, value: Any) -> None:
    if not value:
        return
    from autopar.constraints import Constraint  # which needs torch

    for constraint in value:
        if not isinstance(constraint, Constraint):
            raise ConstraintError(
                f"{constraint!r} is no constraint",
                remedy="make constraints with autopar.constraints",
            )


def _read_constraints(texts: Sequence[str] | None) -> tuple[Constraint, ...]:
    if not texts:
        return ()
    from autopar.constraints.text import parse_constraint  # which needs torch

    return tuple(parse_constraint(text) for text in texts)


class SearchKeywords(TypedDict, total=False):
    """The options of how long `autopar.plan` searches, and by what."""

    gap: float
    time_limit_s: float
    solver: str
    effort: Effort
    cache: bool


class PlanKeywords(SearchKeywords, total=False):
    """The options that `autopar.plan` takes, for type checkers; defaults are in `PlanOptions`."""

    memory_bytes: int | None
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
    """How the planner is asked to plan; each field's `Option` says what it is.

    Attributes:
        ends: when, on the monotonic clock, the time of a planning that has begun is over (`begun`).
            It is no option.
    """

    memory_bytes: int | None = field(
        default=None,
        metadata=_option(
            "budget per device; by default the profile's memory less 10 %.",
            _check_budget,
            brief="memory budget per device; every plan fits it",
            default_in_words="device memory less 10 %",
            unit="bytes",
            flag=Flag(
                "--memory",
                "Budget per device, as 72GiB; by default the device's less 10 %.",
                str | None,
                metavar="SIZE",
                read=parse_size,
            ),
        ),
    )
    optimizer: str = field(
        default="adamw",
        metadata=_option(
            "whose state rests beside the parameters: ``adamw``, ``adam``, ``sgd``, ``momentum`` or"
            " ``none``.",
            _among(OPTIMIZERS, form="{name} {value!r}"),
            brief=(
                'whose state is stored next to the parameters: `"adamw"`, `"adam"`, `"sgd"`,'
                ' `"momentum"` or `"none"`'
            ),
            flag=Flag(
                "--optimizer",
                "Whose state rests: adamw, adam, sgd, momentum or none.",
                str,
                "adamw",
            ),
        ),
    )
    constraints: tuple[Constraint, ...] = field(
        default=(),
        metadata=_option(
            "what is forced (`autopar.constraints`).",
            _check_constraints,
            brief="[what you decide yourself](constraints.md)",
            flag=Flag(
                "--constraint",
                "What is forced, as in Python: 'megatron(tp=8, zero=3)', fsdp; several are given"
                " one by one.",
                list[str] | None,
                metavar="CALL",
                read=_read_constraints,
            ),
        ),
    )
    strict: bool = field(
        default=False,
        metadata=_option(
            "refuse ops that run replicated for want of a rule.",
            _check_switch,
            brief="refuse a model if an op would run replicated because it has no rule",
            flag=Flag(
                "--strict/--no-strict",
                "Refuse ops that run replicated for want of a rule.",
                bool,
                False,
            ),
        ),
    )
    gap: float = field(
        default=0.01,
        metadata=_option(
            "relative distance between plan and proven bound at which the search stops.",
            _check_gap,
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
            "of all planning. When it is nearly over, the best plan so far is the answer, with its"
            " gap; only a first plan that fits may take longer. By default none: all other limits"
            " count work, not seconds, so that the same input gives the same plan, byte for byte."
            " Where a limit ends a solve, a warning says that the plan may be another in the next"
            " run.",
            _check_limit,
            brief="limit for all of planning; the best plan so far is returned with its gap",
            default_in_words="none",
            unit="seconds",
            is_recorded=False,
            flag=Flag(
                "--time-limit",
                "Of planning; then the best plan so far is taken, with its gap. By default none.",
                float | None,
                metavar="SECONDS",
                read=lambda limit_s: math.inf if limit_s is None else limit_s,
            ),
        ),
    )
    solver: str = field(
        default="highs",
        metadata=_option(
            '``"highs"``, or a solver that PuLP finds on this machine, by its name or its'
            ' family\'s, in any case: ``"cbc"``, ``"scip"``, ``"gurobi"``; ``"pulp:highs"`` is'
            " HiGHS through PuLP. These are slower.",
            _check_name,
            brief="which [solver](#solvers) solves the integer program",
            is_recorded=False,
            flag=Flag(
                "--solver",
                "highs, or a solver that PuLP finds here, such as cbc, scip or gurobi; slower.",
                str,
                "highs",
                metavar="NAME",
            ),
        ),
    )
    effort: Effort = field(
        default="normal",
        metadata=_option(
            "how much work alternatives to the first plan may take: further mesh shapes, named"
            ' plans, and stages that nobody asked for. ``"quick"``: none, but those that the first'
            ' plan needs if nothing fits; ``"normal"``: about as much as one search on a mesh of'
            ' three axes; ``"thorough"``: whatever bounds do not exclude. What was not tried is in'
            " the plan's proof, with its bound.",
            _among(get_args(Effort)),
            brief="how much work [alternatives to the first plan](#alternatives) may take",
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
            'into how many microbatches the batch is cut, one after another; ``"auto"``: one, or,'
            " where nothing fits the memory, as few as do; in a pipeline"
            " (`autopar.constraints.pipeline`) the planner's choice, one where samples depend on"
            " each other. Stages that nobody asked for are tried on GPUs, of the loss alone, where"
            " nothing is forced, unless this is 1.",
            _at_least(1, "microbatches"),
            brief=(
                "number of parts that the batch is cut into; 1 also rules out stages that no"
                " constraint asks for"
            ),
            flag=Flag(
                "--microbatches",
                "Into how many the batch is cut.",
                int | None,
                least=1,
                read=lambda number: number or "auto",
            ),
        ),
    )
    loss_rows: int | Auto = field(
        default="auto",
        metadata=_option(
            "how many rows of logits of a cross entropy there are at a time on a device, 0 for all;"
            ' ``"auto"``: the planner\'s choice, where the model does not return the logits (see'
            ' ``outputs="loss"``). Under `tensor_parallel` and `megatron` what makes these logits,'
            " and a table that is tied to it, is not split by its vocabulary then.",
            _at_least(0, "rows"),
            brief="number of rows of logits that exist at a time",
        ),
    )
    precision: Precision | None = field(
        default=None,
        metadata=_option(
            '``"bf16"`` or ``"fp16"``: parameters rest as they are, with their gradients and'
            " optimizer state, and are gathered and computed with in that dtype, as the model's"
            " floating inputs are; buffers stay. Gradients are summed in the parameters' dtype."
            " Training in fp16 needs a `torch.amp.GradScaler`. None: the model's dtypes, or those"
            " of an active `torch.autocast`.",
            _check_precision,
            brief='`"bf16"` or `"fp16"`: parameters are stored in fp32 and used in this dtype',
            default_in_words="the model's",
            flag=Flag(
                "--precision",
                "bf16 or fp16: what wider parameters, which rest as they are, are gathered and"
                " computed with in.",
                str | None,
            ),
        ),
    )
    inference: bool = field(
        default=False,
        metadata=_option(
            "forward alone is planned, without gradients and optimizer state. So it is where no"
            " parameter requires a gradient.",
            _check_switch,
            brief="plan forward only",
            flag=Flag(
                "--inference",
                "Forward alone, no labels: no gradients, no optimizer state.",
                bool,
                False,
            ),
        ),
    )
    batch: Batch = field(
        default="global",
        metadata=_option(
            '``"global"``: every rank passes the same batch and takes its part; ``"local"``: each'
            " passes its part.",
            _among(get_args(Batch)),
        ),
    )
    outputs: Outputs = field(
        default="auto",
        metadata=_option(
            'what is not the loss comes as ``"dtensor"`` (``.full_tensor()`` gathers one; what'
            ' would read this rank\'s part alone is refused), ``"full"`` (whole on every rank),'
            ' ``"local"`` (this rank\'s part), or, with ``"loss"``, not at all (None): then the'
            " logits of a language model need not be there at once, and the planner may compute its"
            ' loss some rows at a time. ``"auto"``: ``"dtensor"`` in training beside a loss, else'
            ' ``"full"`` (evaluation and inference, models without a loss). In several'
            ' microbatches, or stages, only ``"full"`` gives them: parts of these have no place in'
            " a whole tensor. Of a model that returns a loss, backward goes through that alone;"
            " else through whatever the user computes of the outputs, on every rank the same: with"
            ' ``"local"`` the gradient that comes back is taken for this rank\'s part of the whole'
            " loss' gradient.",
            _among(get_args(Outputs)),
            brief=(
                'how outputs other than the loss are returned: `"dtensor"`, `"full"`, `"local"`, or'
                ' `"loss"` for not at all'
            ),
            flag=Flag(
                "--outputs",
                "loss, if a step needs no other: a language model's logits need never be there at"
                " once. Or full, dtensor.",
                str,
                "auto",
            ),
        ),
    )
    cache: bool = field(
        default=True,
        metadata=_option(
            "take the plan, or else the capture, from the cache on disk if all that it depends on"
            " is the same, and put new ones there.",
            _check_switch,
            brief="use the [cache of plans](#the-cache-of-plans) and captures",
            is_recorded=False,
            flag=Flag(
                "--cache/--no-cache",
                "Take the plan, or the capture, from the cache if it is there; put new ones there.",
                bool,
                True,
            ),
        ),
    )
    ends: float = field(default=math.inf, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constraints", as_constraints(self.constraints))
        for name, option in OPTIONS.items():
            option.check(name, getattr(self, name))
        if self.num_microbatches != "auto" and self.constraints:
            from autopar.constraints import check_number  # which needs torch

            check_number(self.constraints, self.num_microbatches)

    def begun(self) -> PlanOptions:
        """Return the options with the end of planning set by the time limit from now on, unless it
        is set already."""
        return (
            self
            if math.isfinite(self.ends)
            else replace(self, ends=time.monotonic() + self.time_limit_s)
        )

    def of_a_trace(self) -> PlanOptions:
        """Return the options for a trace: ``"auto"`` outputs become ``"dtensor"``, because outputs
        that are to be whole are whole in the trace already."""
        return replace(self, outputs="dtensor") if self.outputs == "auto" else self

    def worth_s(self, step_s: float) -> float:
        """Return the most seconds that another plan may take to be worth a search, if there is one
        of `step_s`: a smaller saving is within the gap."""
        return step_s * (1.0 - self.gap)

    @property
    def solve_s(self) -> float:
        """Seconds that a solve which begins now may take."""
        return (
            max(self.ends - _BEHIND * self.time_limit_s - time.monotonic(), 0.0)
            if math.isfinite(self.ends)
            else self.time_limit_s
        )

    @property
    def is_late(self) -> bool:
        """Whether no further solve may begin if there is a plan already."""
        return self.solve_s <= 0.0

    @property
    def is_over(self) -> bool:
        """Whether no time is left at all."""
        return time.monotonic() >= self.ends

    def budget(self, profile: HardwareProfile) -> int:
        """Return the bytes per device that a plan may use."""
        return self.memory_bytes or int(profile.device_memory_bytes * (1 - RESERVED_SHARE))

    def to_json(self, profile: HardwareProfile) -> Mapping[str, Any]:
        """Return the options that a plan records, as data of JSON."""
        found = {
            name: getattr(self, name) for name, option in OPTIONS.items() if option.is_recorded
        }
        return {
            **found,
            "memory_bytes": self.budget(profile),
            "constraints": [c.to_json() for c in self.constraints],
        }


_FIELDS = {f.name: f for f in fields(PlanOptions) if "option" in f.metadata}
OPTIONS: Mapping[str, Option] = {name: each.metadata["option"] for name, each in _FIELDS.items()}
DEFAULTS: Mapping[str, Any] = {name: each.default for name, each in _FIELDS.items()}


def options_of(call: Call) -> dict[str, Option]:
    """Return the options that a function, ``"plan"`` or ``"compile"``, takes."""
    return {name: option for name, option in OPTIONS.items() if call in option.calls}
