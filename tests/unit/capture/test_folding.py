"""Folded capture of adversarial models. Each is captured correctly, folded or in full, and the
trace says which."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from same_trace import assert_same_trace, differs
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.dynamo.preparing import prepare_call
from autopar.capture.folding import NotFoldable, capture_shortened, shortened
from autopar.capture.folding.runs import find_runs
from autopar.errors import CaptureError

N = 10


class Scaled(torch.autograd.Function):
    """The identity with a scaled gradient. Forward does not show the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


class Layer(nn.Module):
    """A residual block. `index` is the number of the layer. Forward reads it only with
    `reads_index`."""

    def __init__(self, index: int, **settings: Any) -> None:
        super().__init__()
        self.index = index
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.reads_index, self.gradient_scale = (
            settings.get("reads_index", False),
            settings.get("gradient_scale"),
        )

    def forward(self, x: Tensor) -> Tensor:
        update = torch.tanh(self.linear(self.norm(x)))
        if self.reads_index:
            update = update / (self.index + 1)
        if self.gradient_scale is not None:
            update = Scaled.apply(update, self.gradient_scale(self.index))
        return x + update


Walk = Callable[["Stack", Tensor], Any]


def plain(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


class Stack(nn.Module):
    """Layers between two linear layers. `walk` runs the layers."""

    def __init__(self, walk: Walk = plain, num_layers: int = N, **settings: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer(index, **settings) for index in range(num_layers))
        self.kinds: list[str] = []
        self.num_layers = num_layers
        self.walk = walk

    def forward(self, x: Tensor) -> Any:
        return self.last(self.walk(self, self.first(x))).square().mean()


def stack(walk: Walk = plain, **settings: Any) -> Stack:
    with torch.device("meta"):
        return Stack(walk, **settings)


X = torch.arange(12.0).reshape(3, 4) / 12


def step_by_step(change: Callable[[Stack, int, Tensor], Tensor]) -> Walk:
    """Return a walk that applies `change` to the result of every layer."""

    def walk(model: Stack, x: Tensor) -> Tensor:
        for number, layer in enumerate(model.layers):
            x = change(model, number, layer(x))
        return x

    return walk


def at(number: int, change: Callable[[Tensor], Tensor]) -> Walk:
    """Return a walk that applies `change` after one layer."""
    return step_by_step(lambda model, position, x: change(x) if position == number else x)


def skip_from(number: int) -> Walk:
    def walk(model: Stack, x: Tensor) -> Tensor:
        kept = x
        for position, layer in enumerate(model.layers):
            x = layer(x)
            kept = x if position == number % len(model.layers) else kept
        return x + kept

    return walk


def without_gradient(model: Stack, x: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        if number in (4, 7):
            with torch.no_grad():
                x = layer(x)
        else:
            x = layer(x)
    return x


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x


def collected(model: Stack, x: Tensor) -> Tensor:
    hidden = [x]
    for layer in model.layers:
        hidden.append(layer(hidden[-1]))
    return torch.stack(hidden).sum(0)


def swallowed(model: Stack, x: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x)
        with contextlib.suppress(Exception):
            x = x * 2 if number == 6 else x
    return x


def weighed(model: Stack, x: Tensor) -> Tensor:
    return plain(model, x) * sum(layer.linear.weight.sum() for layer in model.layers)


CENTRAL = (
    "plain",
    "by index",
    "a value for all from before",
    "half of the layers frozen",
    "dropout",
    "a list of kinds beside the layers",
)
ALSO_WRONG = (
    "a change at layer 6",
    "two layers detached",
    "two layers without gradients",
    "a hook on a tensor",
)
# Models whose shortened capture would be wrong, and the reason that the check reports.
SEEN_BY_THE_CHECK: dict[str, tuple[Walk, str]] = {
    "a change at layer 6": (
        at(6, lambda x: x * 2),
        "layer 6 of layers differs from an equal layer in aten.mul.Tensor",
    ),
    "a change at half depth": (
        step_by_step(lambda model, number, x: x * 2 if number >= len(model.layers) / 2 else x),
        "layer 2 of layers does not run aten.mul.Tensor",
    ),
    "two layers detached": (
        step_by_step(lambda model, number, x: x + x.detach() if number in (4, 7) else x),
        "layer 4 of layers differs from an equal layer in aten.detach.default",
    ),
    "two layers without gradients": (without_gradient, "layer 4 of layers differs"),
    "a skip from layer 7": (
        skip_from(7),
        "outside the layers reads a result of layer 7 of layers",
    ),
    "a change at layer 6 that no exception leaves": (swallowed, "layer 6 of layers differs"),
    "a hook on a tensor": (at(6, hooked), "a hook on a tensor"),
    "another gradient in one layer": (
        step_by_step(lambda model, number, x: Scaled.apply(x, 3.0 if number == 6 else 1.0)),
        "layer 6 of layers differs from an equal layer in autograd function",
    ),
}
# Models that are refused with or without the check of the full model.
REFUSED: dict[str, tuple[Walk, str]] = {
    "every third layer": (
        step_by_step(lambda model, number, x: x * 2 if number % 3 == 0 else x),
        "layer 3 of layers differs",
    ),
    "a fading factor": (
        step_by_step(lambda model, number, x: x * (1 - number / N)),
        "layer 3 of layers differs",
    ),
    "all hidden states": (collected, "outside the layers reads a result of layer 1 of layers"),
    "a layer used twice": (
        lambda model, x: model.layers[0](plain(model, x)),
        "forward does not call layers.0 in the order of the layers",
    ),
    "a skip from layer 1": (
        skip_from(1),
        "outside the layers reads a result of layer 1 of layers",
    ),
    "a skip from layer 2": (skip_from(2), "outside the layers reads a result of layer"),
    "weights read from outside": (weighed, "outside the layers"),
    "no layer called": (lambda model, x: x, "forward does not call the layers"),
}
FOLDED: dict[str, Walk] = {
    "plain": plain,
    "the last layer differs": step_by_step(
        lambda model, number, x: x * 2 if number == len(model.layers) - 1 else x
    ),
    "by index": lambda model, x: [
        x := model.layers[number](x) for number in range(model.num_layers)
    ][-1],
    "the layers reversed": lambda model, x: [x := layer(x) for layer in reversed(model.layers)][-1],
    "a layer called first": lambda model, x: [
        x := model.layers[number](x) for number in (3, 0, 1, 2, *range(4, N))
    ][-1],
    "the number of layers": lambda model, x: plain(model, x) / len(model.layers),
    "two slices": lambda model, x: [
        x := layer(x) for part in (model.layers[:6], model.layers[6:]) for layer in part
    ][-1],
    "a slice": lambda model, x: [x := layer(x) for layer in model.layers[: model.num_layers]][-1],
    "a constant in each": step_by_step(lambda model, number, x: x * torch.tensor(0.5)),
    "the same gradient in each": step_by_step(lambda model, number, x: Scaled.apply(x, 2.0)),
    "a value for all from before": lambda model, x: step_by_step(lambda _, number, y: y * x)(
        model, x.sin()
    ),
}


def refusal_of(model: nn.Module) -> str:
    """Return the reason why the shortened model is refused."""
    with prepare_call(model, (X,), {}) as call, pytest.raises(NotFoldable) as refusal:
        capture_shortened(model, call, {})
    return str(refusal.value)


@pytest.mark.parametrize("name", SEEN_BY_THE_CHECK)
def test_the_check_refuses_models_whose_shortened_capture_would_be_wrong(name: str) -> None:
    walk, says = SEEN_BY_THE_CHECK[name]
    assert says in refusal_of(stack(walk))


@pytest.mark.parametrize(
    "name",
    [
        "a skip from layer 7",
        "another gradient in one layer",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ALSO_WRONG),
    ],
)
def test_without_the_check_the_folded_trace_is_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack(SEEN_BY_THE_CHECK[name][0])
    full = capture(model, (X,), fold=False)
    monkeypatch.setattr(shortened, "compare", lambda *_: None)
    folded = capture(model, (X,))
    assert folded.folding.runs and differs(folded, full)


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_repeated_are_refused(name: str) -> None:
    walk, says = REFUSED[name]
    assert says in refusal_of(stack(walk))


def test_without_the_check_the_graph_shows_readers_outside_the_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shortened, "compare", lambda *_: None)
    assert (
        "is outside the layers"
        in capture(stack(REFUSED["weights read from outside"][0]), (X,)).folding.refusal
    )


