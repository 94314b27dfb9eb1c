"""The key of a plan covers everything that planning reads. It is the same in all processes. Models
with objects that cannot be compared have no key."""

from __future__ import annotations

import functools
import itertools
import math
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cached_source import SOURCE, load
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.cache.entries import Key
from autopar.cache.walk import Opaque, Walk


def key(model: nn.Module, args: tuple[Any, ...] = (), **more: Any) -> str:
    return Key.of("plan", model, args, more, ()).text


def key_of_source(folder: Path, source: str = SOURCE) -> str:
    return key(*load(folder, source).make())


@pytest.mark.slow
def test_equal_sources_have_equal_keys_in_different_processes(tmp_path: Path) -> None:
    assert key_of_source(tmp_path) == key_of_source(tmp_path)
    program = (
        "import sys, cached_net; from autopar.cache.entries import Key;"
        " model, args = cached_net.make(); print(Key.of('plan', model, args, {}, ()).text)"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for _ in range(2)
    }
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.down(clamped", "-self.down(clamped"),
        ("F.leaky_relu(x, slope)", "F.elu(x, slope)"),
        ("slope=0.1", "slope=0.2"),
        ("SCALE = 0.5", "SCALE = 0.6"),
        ('"sizes": [8, 16]', '"sizes": [8, 17]'),
        ("limit = 6.0", "limit = 5.0"),
        ("power = 2", "power = 3"),
        ("x / x.norm()", "x / x.norm(1)"),
        ("return 3.0", "return 4.0"),
        ('self.kind = "gelu"', 'self.kind = "relu"'),
        ("nn.Dropout(0.0)", "nn.Dropout(0.1)"),
        ("torch.zeros(4))", "torch.zeros(4, dtype=torch.int32))"),
        ("torch.arange(8.0)", "torch.arange(1.0, 9.0)"),
        ("self.scale = 1.5", "self.scale = 1"),
        ("loss.mean()", "loss.sum()"),
        ("class Base(nn.Module)", "class Base(nn.Sequential)"),
        ("return Net()", "return Net().eval()"),
        ("return Net()", "return Net().double()"),
        ("return Net()", "return Net().to('meta')"),
        ("return Net()", "return Net().requires_grad_(False)"),
        ("torch.zeros(4, 8)", "torch.zeros(2, 8)"),
        ("torch.zeros(4, 8)", "torch.zeros(4, 8, dtype=torch.float64)"),
        ("torch.zeros(4, 8)", "torch.zeros(8, 4).t()"),
        ("torch.zeros(4, 8)", "torch.zeros(4, 8, requires_grad=True)"),
        ("return loss.mean()", "return loss.mean()  # quoted by plans"),
        ("class Net(Base):", "\nclass Net(Base):"),
    ],
)
def test_relevant_changes_of_the_source_change_the_key(
    tmp_path: Path, before: str, after: str
) -> None:
    assert SOURCE.count(before) == 1
    edited = SOURCE.replace(before, after)
    assert key_of_source(tmp_path, edited) != key_of_source(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.zeros(4, 8)", "torch.ones(4, 8)"),
        (
            "    return Net(),",
            "    net = Net(); net.count += 1; net.up.weight.data += 1; return net,",
        ),
        ("def make():", "def make():  # not a part of the model"),
    ],
)
def test_irrelevant_changes_of_the_source_do_not_change_the_key(
    tmp_path: Path, before: str, after: str
) -> None:
    edited = SOURCE.replace(before, after)
    assert edited != SOURCE
    assert key_of_source(tmp_path, edited) == key_of_source(tmp_path)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).mean()


def _tie(model: Any) -> None:
    model.two.weight = model.one.weight


def _share(model: Any) -> None:
    model.two = model.one


def _view(model: Any) -> None:
    model.two.weight = nn.Parameter(model.one.weight.detach())


def _hook(model: Any) -> None:
    model.one.register_forward_hook(lambda module, args, out: out * 2)


def _other_hook(model: Any) -> None:
    model.one.register_forward_hook(lambda module, args, out: out * 3)


def _mark(model: Any) -> None:
    model.one.weight.mark = "mine"


def _freeze(model: Any) -> None:
    model.one.bias.requires_grad_(False)


def _replace_forward(model: Any) -> None:
    model.one.forward = lambda x: x


def _nothing(model: Any) -> None:
    pass


def test_models_with_different_structures_have_different_keys() -> None:
    changes: tuple[Callable[[Any], None], ...] = (
        _nothing,
        _tie,
        _share,
        _view,
        _hook,
        _other_hook,
        _mark,
        _freeze,
        _replace_forward,
    )
    keys = []
    for change in changes:
        model = Plain()
        change(model)
        keys.append(key(model))
    assert len(set(keys)) == len(changes)


def test_global_settings_of_torch_change_the_key() -> None:
    model, keys = Plain(), []
    keys.append(key(model))
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(key(model))
    with torch.no_grad():
        keys.append(key(model))
    torch.set_default_dtype(torch.float64)
    try:
        keys.append(key(model))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=True, capture_scalar_outputs=True):
        keys.append(key(model))
    assert len(set(keys)) == len(keys)
    assert key(model) == keys[0]


def test_ranks_without_warnings_have_separate_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = []
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        keys.append(key(Plain()))
    monkeypatch.delenv("RANK")
    assert key(Plain()) == keys[0] != keys[1] == keys[2]


def test_replaced_torch_functions_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Plain())
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight)
        assert key(Plain()) != before
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "gelu", lambda x: x)
        assert key(Plain()) != before
    assert key(Plain()) == before


