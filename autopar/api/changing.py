"""What a plan was forced to, with some of it left out and more of it asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.constraints import Constraint
from autopar.constraints.words import in_words
from autopar.constraints.written import parse_constraint
from autopar.errors import ConstraintError
from autopar.request import PlanOptions

_NUMBER = "num_microbatches"


@dataclass(frozen=True, slots=True)
class Change:
    """The options without what is left out, and what is asked for beside the rest; as their user writes both."""

    options: PlanOptions
    more: tuple[Constraint, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        """``without fsdp(), with ddp(axes=['gpu'])``; nothing where nothing changes."""
        parts = (("without", self.left_out), ("with", tuple(map(in_words, self.more))))
        return ", ".join(f"{word} {' and '.join(said)}" for word, said in parts if said)


def changed(options: PlanOptions, without: Iterable[str | Constraint], more: Iterable[Constraint]) -> Change:
    """Leave out and add.

    Args:
        options: a plan's. without: constraints that it obeys, or texts: the name of all of one kind (``fsdp``, ``num_microbatches``), or
            one as a call (``layout("*.up", weight="R S(0)")``).

    Raises:
        ConstraintError: where the plan obeys none such, or obeys already what is to be added, or a text cannot be read.
    """
    left_out: list[str] = []
    for what in without:
        options, gone = _without(options, what)
        left_out += gone
    obeyed, more = obeyed_by(options), tuple(more)
    for constraint in more:
        if in_words(constraint) in obeyed:
            raise ConstraintError(f"the plan obeys {in_words(constraint)} already", remedy="ask for another constraint, or for none")
    return Change(options, more, tuple(left_out))


def obeyed_by(options: PlanOptions) -> tuple[str, ...]:
    """All that is forced, as its user writes it."""
    number = () if options.num_microbatches == "auto" else (f"{_NUMBER}={options.num_microbatches}",)
    return (*map(in_words, options.constraints), *number)


def _without(options: PlanOptions, what: str | Constraint) -> tuple[PlanOptions, Sequence[str]]:
    """The options without it, and what is left out as its user writes it."""
    is_name = isinstance(what, str) and "(" not in what
    said = in_words(what if isinstance(what, Constraint) else parse_constraint(what)) if not is_name else str(what).strip()
    gone = [each for each in obeyed_by(options) if said == (_name(each) if is_name else each)]
    if not gone:
        there = obeyed_by(options)
        remedy = f"name one of those that it obeys: {', '.join(there)}" if there else "the plan obeys none: leave out nothing"
        raise ConstraintError(f"the plan obeys no constraint {said}", remedy=remedy)
    kept = tuple(c for c in options.constraints if in_words(c) not in gone)
    free = any(_name(each) == _NUMBER for each in gone)
    return replace(options, constraints=kept, num_microbatches="auto" if free else options.num_microbatches), gone


def _name(said: str) -> str:
    return said.partition("(")[0].partition("=")[0]