def test_layers_before_a_different_layer_are_folded() -> None:
    model = stack(SEEN_BY_THE_CHECK["a change at layer 6"][0])
    folded = capture(model, (X,))
    assert str(folded.folding) == "folded: 6 layers of layers"
    assert_same_trace(folded, capture(model, (X,), fold=False))


def test_a_refused_model_is_captured_in_full_and_the_trace_gives_the_reason() -> None:
    model = stack(skip_from(-2))
    folded = capture(model, (X,))
    assert "is outside the layers" in str(folded.folding)
    assert_same_trace(folded, capture(model, (X,), fold=False))


@pytest.mark.parametrize(
    "name",
    [name if name in CENTRAL else pytest.param(name, marks=pytest.mark.slow) for name in FOLDED],
)
def test_layers_that_can_be_repeated_are_folded(name: str) -> None:
    model = stack(FOLDED[name])
    folded = capture(model, (X,))
    assert str(folded.folding) == "folded: 10 layers of layers"
    assert_same_trace(folded, capture(model, (X,), fold=False))


def changed(change: Callable[[Stack], Any], walk: Walk = plain, **settings: Any) -> Stack:
    """Return a stack that `change` was applied to."""
    model = stack(walk, **settings)
    change(model)
    return model


def freeze(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        layer.requires_grad_(False)


def tie(model: Stack) -> None:
    model.layers[7].linear.weight = model.layers[3].linear.weight


def set_kinds(model: Stack) -> None:
    model.kinds = ["even", "odd"] * (len(model.layers) // 2)


def by_kind(model: Stack, number: int, x: Tensor) -> Tensor:
    return x * 2 if model.kinds[number] == "odd" else x


def normalise_batches(model: Stack) -> None:
    for layer in model.layers:
        layer.norm = nn.BatchNorm1d(4, device="meta")


def drop(model: Stack) -> None:
    for layer in model.layers:
        layer.linear = nn.Sequential(layer.linear, nn.Dropout(0.1))


def nest(model: Stack) -> None:
    """Replace the linear of each layer by a list of equal layers."""
    for layer in model.layers:
        layer.linear = nn.Sequential(*(nn.Linear(4, 4, device="meta") for _ in range(7)))


CHANGED: dict[str, tuple[Stack, str]] = {
    "one layer of another eps": (
        changed(lambda model: setattr(model.layers[1].norm, "eps", 0.1)),
        "8 layers",
    ),
    "one layer frozen": (changed(lambda model: freeze([model.layers[1]])), "8 layers"),
    "one layer hooked": (
        changed(lambda model: model.layers[1].register_forward_hook(lambda *_: None)),
        "8 layers",
    ),
    "half of the layers frozen": (
        changed(lambda model: freeze(model.layers[:7]), num_layers=14),
        "7 layers of layers; 7 layers of layers",
    ),
    "all layers frozen": (changed(lambda model: freeze(model.layers)), "10 layers"),
    "batch statistics": (changed(normalise_batches), "10 layers"),
    "dropout": (changed(drop), "10 layers"),
    "lists within layers": (changed(nest), "10 layers of layers"),
    "layers of two kinds": (
        changed(
            lambda model: [setattr(layer.norm, "eps", 0.1) for layer in model.layers[::2]],
            num_layers=12,
        ),
        "2 alternating kinds",
    ),
    "a list of kinds beside the layers": (
        changed(set_kinds, step_by_step(by_kind), num_layers=12),
        "12 layers of layers, 2 alternating kinds",
    ),
}


@pytest.mark.parametrize(
    "name",
    [name if name in CENTRAL else pytest.param(name, marks=pytest.mark.slow) for name in CHANGED],
)
def test_equal_layers_are_folded_and_different_layers_are_not(name: str) -> None:
    model, says = CHANGED[name]
    folded = capture(model, (X,))
    assert says in str(folded.folding)
    assert_same_trace(folded, capture(model, (X,), fold=False))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (changed(tie), "layers 7 and 8 of layers differ in 'linear.weight (tied)'"),
        (
            stack(reads_index=True),
            "layer 2 of layers differs from an equal layer in aten.div.Tensor",
        ),
        (
            stack(gradient_scale=float),
            "layer 2 of layers differs from an equal layer in autograd function",
        ),
        (
            changed(
                lambda model: [
                    setattr(layer, "scale", number * 0.5)
                    for number, layer in enumerate(model.layers)
                ]
            ),
            "differ in 'scale'",
        ),
        (stack(num_layers=5), "no list of modules is long enough to fold"),
    ],
    ids=["tied", "the index in forward", "the index in backward", "a number of each", "few"],
)
def test_different_layers_are_refused_with_the_reason(model: Stack, says: str) -> None:
    assert says in refusal_of(model)


