"""Equal layers are folded in all containers, in the order in which forward calls them. The trace is
that of a full capture."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from same_trace import assert_same_trace
from torch import Tensor, nn

from autopar.capture import capture, capturing
from autopar.capture.dynamo.joint import RawJoint
from autopar.capture.dynamo.preparing import Prepared
from autopar.capture.folding import shortened

N = 8


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)
        self.register_buffer("scale", torch.ones(8))
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale / self.factor


class Net(nn.Module):
    """Layers in a container, called in one way, between two linear layers."""

    layers: nn.Module

    def __init__(self, **held: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        for name, module in held.items():
            self.add_module(name, module)
        self.last = nn.Linear(8, 8)

    def walk(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.walk(self.first(x))).square().mean()
        return out


NAMES = "hcaebdgf"  # unordered keys, called in alphabetical order


class DictOfNames(Net):
    def __init__(self) -> None:
        super().__init__(layers=nn.ModuleDict({f"block_{name}": Layer() for name in NAMES}))

    def walk(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():  # type: ignore[operator]
            x = layer(x)
        return x


class DictInAnotherOrder(DictOfNames):
    def walk(self, x: Tensor) -> Tensor:
        for name in sorted(self.layers.keys()):  # type: ignore[operator]
            x = self.layers[name](x)  # type: ignore[index]
        return x


class DictByNames(DictOfNames):
    def __init__(self) -> None:
        super().__init__()
        self.order = [f"block_{name}" for name in sorted(NAMES)]

    def walk(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.layers[name](x)  # type: ignore[index]
        return x


class DictByFixedNumbers(Net):
    def __init__(self) -> None:
        super().__init__(layers=nn.ModuleDict({str(n): Layer() for n in range(N)}))

    def walk(self, x: Tensor) -> Tensor:
        for n in range(N):
            x = self.layers[str(n)](x)  # type: ignore[index]
        return x


class Attributes(Net):
    def __init__(self) -> None:
        super().__init__(**{f"layer_{name}": Layer() for name in "abcdefgh"})

    def walk(self, x: Tensor) -> Tensor:
        x = self.layer_d(self.layer_c(self.layer_b(self.layer_a(x))))
        return self.layer_h(self.layer_g(self.layer_f(self.layer_e(x))))  # type: ignore[no-any-return]


class AttributesByNumber(Net):
    def __init__(self) -> None:
        super().__init__(**{f"layer{n}": Layer() for n in range(N)})
        self.num_layers = N

    def walk(self, x: Tensor) -> Tensor:
        for n in range(self.num_layers):
            x = x + getattr(self, f"layer{n}")(x)  # an op between the layers
        return x


class PythonList(Net):
    def __init__(self) -> None:
        blocks = [Layer() for _ in range(N)]
        super().__init__(**{f"block{n}": block for n, block in enumerate(blocks)})
        self.blocks = blocks

    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Nested(Net):
    def __init__(self) -> None:
        stages = {f"stage{n}": nn.ModuleList(Layer() for _ in range(2)) for n in range(6)}
        super().__init__(stages=nn.ModuleDict(stages))

    def walk(self, x: Tensor) -> Tensor:
        for stage in self.stages.values():
            for layer in stage:
                x = layer(x)
        return x


class NestedWithAnOpBetween(Nested):
    def walk(self, x: Tensor) -> Tensor:
        for first, second in self.stages.values():
            x = x + second(torch.tanh(first(x)))
        return x


class Slices(Net):
    def __init__(self) -> None:
        super().__init__(layers=nn.Sequential(*(Layer() for _ in range(N))))

    def walk(self, x: Tensor) -> Tensor:
        layers = self.layers
        return layers[4:](layers[:4](x))  # type: ignore[index, no-any-return]


class TwoKinds(Net):
    def __init__(self) -> None:
        super().__init__(
            layers=nn.ModuleDict(
                {f"{name}": Layer(8 if n % 2 else 16) for n, name in enumerate("abcdefghijkl")}
            )
        )

    def walk(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():  # type: ignore[operator]
            x = layer(x)
        return x


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.four(self.three(self.two(self.one(x))))
        return out


class TwoParents(Net):
    def __init__(self) -> None:
        super().__init__(front=Half(), back=Half())

    def walk(self, x: Tensor) -> Tensor:
        return self.back(self.front(x))  # type: ignore[no-any-return]


class SkipInTheMiddle(Net):
    def __init__(self) -> None:
        super().__init__(layers=nn.ModuleList(Layer() for _ in range(16)))

    def walk(self, x: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):  # type: ignore[arg-type]
            x = layer(x) if n != 8 else torch.tanh(layer(x))
        return x


class BesideHeads(DictOfNames):
    """A list that is folded, and another one that cannot be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(N))

    def walk(self, x: Tensor) -> Tensor:
        x = super().walk(x)
        return torch.stack([head(x) for head in self.heads]).sum(0)