def test_inputs_with_different_structures_have_different_keys() -> None:
    x, y = torch.zeros(4, 8), torch.zeros(4, 8)
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
        ((x,), {}),
        ((), {"x": x}),
        ((x, y), {}),
        ((x, x), {}),
        (((x, y),), {}),
        (([x, y],), {}),
        ((x, 1), {}),
        ((x, True), {}),
        ((x, 1.0), {}),
        ((x.to("meta"),), {}),
    )
    keys = {key(Plain(), args, **kwargs) for args, kwargs in calls}
    assert len(keys) == len(calls)
    assert key(Plain(), (x,)) == key(Plain(), (torch.rand(4, 8),))


def _lock(model: Any) -> None:
    model.lock = threading.Lock()


def _generator(model: Any) -> None:
    model.noise = torch.Generator()


def _counter(model: Any) -> None:
    model.numbers = itertools.count()


def _iterator(model: Any) -> None:
    model.numbers = iter([1, 2])


def _objects(model: Any) -> None:
    model.seen = {Plain(), Plain()}


def _tensor_hook(model: Any) -> None:
    model.one.weight.register_hook(lambda gradient: gradient)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_lock, "lock objects cannot be compared"),
        (_counter, "count objects cannot be compared"),
        (_iterator, "list_iterator objects cannot be compared"),
        (_generator, "Generator objects cannot be compared"),
        (_objects, "order differs between processes"),
        (_tensor_hook, "tensor with hooks"),
    ],
)
def test_models_with_incomparable_objects_have_no_key(
    change: Callable[[Any], None], complaint: str
) -> None:
    model = Plain()
    change(model)
    with pytest.raises(Opaque, match=complaint):
        key(model)


ROWS = torch.ones(4, 4)
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": ROWS.to_sparse,
    "sparse_csr": ROWS.to_sparse_csr,
    "mkldnn": ROWS.to_mkldnn,
    "torch.nested": lambda: torch.nested.nested_tensor([ROWS, ROWS[:2]]),
    "NestedTensor": lambda: torch.nested.nested_tensor([ROWS], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(ROWS, 0.1, 0, torch.qint8),
    "MaskedTensor": lambda: torch.masked.masked_tensor(ROWS, ROWS > 0),
    "FakeTensor": FakeTensorMode().from_tensor(ROWS).clone,
    "no elements": lambda: torch._efficientzerotensor((3,)),
}


@pytest.mark.filterwarnings("ignore")  # some kinds are prototypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [True, False])
def test_tensors_that_cannot_be_hashed_have_no_key(kind: str, values: bool) -> None:
    walk = Walk()
    with pytest.raises(Opaque, match=kind):
        walk.add("the call", (KINDS[kind](),), values=values)


def test_values_of_a_freed_tensor_have_no_key() -> None:
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    with pytest.raises(Opaque, match="memory was freed"):
        Walk().add("the call", (x,))
    Walk().add("the call", (x,), values=False)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize, torch.vmap])
def test_tensors_inside_transforms_have_no_key(transform: Any) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(Opaque, match=r"inside a transform of torch\.func"):
            Walk().add("the call", (x,), values=False)
        return x.sum()

    transform(run)(ROWS)


def test_function_modes_and_global_hooks_prevent_a_key() -> None:
    with torch.device("cpu"), pytest.raises(Opaque, match="a torch function mode"):
        key(Plain())
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out)
    try:
        with pytest.raises(Opaque, match="hooks for all modules"):
            key(Plain())
    finally:
        handle.remove()


def test_module_imported_in_forward_must_already_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "cached_help.py").write_text("def double(x):\n    return x * 2\n")
    source = SOURCE.replace(
        "    return loss.mean()",
        "    from cached_help import double\n    return double(loss.mean())",
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(Opaque, match="imports cached_help, which is not loaded"):
            key_of_source(tmp_path, source)
        import cached_help  # type: ignore[import-not-found]

        before = key_of_source(tmp_path, source)
        cached_help.double = lambda x: x * 3
        assert key_of_source(tmp_path, source) != before
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("cached_help", None)


class Color(Enum):
    RED = 1
    BLUE = 2


class Sizes(dict[str, int]):
    limit = 3


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown: int, hidden: int) -> None:
        self.shown, self.__hidden = shown, hidden


def test_objects_are_compared_by_their_full_contents() -> None:
    objects: tuple[Any, ...] = (
        {"a": 1},
        Sizes(a=1),
        Sizes(a=2),
        OrderedDict(a=1),
        defaultdict(int, a=1),
        defaultdict(float, a=1),
        Slotted(1, 2),
        Slotted(1, 3),
        Slotted(2, 2),
        {1, 2},
        frozenset((1, 2)),
        [1, 2],
        (1, 2),
        (1, 2.0),
        (1, (2,)),
        numpy.arange(3),
        numpy.arange(3.0),
        numpy.float32(1.0),
        functools.partial(int, base=2),
        functools.partial(int, base=3),
        Color.RED,
        Color.BLUE,
        torch.float32,
        "torch.float32",
        b"12",
        "12",
        12,
        torch.tensor([1.0]),
        torch.tensor([2.0]),
        torch.ops.aten.relu.default,
        math.inf,
    )
    keys = []
    for value in objects:
        model = Plain()
        model.held = value
        keys.append(key(model))
    assert len(set(keys)) == len(objects)
    sizes = Sizes(a=1)
    sizes.more = 1  # type: ignore[attr-defined]
    model = Plain()
    model.held = sizes
    assert key(model) not in keys