class Recording(Stack):
    """A model that changes its attributes in every call, in ways that Dynamo supports or that only
    an eager forward runs."""

    def __init__(self, walk: Walk = plain, **settings: Any) -> None:
        super().__init__(walk, **settings)
        self.calls, self.seen, self.by_name = 0, [1, 2], {"a": 1}
        self.config = SimpleNamespace(
            num_layers=N, layer_types=["full"] * N, text_config=SimpleNamespace(depth=N)
        )

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.seen.append(3)
        self.by_name["b"] = 2
        return super().forward(x)


def snapshot(model: nn.Module) -> list[Any]:
    """Return the state of a model: tensors by identity and value, the rest by value."""
    tensors = [
        (name, id(t), t.tolist(), t.requires_grad)
        for name, t in (*model.named_parameters(), *model.named_buffers())
    ]
    modules = [
        (name, id(module), list(module._modules), module.training)
        for name, module in model.named_modules()
    ]
    rest = [
        (
            name,
            {
                key: copy.copy(value)
                for key, value in vars(module).items()
                if not key.startswith("_") and not callable(value)
            },
        )
        for name, module in model.named_modules()
    ]
    config = getattr(model, "config", SimpleNamespace(text_config=None))
    return [
        tensors,
        modules,
        rest,
        copy.deepcopy(vars(config)),
        id(config),
        id(vars(config).get("layer_types")),
    ]


