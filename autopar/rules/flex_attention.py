"""Rules of attention with score and mask functions (`autopar.ops.flex`).

Scores are split by batch entries, heads and queries. The functions receive global coordinates, so a
replicated captured tensor can be used by every part. If a dim of a captured tensor is indexed by a
split coordinate (`autopar.ops.score_functions`) and has the same size, it is split too, and the
function indexes the part. Keys are never split, since each row is summed over all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar import ops
from autopar.core.placements import PARTIAL, REPLICATE
from autopar.ops.score_functions import Reading, find_reading
from autopar.rules.call import Call, Operand, argument
from autopar.rules.notation import WHOLE, AxisOption, Factors, Term
from autopar.rules.site import Local, Site

_SPLIT = ("b", "h", "q")  # coordinates that may be split, in the order of the dims of the queries
_ROWS: Term = ("b", "h", "q", WHOLE)
_KEYS: Term = ("b", "h", WHOLE, WHOLE)
_SUMS: Term = ("b", "h", "q")


def flex_attention(call: Call) -> Factors:
    """Return the factors: batch entries, heads and queries are parallel, and query heads alone if
    several query heads share a key head."""
    captured = _terms(call)
    inputs = (_ROWS, _KEYS, _KEYS, *captured.values())
    return Factors(inputs, (_ROWS, _SUMS), further=_query_heads(call, inputs, (_ROWS, _SUMS)))


def flex_attention_backward(call: Call) -> Factors:
    """Return factors as `flex_attention`; gradients of tensors that several parts read are partial
    sums."""
    captured = _terms(call)
    rest = (_SUMS,) if isinstance(argument(call, "grad_lse"), Operand) else ()
    inputs = (_ROWS, _KEYS, _KEYS, _ROWS, _SUMS, _ROWS, *rest, *captured.values())
    outputs = (_ROWS, _KEYS, _KEYS, *(captured[number] for number in argument(call, "wanted")))
    return Factors(inputs, outputs, further=_query_heads(call, inputs, outputs))


def _read_functions(call: Call) -> tuple[dict[int, int], Reading]:
    """Return number of a captured tensor → number of its operand, and what the functions read."""
    operands = {number: operand.index for number, operand in enumerate(argument(call, "captured"))}
    ranks = tuple(len(call.inputs[index].shape) for index in operands.values())
    return operands, find_reading((argument(call, "score"), argument(call, "mask")), ranks)


def _terms(call: Call) -> dict[int, Term]:
    """Return a term per captured tensor."""
    operands, read = _read_functions(call)
    sizes = dict(zip(_SPLIT, call.inputs[0].shape, strict=False))
    terms: dict[int, Term] = {}
    for number, index in operands.items():
        shape = call.inputs[index].shape
        names = read.indexed.get(number, (None,) * len(shape))
        letters = [
            name if name in sizes and sizes[name] == size else WHOLE
            for name, size in zip(names, shape, strict=True)
        ]
        terms[number] = tuple(x if letters.count(x) == 1 else WHOLE for x in letters)
    return terms


def _query_heads(
    call: Call, inputs: tuple[Term, ...], outputs: tuple[Term, ...]
) -> tuple[AxisOption, ...]:
    """Return the option that splits the tensors with a dim for query heads; keys and values are
    replicated, and a rank reads the heads that it needs."""
    heads, shared = (call.inputs[i].shape[1] for i in (0, 1))
    if heads == shared:
        return ()

    def place_heads(term: Term, missing: Placement) -> Placement:
        """Return the placement that splits query heads; `missing` for tensors without that dim."""
        return Shard(term.index("h")) if "h" in term and term is not _KEYS else missing

    return (
        AxisOption(
            tuple(place_heads(term, REPLICATE) for term in inputs),
            tuple(place_heads(term, PARTIAL) for term in outputs),
        ),
    )


def _local(site: Site) -> Local:
    """Set the start indices of the parts if a function needs global coordinates, and the key and
    value heads to read if only query heads are split."""
    call, q, shape = site.call, site.strategy.inputs[0], site.call.inputs[0].shape
    operands, read = _read_functions(call)
    indexed = [(n, dim, name) for n in operands for dim, name in _indices_read(read, n)]
    parts = [each for each in indexed if site.strategy.inputs[operands[each[0]]].splitters(each[1])]
    of_wholes = {name for number, dim, name in indexed if (number, dim, name) not in parts}
    split = {name for dim, name in enumerate(_SPLIT) if q.splitters(dim)}
    needed = (read.free | of_wholes) & split
    changes = site.heads_read()
    if needed:  # otherwise, local coordinates that start at 0 index the parts
        changes["starts"] = tuple(
            site.start(q, shape[dim], dim) if name in needed else 0
            for dim, name in enumerate(_SPLIT)
        )
        changes["own"] = tuple(x for n, dim, name in parts if name in needed for x in (n, dim))
    return site.change(**changes)


def _indices_read(read: Reading, number: int) -> list[tuple[int, str]]:
    return [
        (dim, name) for dim, name in enumerate(read.indexed.get(number, ())) if name is not None
    ]


ROWS: Mapping[Callable[..., Any], Callable[[Call], Factors]] = {
    ops.flex_attention: flex_attention,
    ops.flex_attention_backward: flex_attention_backward,
}
LOCALIZERS: Mapping[Callable[..., Any], Callable[[Site], Local]] = dict.fromkeys(ROWS, _local)
