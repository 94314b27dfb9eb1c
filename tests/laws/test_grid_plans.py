"""Tensor parallelism on grids: the communication of each tensor and the stored shards match the
formulas of `autopar.constraints.parallel`.

Volumes are counted in the emitted program: elements that one device sends in ring algorithms. All
layers of a model are counted together.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import zoo_small
from torch import fx, nn

from autopar import constraints, hf, ops
from autopar.capture import Trace, capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.planner import Planned, PlanOptions, make_plan
from autopar.plans import Communication
from autopar.verification import verify_program

PROFILE = HardwareProfile.load("h100-sxm")
LAYERS, B, S = 2, zoo_small.BATCH, zoo_small.SEQUENCE
GRIDS = {"2d": ("a", "b"), "2.5d": ("a", "b", "d"), "3d": ("i", "j", "l")}
Sent = dict[tuple[str, str, str], Fraction]  # (phase, tensor, axis) → elements


@dataclass(frozen=True)
class Case:
    """A model on a grid: b samples of s tokens, h features, k features of keys, f features of the
    MLP, v words; sides q and depth d."""

    model: str
    grid: str
    q: int = 2
    d: int = 2
    b: int = B
    h: int = 32
    k: int = 16
    f: int = 48
    v: int = zoo_small.VOCABULARY

    @property
    def n(self) -> int:
        return self.b * S

    @property
    def num_devices(self) -> int:
        return self.q ** len(GRIDS[self.grid]) if self.grid != "2.5d" else self.q**2 * self.d

    @property
    def mesh(self) -> Mesh:
        # an axis that is gathered alone must shard innermost; for fused projections, only the last
        # axis of the mesh can
        axes = sorted(GRIDS[self.grid], key="abdjli".index)
        return Mesh({axis: self.d if axis == "d" else self.q for axis in axes})

    def __str__(self) -> str:
        return f"{self.model}-{self.grid}-{self.num_devices}"


LARGE = {"h": 72, "k": 24, "f": 72, "v": 108}  # sizes divisible by nine devices
FAST = (
    Case("llama", "2d"),
    Case("llama", "2.5d", d=3, b=6),
    Case("llama", "3d"),
    Case("gpt2", "2d", f=128),
)
SLOW = (
    Case("llama", "2d", q=3, b=6, **LARGE),
    Case("gpt2", "2.5d", f=128),
    Case("gpt2", "3d", f=128),
)
OTHERS = (
    Case("vit", "2d"),
    *(Case(model, grid) for model in ("vit", "bert") for grid in ("2.5d", "3d")),
    Case("bert", "2d"),
)


def slow(cases: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


CASES = [*FAST, *slow(SLOW)]
LLAMAS = [*(case for case in FAST if case.model == "llama"), *slow(SLOW[:1])]
EVERY = [*CASES, OTHERS[0], *slow(OTHERS[1:])]


@cache
def traced(
    model: str, b: int, h: int, k: int, f: int, v: int
) -> tuple[Trace, nn.Module, dict[str, Any]]:
    if (model, b, h) == ("llama", b, h) and (b != B or h != 32):
        sizes = (
            f'"num_hidden_layers": {LAYERS}, "hidden_size": {h}, "intermediate_size": {f},'
            f' "vocab_size": {v}, "use_cache": false'
        )
        heads = f'"num_attention_heads": {h // 8}, "num_key_value_heads": {k // 8}'
        module, batch = hf.build(f"llama:{{{sizes}, {heads}}}", device="cpu", batch=b, seq=S)
    else:  # as many positions as tokens: the full table is read
        positions = {"gpt2": {"n_positions": S}, "bert": {"max_position_embeddings": S}}.get(
            model, {}
        )
        module, batch = getattr(zoo_small, model)(num_layers=LAYERS, **positions)
    return capture(module, (), batch), module, batch


def captured(case: Case) -> tuple[Trace, nn.Module, dict[str, Any]]:
    return traced(case.model, case.b, case.h, case.k, case.f, case.v)


@cache
def planned(case: Case) -> Planned:
    forced = constraints.tensor_parallel(case.grid, axes=GRIDS[case.grid])
    return make_plan(captured(case)[0], case.mesh, PROFILE, PlanOptions(constraints=(forced,)))


def short(module: str) -> str:
    """Return the last two names of a module path, without layer numbers."""
    return ".".join(re.sub(r"\.\d+(?=\.|$)", "", module).split(".")[-2:])


def short_parameter(name: str) -> str:
    module, _, last = name.rpartition(".")
    return f"{short(module)}.{last}"


@dataclass
class Tensors:
    """The roles of the tensors of a trace relative to its linear layers, in words."""

    trace: Trace

    def __post_init__(self) -> None:
        self.nodes = {n.meta["key"]: n for n in self.trace.graph.nodes if "key" in n.meta}
        results: Any = next(iter(reversed(self.trace.graph.nodes))).args[0]
        self.gradients = {
            results[p.gradient].meta["key"]: p.name
            for p in self.trace.parameters
            if p.gradient is not None
        }

    def word(self, c: Communication, key: str) -> str:
        """Return the role of a tensor: a parameter or its gradient by name; X, Y or a gradient of
        them by its linear layers; otherwise, the op that reads it."""
        if key.endswith("/parameter"):
            return short_parameter(key.removesuffix("/parameter"))
        if key in self.gradients:
            return f"gradient of {short_parameter(self.gradients[key])}"
        node, kind = self.nodes[key], c.collective.kind
        if kind not in ("all_gather", "reduce_scatter"):
            return {"all_reduce": "sums", "all_to_all": "for norms"}[kind]
        late = node.meta["phase"] == "backward"
        read = {
            n.meta["module"] for n in node.users if n.target in (ops.dot, ops.embedding_backward)
        }
        modules = " ".join(
            sorted(map(short, read if kind == "all_gather" else set(self._makers(node))))
        )
        return (
            f"{'gradient of ' if late else ''}{'X' if (kind == 'all_gather') != late else 'Y'} of"
            f" {modules}"
        )

    def _makers(self, node: fx.Node) -> Iterable[str]:
        if node.target in (ops.dot, ops.embedding):
            yield node.meta["module"]
        else:
            for other in node.all_input_nodes:
                yield from self._makers(other)


def sent(case: Case) -> Sent:
    """Return the elements that a device sends. Parameters that are gathered over several axes are
    counted for all of these axes together, since the planner chooses the order."""
    plan, tensors = planned(case).plan, Tensors(captured(case)[0])
    merged = {short_parameter(p.name) for p in tensors.trace.parameters if len(p.shape) == 1}
    merged |= (
        {"model.embed_tokens.weight", "transformer.wpe.weight"} if case.grid == "3d" else set()
    )
    found: Counter[tuple[str, str, str]] = Counter()
    for c in plan.communications:
        size, collective = plan.mesh.shape[c.collective.axis], c.collective
        elements = (
            max(
                collective.bytes,
                collective.output_bytes(size) if collective.kind != "all_to_all" else 0,
            )
            // 4
        )
        times = 2 if collective.kind == "all_reduce" else 1
        for instance in c.instances if collective.kind != "slice" else ():
            word = tensors.word(c, c.node.format(*instance))
            axis = (
                ""
                if word.removeprefix("gradient of ") in merged
                else plan.mesh.names[collective.axis]
            )
            found[c.phase, word, axis] += times * elements * Fraction(size - 1, size)
    return dict(found)


def ring(elements: int | Fraction, size: int, times: int = 1) -> Fraction:
    """Return the elements that a device sends for a full tensor of `elements` elements."""
    return times * elements * Fraction(size - 1, size)


Group = tuple[
    tuple[str, ...], int, tuple[int, ...]
]  # linear layers that read one X, its features, the features of each result


def layer(case: Case) -> tuple[Group, ...]:
    h, k, f = case.h, case.k, case.f
    if case.model == "gpt2":
        return (
            (("attn.c_attn",), h, (3 * h,)),
            (("attn.c_proj",), h, (h,)),
            (("mlp.c_fc",), h, (f,)),
            (("mlp.c_proj",), f, (h,)),
        )
    attention = tuple(f"self_attn.{x}_proj" for x in "qkv"), h, (h, k, k)
    return (
        attention,
        (("self_attn.o_proj",), h, (h,)),
        (("mlp.gate_proj", "mlp.up_proj"), h, (f, f)),
        (("mlp.down_proj",), f, (h,)),
    )


def head(case: Case) -> tuple[str, str]:
    """Return the module of the head and the name of its weight."""
    return (
        ("lm_head", "transformer.wte.weight")
        if case.model == "gpt2"
        else ("lm_head", "lm_head.weight")
    )


class Table(Counter[tuple[str, str, str]]):
    """A sum of formulas."""

    def moves(self, phase: str, tensor: str, axis: str, elements: Fraction) -> None:
        self[phase, tensor, axis] += elements

    def thrice(self, tensor: str, axis: str, elements: Fraction) -> None:
        """Add a gather in forward, a gather in backward, and a reduce-scatter of the gradient."""
        self.moves("forward", tensor, axis, elements)
        self.moves("backward", tensor, axis, elements)
        self.moves("backward", f"gradient of {tensor}", axis, elements)

    def twice(self, tensor: str, axis: str, elements: Fraction) -> None:
        """Add a gather in forward and a reduce-scatter of the gradient."""
        self.moves("forward", tensor, axis, elements)
        self.moves("backward", f"gradient of {tensor}", axis, elements)


def square(case: Case) -> Table:
    """Return the volumes of 2d and 2.5d without norms and embeddings."""
    q, d, h = case.q, case.d if case.grid == "2.5d" else 1, case.h
    n, table = Fraction(case.n, d), Table()
    module, weight = head(case)
    groups = [(LAYERS, group) for group in layer(case)] + [(1, ((module,), h, (case.v,)))]
    for times, (names, k, made) in groups:
        table.thrice(f"X of {' '.join(sorted(names))}", "b", ring(n * k / q, q, times))
        for name, m in zip(names, made, strict=True):
            parameter = weight if name == module else f"{name}.weight"
            table.thrice(parameter, "a", ring(Fraction(k * m, q), q, times))
            table.moves(
                "backward",
                f"gradient of {parameter}",
                "d",
                2 * ring(Fraction(k * m, q * q), d, times),
            )
            if (
                case.model == "gpt2" and name == "attn.c_attn"
            ):  # cannot be stored in shards of two axes: summed over the samples
                table.moves(
                    "backward",
                    f"gradient of {name}.bias",
                    "",
                    2 * (ring(Fraction(m, q), q, times) + ring(Fraction(m, q), d, times)),
                )
            elif case.model == "gpt2" and name != module:
                table.twice(f"{name}.bias", "", ring(Fraction(m, q), q, times))
                table.moves(
                    "backward",
                    f"gradient of {name}.bias",
                    "",
                    2 * ring(Fraction(m, q * q), d, times),
                )
    table.moves("forward", "sums", "b", 3 * 2 * ring(n / q, q))  # the loss
    for axis, size in (("a", q), ("d", d)):
        table.moves("forward", "sums", axis, 2 * 2 * ring(1, size))
    return table


def llama_square(case: Case) -> Table:
    q, d, h, table = case.q, case.d if case.grid == "2.5d" else 1, case.h, square(case)
    n = Fraction(case.n, d)
    for name, times in (
        ("{}.input_layernorm", LAYERS),
        ("{}.post_attention_layernorm", LAYERS),
        ("model.norm", 1),
    ):
        weight = f"{name.format('layers')}.weight"
        table.thrice(weight, "", ring(Fraction(h, q), q, times))
        table.moves("backward", f"gradient of {weight}", "", 2 * ring(Fraction(h, q * q), d, times))
        for phase in ("forward", "backward"):
            table.moves(phase, "sums", "b", 2 * ring(n / q, q, times))
    table.twice("model.embed_tokens.weight", "a", ring(Fraction(case.v * h, q), q))
    table.moves(
        "backward",
        "gradient of model.embed_tokens.weight",
        "d",
        2 * ring(Fraction(case.v * h, q * q), d),
    )
    return table


def gpt2_square(case: Case) -> Table:
    q, d, h, table = case.q, case.d if case.grid == "2.5d" else 1, case.h, square(case)
    n = Fraction(case.n, d)
    for name, times in (("h.ln_1", LAYERS), ("h.ln_2", LAYERS), ("transformer.ln_f", 1)):
        for part in ("weight", "bias"):
            table.thrice(f"{name}.{part}", "", ring(h, q * q, times))
            table.moves(
                "backward", f"gradient of {name}.{part}", "", 2 * ring(Fraction(h, q * q), d, times)
            )
        for phase in ("forward", "backward"):
            table.moves(phase, "for norms", "b", ring(n * h / (q * q), q, times))
    table.twice("Y of transformer.wte", "b", ring(n * h / q, q))
    table.moves("forward", "transformer.wpe.weight", "a", ring(Fraction(S * h, q), q))
    for axis, size in (
        ("a", q),
        ("d", d),
    ):  # gradients of positions are summed before the backward of their lookup
        table.moves("backward", "sums", axis, 2 * ring(Fraction(S * h, q), size))
    return table


def cube(case: Case) -> Table:
    """Return the volumes of 3d without norms and embeddings."""
    q, h, n, table = case.q, case.h, case.n, Table()
    module, weight = head(case)
    groups = [(LAYERS, group, "jl" if i % 2 == 0 else "lj") for i, group in enumerate(layer(case))]
    for times, (names, k, made), (rows, columns) in [*groups, (1, ((module,), h, (case.v,)), "jl")]:
        table.thrice(
            f"X of {' '.join(sorted(names))}", columns, ring(Fraction(n * k, q * q), q, times)
        )
        for name, m in zip(names, made, strict=True):
            parameter = weight if name == module else f"{name}.weight"
            table.thrice(parameter, "i", ring(Fraction(k * m, q * q), q, times))
            table.twice(f"Y of {name}", rows, ring(Fraction(n * m, q * q), q, times))
            if (
                case.model == "gpt2" and name == "attn.c_attn"
            ):  # stored in shards of l and one other axis: summed over the third
                table.moves("forward", f"{name}.bias", "", ring(Fraction(m, q), q, times))
                summed = 2 * ring(Fraction(m, q * q), q, times)
                table.moves(
                    "backward",
                    f"gradient of {name}.bias",
                    "",
                    ring(Fraction(m, q), q, times) + summed,
                )
            elif case.model == "gpt2" and name != module:
                table.twice(f"{name}.bias", "", ring(Fraction(m, q), q * q, times))
    table.moves("forward", "sums", "l", 3 * 2 * ring(Fraction(n, q * q), q))  # the loss
    table.moves("forward", "sums", "i", 2 * 2 * ring(1, q))
    table.moves("forward", "sums", "j", 2 * ring(1, q))
    return table


def llama_cube(case: Case) -> Table:
    q, h, table = case.q, case.h, cube(case)
    for name, times in (
        ("layers.input_layernorm", LAYERS),
        ("layers.post_attention_layernorm", LAYERS),
        ("model.norm", 1),
    ):
        table.thrice(f"{name}.weight", "", ring(Fraction(h, q), q * q, times))
        for phase in ("forward", "backward"):
            table.moves(phase, "sums", "j", 2 * ring(Fraction(case.n, q * q), q, times))
    table.twice("model.embed_tokens.weight", "", ring(Fraction(case.v * h, q), q * q))
    return table


def gpt2_cube(case: Case) -> Table:
    q, h, n, table = case.q, case.h, case.n, cube(case)
    for name, times in (("h.ln_1", LAYERS), ("h.ln_2", LAYERS), ("transformer.ln_f", 1)):
        for part in ("weight", "bias"):
            table.thrice(f"{name}.{part}", "", ring(h, q**3, times))
        for phase, count in (("forward", 2), ("backward", 3)):
            table.moves(phase, "for norms", "j", count * ring(Fraction(n * h, q**3), q, times))
    table.twice("Y of transformer.wte", "l", ring(Fraction(n * h, q * q), q))
    for axis in "il":
        table.moves("backward", "sums", axis, 2 * ring(Fraction(S * h, q), q))
    table.moves("forward", "transformer.wpe.weight", "", ring(Fraction(S * h, q), q * q))
    return table


FORMULAS: Mapping[tuple[str, str], Callable[[Case], Table]] = {
    ("llama", "2d"): llama_square,
    ("llama", "2.5d"): llama_square,
    ("gpt2", "2d"): gpt2_square,
    ("gpt2", "2.5d"): gpt2_square,
    ("llama", "3d"): llama_cube,
    ("gpt2", "3d"): gpt2_cube,
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_communication_of_every_tensor_equals_its_formula(case: Case) -> None:
    expected = {
        key: elements for key, elements in FORMULAS[case.model, case.grid](case).items() if elements
    }
    found = sent(case)
    wrong = {
        key: (found.get(key), expected.get(key))
        for key in {*found, *expected}
        if found.get(key) != expected.get(key)
    }
    assert not wrong, "\n".join(
        f"{key}: found, expected {tuple(map(str, value))}" for key, value in sorted(wrong.items())
    )


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_grid_plans_match_the_model(case: Case) -> None:
    trace, model, batch = captured(case)
    assert verify_program(trace, planned(case).program, model, (), batch).ok


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_parameters_and_their_state_are_sharded_over_the_sides_of_the_grid(
    case: Case,
) -> None:
    """Exceptions are parameters that the number of shards does not divide, and the bias of a fused
    projection, which cannot be stored in as many shards."""
    parts = case.num_devices // (case.d if case.grid == "2.5d" else 1)
    whole, rests = 0, Fraction(0)
    for p in planned(case).program.stages[0].parameters:
        layout, size = p.layout, math.prod(p.shape)
        split = math.prod(
            n
            for axis, n in enumerate(case.mesh.shape)
            if str(layout.placements[axis]).startswith("S")
        )
        assert split == parts or size % parts or p.name.endswith("c_attn.bias"), p.name
        assert (
            "d" not in case.mesh.names or str(layout.placements[case.mesh.names.index("d")]) == "R"
        )
        whole, rests = whole + size, rests + Fraction(size, split)
    memory = planned(case).plan.prediction.memory_bytes
    if case.model in ("llama", "gpt2"):
        assert (memory["parameters"], memory["optimizer"], memory["gradients"]) == (
            4 * rests,
            8 * rests,
            4 * rests,
        ), "AdamW in float32"
    if case.model == "llama":
        assert rests == Fraction(whole, parts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kept_activations_are_sharded_over_all_devices(
    case: Case,
) -> None:
    """Exceptions are sums per token, which are replicated on the axis of the summed features, and
    tensors that do not depend on the batch."""
    plan = planned(case).plan
    nodes = {n.meta["key"]: n for n in captured(case)[0].graph.nodes if "key" in n.meta}
    seen = 0
    for kept in plan.kept:
        node = nodes.get(kept.node.format(*kept.instances[0]))
        if node is None:  # a parameter or an input
            continue
        whole = node.meta["val"].numel() * node.meta["val"].dtype.itemsize
        features = (
            node.meta["val"].numel() // case.n if node.meta["val"].shape[:1] == (case.b,) else 0
        )
        is_sum = features == 1 and not str(node.target).startswith("<built-in function getitem")
        side = {"2d": 1, "2.5d": case.d, "3d": case.q}[case.grid] * case.q
        assert kept.bytes == whole // (side if is_sum else case.num_devices if features else 1), (
            kept.node
        )
        seen += bool(features)
    assert seen > 20


@pytest.mark.parametrize("case", LLAMAS, ids=str)
def test_the_kept_activations_of_llama_equal_their_formula(case: Case) -> None:
    """Each tensor that backward reads counts once: per layer the results of two norms, q, k, v, the
    result of attention in two layouts, its log-sum-exp, two sums with the residual, and four
    tensors of the MLP."""
    q, d, h, heads = case.q, case.d if case.grid == "2.5d" else 1, case.h, case.h // 8
    layer = 2 * h + (h + 2 * case.k) + 2 * h + heads + 2 * h + 4 * case.f
    features = h + LAYERS * layer + h + case.v
    per_token = (
        2 * LAYERS + 1
    ) + 2  # sums of squares of the norms; maximum and sum of the cross entropy
    samples = q * d if case.grid != "3d" else q * q
    positions = LAYERS * 2 * S * 8  # cosine and sine, replicated
    elements = (
        Fraction(case.n * features, case.num_devices)
        + Fraction(case.n * per_token, samples)
        + positions
    )
    plan = planned(case).plan
    of_labels = sum(
        kept.bytes
        for kept in plan.kept
        if kept.node.startswith("/") and kept.node.split("/")[1] not in ("amax", "sum_exp")
    )
    assert plan.prediction.memory_bytes["activations"] - of_labels == 4 * elements


@pytest.mark.parametrize("case", LLAMAS, ids=str)
def test_linears_without_shared_operands_have_the_volumes_of_the_papers(case: Case) -> None:
    """The layers are o_proj and down_proj. 2d: Xu and You, 2021: 3(nk + km)(q−1)/q². 2.5d: the same
    with n/d, and gradients summed over the depth. 3d: Bian et al., 2021, gather the gradient of Y
    for each of two products: (3nk + 3km + 3nm)(q−1)/q³; autopar gathers it once: 2nm."""
    q, d, n = (
        case.q,
        case.d if case.grid == "2.5d" else 1,
        Fraction(case.n, case.d if case.grid == "2.5d" else 1),
    )
    for name, k, m in (("self_attn.o_proj", case.h, case.h), ("mlp.down_proj", case.f, case.h)):
        total = (
            sum(elements for (_, tensor, _), elements in sent(case).items() if name in tensor)
            / LAYERS
        )
        if case.grid == "3d":
            assert total == (3 * n * k + 3 * k * m + 2 * n * m) * (q - 1) / Fraction(q**3)
        else:
            assert total == 3 * (n * k + k * m) * (q - 1) / Fraction(q * q) + 2 * k * m * Fraction(
                d - 1, d * q * q
            )