@pytest.mark.parametrize(
    "walk",
    [plain, FOLDED["by index"], SEEN_BY_THE_CHECK["a skip from layer 7"][0]],
    ids=["folded", "counted", "refused"],
)
def test_capture_leaves_a_model_with_weights_unchanged(walk: Walk) -> None:
    model = Recording(walk)
    before, drawn = snapshot(model), (random.getstate(), torch.get_rng_state())
    capture(model, (X,))
    assert snapshot(model) == before
    assert random.getstate() == drawn[0] and torch.equal(torch.get_rng_state(), drawn[1])
    assert model(X).item() == copy.deepcopy(model)(X).item()


class Frozen(dict[str, Any]):
    """Immutable settings, as in the models of diffusers."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("settings are frozen")

    __setitem__ = clear = pop = update


@pytest.mark.parametrize("walk", [plain, collected], ids=["folded", "refused"])
def test_a_model_with_immutable_settings_is_captured_and_keeps_them(walk: Walk) -> None:
    model = stack(walk)
    model.settings = Frozen(num_layers=N)
    folded = capture(model, (X,))
    assert bool(folded.folding.runs) is (walk is plain)
    assert model.settings == {"num_layers": N}


def read_value(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def fail(x: Tensor) -> Tensor:
    raise RuntimeError("planted")


@pytest.mark.parametrize("change", [read_value, fail], ids=["data-dependent", "fails"])
@pytest.mark.parametrize("number", [6, N - 1])
def test_a_failed_capture_leaves_the_model_unchanged(
    change: Callable[[Tensor], Tensor], number: int
) -> None:
    model = Recording(at(number, change))
    freeze([model.last])
    before = snapshot(model)
    with pytest.raises(CaptureError):
        capture(model, (X,))
    assert snapshot(model) == before


def test_hooks_of_the_check_are_removed_afterwards() -> None:
    seen = (
        len(torch.nn.modules.module._global_forward_pre_hooks),
        len(torch.nn.modules.module._global_forward_hooks),
    )
    apply, hook = torch.autograd.Function.__dict__["apply"], Tensor.register_hook
    capture(stack(), (X,))
    assert seen == (
        len(torch.nn.modules.module._global_forward_pre_hooks),
        len(torch.nn.modules.module._global_forward_hooks),
    )
    assert torch.autograd.Function.__dict__["apply"] is apply and Tensor.register_hook is hook
    assert not torch.compiler.is_compiling()
    assert gc.isenabled()


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.mark.slow
def test_a_model_that_is_itself_a_list_is_folded() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, device="meta") for _ in range(8)), Loss())
    folded = capture(model, (X,))
    assert str(folded.folding) == "folded: 8 layers of the model"
    assert_same_trace(folded, capture(model, (X,), fold=False))


def lists(**kinds: str) -> nn.Module:
    """Return lists of linear layers. Equal letters are equal layers."""
    layers = {
        letter: number + 1 for number, letter in enumerate(sorted(set("".join(kinds.values()))))
    }
    return nn.ModuleDict(
        {
            name: nn.ModuleList(nn.Linear(2, layers[letter]) for letter in word)
            for name, word in kinds.items()
        }
    )


@pytest.mark.parametrize(
    ("word", "runs"),
    [
        ("aaaaaa", [(0, 1, 6)]),
        ("aaaaa", []),
        ("baaaaaac", [(1, 1, 6)]),
        ("abababababab", [(0, 2, 6)]),
        ("cabababababababd", [(1, 2, 7)]),
        ("aabaabaabaabaab", [(0, 3, 5)]),
        ("aaaaaaabbbbbbb", [(0, 1, 7), (7, 1, 7)]),
        ("abcdefghij", []),
    ],
)
def test_runs_are_found_with_their_period(word: str, runs: list[tuple[int, int, int]]) -> None:
    found, reason = find_runs(lists(layers=word))
    assert [
        (int(run.layers[0].rpartition(".")[2]), run.period, run.num_units) for run in found
    ] == runs
    assert bool(reason) == (not runs)


def test_each_list_of_layers_has_its_own_runs() -> None:
    found, _ = find_runs(lists(encoder="aaaaaaaa", decoder="bbbbbbbbb", few="aa"))
    assert [str(run) for run in found] == ["8 layers of encoder", "9 layers of decoder"]