FOLDED: dict[type[Net], str] = {
    DictOfNames: "8 layers of layers",
    DictInAnotherOrder: "8 layers of layers",
    DictByNames: "8 layers of layers",
    DictByFixedNumbers: "8 layers of layers",
    Attributes: "8 layers of the model",
    AttributesByNumber: "8 layers of the model",
    PythonList: "8 layers of the model",
    Nested: "12 layers of stages",
    NestedWithAnOpBetween: "12 layers of stages, 2 alternating kinds",
    Slices: "8 layers of layers",
    TwoKinds: "12 layers of layers, 2 alternating kinds",
    TwoParents: "8 layers of the model",
    SkipInTheMiddle: "8 layers of layers; 7 layers of layers",
    BesideHeads: "8 layers of layers",
}


def hooked(model: Net) -> None:
    model.layers.block_e.register_forward_hook(lambda _module, _args, made: made * 2)  # type: ignore[union-attr]


def other_buffer(model: Net) -> None:
    model.layers.block_e.scale = torch.ones(1)  # type: ignore[union-attr]


def other_constant(model: Net) -> None:
    model.layers.block_e.factor = 3.0  # type: ignore[union-attr]


def in_eval(model: Net) -> None:
    model.layers.block_e.eval()  # type: ignore[union-attr]


def frozen(model: Net) -> None:
    model.layers.block_e.requires_grad_(False)  # type: ignore[union-attr]


def tied(model: Net) -> None:
    model.layers.block_e.up.weight = model.layers.block_h.up.weight  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change",
    [hooked, other_buffer, other_constant, in_eval, frozen, tied],
    ids=lambda each: each.__name__,
)
def test_a_dict_with_one_different_layer_is_captured_correctly(
    change: Callable[[Net], None],
) -> None:
    model = DictOfNames()
    change(model)
    folded = capture(model, (), batch())
    assert not folded.folding.runs and "layers b" in str(folded.folding)
    assert_same_trace(folded, capture(model, (), batch(), fold=False))


class Branching(Layer):
    """Reads the value of a buffer that decides a branch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.scale.sum().item() > 0 else x


@pytest.mark.slow
@pytest.mark.parametrize("different", [False, True])
def test_values_of_buffers_that_forward_reads_decide_whether_layers_are_equal(
    different: bool,
) -> None:
    model = DictOfNames()
    model.layers = nn.ModuleDict({name: Branching() for name in NAMES})
    if different:
        model.layers.e.scale.zero_()  # type: ignore[union-attr, operator]
    folded = capture(model, (), batch())
    assert bool(folded.folding.runs) is not different
    assert_same_trace(folded, capture(model, (), batch(), fold=False))


@pytest.mark.parametrize("kind", [PythonList, DictInAnotherOrder], ids=lambda kind: kind.__name__)
def test_nodes_and_parameters_have_the_names_of_the_registered_modules(kind: type[Net]) -> None:
    model = kind()
    paths = dict(model.named_modules())
    for fold in (True, False):
        trace = capture(model, (), batch(), fold=fold)
        assert {
            node.meta["module"] for node in trace.graph.nodes if node.op == "call_function"
        } <= paths.keys()
        assert [entry.name for entry in trace.parameters] == [
            name for name, _ in model.named_parameters()
        ]


@pytest.mark.slow
def test_folding_a_dict_traces_as_few_nodes_as_folding_a_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced: list[int] = []
    plain = shortened.raw_joint

    def counted(model: nn.Module, call: Prepared) -> RawJoint:
        raw = plain(model, call)
        traced.append(len(raw.graph.nodes))
        return raw

    monkeypatch.setattr(shortened, "raw_joint", counted)
    monkeypatch.setattr(capturing, "raw_joint", counted)
    as_list = DictOfNames()
    as_list.layers = nn.ModuleList(as_list.layers.values())  # type: ignore[operator]
    as_list.walk = lambda x: functools.reduce(lambda y, layer: layer(y), as_list.layers, x)  # type: ignore[method-assign, arg-type]
    for model in (as_list, DictOfNames(), DictInAnotherOrder(), Attributes()):
        capture(model, (), batch())
    assert len(traced) == 4 and len(set(traced)) == 1


@pytest.fixture(autouse=True, scope="module")
def captures() -> None:
    """Replace the fixture that shares captures between tests, so that each model is traced."""


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("kind", FOLDED, ids=lambda kind: kind.__name__)
def test_layers_in_any_container_are_folded_with_the_trace_of_a_full_capture(
    kind: type[Net],
) -> None:
    model = kind()
    folded = capture(model, (), batch())
    assert str(folded.folding) == f"folded: {FOLDED[kind]}"
    assert_same_trace(folded, capture(model, (), batch(), fold=False))
