"""A compiled module has the submodules of the plain model with their names and classes. No
submodules can be added."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import OrderedDict
from functools import cached_property
from typing import Any

import pytest
import torch
import zoo_small
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, RuntimeStateError

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Named(nn.Module):
    """A model with attributes whose names compiled modules use internally, and with others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self._names, self.program, self._factor = 3, 5, 7

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()

    def of_private(self) -> int:
        return 2 * self._names

    def of_public(self) -> int:
        return 2 * self.program

    def of_others(self) -> int:
        return 2 * self._factor

    @property
    def by_property(self) -> int:
        return 2 * self._names

    @cached_property
    def by_cached_property(self) -> int:
        return 2 * self.program


def test_methods_that_read_a_name_used_by_compiled_modules_are_refused() -> None:
    module: Any = autopar.compile(Named(), example_inputs=X, hardware="cpu-gloo")
    assert module.of_others() == 14
    for name, method in (("_names", module.of_private), ("program", module.of_public)):
        with pytest.raises(RuntimeStateError, match=f"it reads '{name}', a name that compiled"):
            method()
    for name, property_name in (("_names", "by_property"), ("program", "by_cached_property")):
        with pytest.raises(RuntimeStateError, match=f"it reads '{name}', a name that compiled"):
            getattr(module, property_name)


class Own(nn.Linear):
    """A class with methods that a submodule of a compiled module must not run."""

    gain = 2.0

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.shown = "by the model"

    def reset_parameters(self) -> None:
        super().reset_parameters()

    def generate(self) -> Tensor:
        return self.weight * 2

    @property
    def device(self) -> Any:
        return self.weight.device

    @property
    def answer(self) -> Any:
        return self.generate()

    @property
    def size(self) -> float:
        return self.weight.norm().item()

    @cached_property
    def width(self) -> int:
        return self.weight.shape[1]

    def __len__(self) -> int:
        return 3

    def train(self, mode: bool = True) -> Own:
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Net(nn.Module):
    kind = "a net"

    def __init__(self) -> None:
        super().__init__()
        self.own, self.drop = Own(), nn.Dropout(0.0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.more = nn.ModuleDict(
            {"norm": nn.LayerNorm(4), "seq": nn.Sequential(nn.Linear(4, 4), nn.ReLU())}
        )
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.own(x)) - self.center
        for layer in self.layers:
            x = layer(x)
        return self.more["seq"](self.more["norm"](x)).pow(2).mean()

    def generate(self) -> int:
        return 1


def pair(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Net()
    return plain, autopar.compile(
        copy.deepcopy(plain), example_inputs=(X,), hardware="cpu-gloo", **options
    )


def test_submodules_have_the_classes_of_the_plain_submodules() -> None:
    plain, module = pair()
    for kind in (nn.Linear, Own, nn.LayerNorm, nn.ModuleList, nn.Sequential, nn.Dropout):
        wanted = [name for name, each in plain.named_modules() if isinstance(each, kind)]
        assert (
            wanted
            and [name for name, each in module.named_modules() if isinstance(each, kind)] == wanted
        )
    with torch.no_grad():
        module.apply(lambda each: each.weight.zero_() if isinstance(each, nn.Linear) else None)
    assert not module.own.weight.full_tensor().any() and module(X).item() != plain(X).item()
    assert repr(module).count(
        "Linear(in_features=4, out_features=4, bias=True)"
    ) == 3 and "Dropout(p=0.0" in repr(module)


def test_containers_can_be_indexed_and_iterated_but_not_changed() -> None:
    _, module = pair()
    assert (
        len(module.layers) == 2
        and module.layers[1] is list(module.layers)[-1]
        and module.layers[-1] is module.layers[1]
    )
    assert (
        list(module.more) == ["norm", "seq"]
        and "norm" in module.more
        and module.more["norm"] is module.more.norm
    )
    assert [*module.more.keys()] == [name for name, _ in module.more.items()] and len(
        module.more["seq"][:1]
    ) == 1
    assert module.layers[0].bias is not None and module.own.bias is None
    layers = module.layers
    for change in (
        lambda: layers.append(nn.Linear(4, 4)),
        lambda: module.more.update({}),
        lambda: layers.__setitem__(0, None),
    ):
        with pytest.raises(AutoparError):
            change()


def test_methods_of_the_model_run_on_the_distributed_parameters() -> None:
    plain, module = pair()
    assert module.generate() == 1 and module.own.generate().full_tensor().equal(
        plain.own.weight * 2
    )
    module.own.reset_parameters()
    assert not module.own.weight.full_tensor().equal(plain.own.weight)


def test_library_methods_that_a_compiled_module_does_not_have_raise_an_explanation() -> None:
    _, module = pair()
    for part, name in ((module.layers[0], "reset_parameters"), (module.layers, "append")):
        assert not hasattr(part, name)
        with pytest.raises(
            RuntimeStateError, match=f"does not have '{name}' of torch[\\s\\S]*full_state_dict"
        ):
            getattr(part, name)
    with pytest.raises(RuntimeStateError, match="gradients accumulate"), module.no_sync():
        pass
    with pytest.raises(RuntimeStateError, match="does not have __len__"):
        len(module.own)
    with pytest.raises(RuntimeStateError, match="cannot be called alone"):
        module.own(X)
    with pytest.raises(RuntimeStateError, match="mode of a part"):
        module.own.train()
    with pytest.raises(AttributeError, match="nothing") as raised:
        module.own.nothing  # noqa: B018
    assert not isinstance(raised.value, AutoparError)


def test_properties_of_the_model_are_read_from_the_distributed_parameters() -> None:
    plain, module = pair()
    assert module.own.device == plain.own.device == torch.device("cpu")
    assert module.own.width == plain.own.width == 4
    assert not hasattr(module.own, "answer") and not hasattr(module.own, "size")
    with pytest.raises(
        RuntimeStateError,
        match=r"property 'size' cannot be read on a compiled module: it computes with tensors",
    ):
        module.own.size  # noqa: B018
    with pytest.raises(RuntimeStateError, match="'size' cannot be set"):
        module.own.size = 1.0
    with pytest.raises(
        RuntimeStateError,
        match=r"property 'answer' cannot be read on a compiled module: it computes with tensors",
    ):
        module.own.answer  # noqa: B018


def test_a_compiled_transformers_model_has_device_dtype_and_config() -> None:
    model, batch = zoo_small.llama()
    module: Any = autopar.compile(model, example_inputs=batch, hardware="cpu-gloo")
    assert (module.device, module.dtype, module.config) == (model.device, model.dtype, model.config)
    assert module.model.device == torch.device("cpu")


def test_class_attributes_can_be_read_and_not_set() -> None:
    _, module = pair()
    assert module.kind == "a net" and module.own.gain == 2.0 and module.own.in_features == 4
    for part, name in ((module, "kind"), (module.own, "gain")):
        with pytest.raises(RuntimeStateError, match=f"'{name}' cannot be set"):
            setattr(part, name, 3.0)


@pytest.mark.parametrize("name", ["drop", "extra"])
def test_submodules_cannot_be_replaced_or_added(name: str) -> None:
    _, module = pair()
    before = module(X).item()
    for part in (module, module.own, module.more):
        with pytest.raises(
            RuntimeStateError,
            match=r"cannot be replaced or added[\s\S]*change the plain model, and compile it again",
        ):
            setattr(part, name, nn.Dropout(0.9))
        for add in (part.add_module, part.register_module):
            with pytest.raises(RuntimeStateError, match="takes no modules"):
                add(name, nn.Dropout(0.9))
    with pytest.raises(RuntimeStateError, match="'drop' cannot be removed"):
        del module.drop
    with pytest.raises(RuntimeStateError, match="cannot be replaced or added"):
        module.drop = None
    assert module(X).item() == before


def test_parameters_and_buffers_can_only_be_replaced_by_tensors_of_the_same_kind() -> None:
    _, module = pair()
    for part, name, value, says in (
        (
            module.own,
            "weight",
            nn.Parameter(torch.zeros(4, 4)),
            r"the program expects a DTensor \(4, 4\) torch\.float32",
        ),
        (module.own, "weight", None, "the program expects"),
        (
            module.own,
            "bias",
            nn.Parameter(torch.zeros(4)),
            "takes no parameters that the model did not have",
        ),
        (
            module,
            "extra",
            nn.Parameter(torch.zeros(4)),
            "takes no parameters that the model did not have",
        ),
        (module, "center", torch.zeros(2), r"the program expects a tensor \(4,\)"),
    ):
        with pytest.raises(RuntimeStateError, match=says):
            setattr(part, name, value)
    for register, value in (
        (module.register_parameter, nn.Parameter(torch.zeros(1))),
        (module.register_buffer, torch.zeros(1)),
    ):
        with pytest.raises(RuntimeStateError, match="takes no modules, parameters or buffers"):
            register("extra", value)
    before = module(X).item()
    module.center, module.own.weight = torch.ones(4), nn.Parameter(module.own.weight.detach() * 2)
    assert module(X).item() != before


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("kwargs", [False, True])
def test_a_deep_copy_gives_no_warning_and_trains_independently(num: int, kwargs: bool) -> None:
    plain, batch = Plain(), {"x": torch.randn(4, 4)}
    example: Any = batch if kwargs else (batch["x"],)
    module: Any = autopar.compile(
        plain, 1, example_inputs=example, hardware="cpu-gloo", num_microbatches=num
    )
    call = (lambda m: m(**batch)) if kwargs else (lambda m: m(batch["x"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(module)
    before = call(module).item()
    assert call(copied).item() == before
    call(copied).backward()
    with torch.no_grad():
        copied.net.weight.zero_()
    assert module.net.weight.grad is None and copied.net.weight.grad is not None
    assert call(module).item() == before != call(copied).item()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def test_a_deep_copy_is_complete_and_pickling_is_refused() -> None:
    _, module = pair()
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.own.weight.zero_()
    assert isinstance(copied.own, Own) and copied(X).item() != module(X).item()
    for save in (
        lambda: torch.save(module, io.BytesIO()),
        lambda: pickle.dumps(module),
        lambda: pickle.dumps(module.own),
    ):
        with pytest.raises(RuntimeStateError, match=r"cannot be pickled[\s\S]*save_weights"):
            save()


NAMES = (
    "sampler",
    "plan",
    "program",
    "variants",
    "stored",
    "shown",
    "takes",
    "resting",
    "stand_for",
    "same_names",
    "random_state",
    "manual_seed",
    "device_mesh",
    "input_layouts",
    "rank",
    "only_forward",
    "loss_scale",
    "world_mesh",
    "check_same",
    "check_values",
    "clip_grad_norm_",
    "hold_module",
    "_run",
    "_set",
    "_parameter",
    "_buffer",
    "_pending",
    "_storages",
    "_names",
    "_frozen",
    "_left",
    "_own",
    "_plain",
    "_program_calls",
    "_executor",
    "_container",
    "_world",
    "_unset",
    "full_state_dict",
    "_extra_states",
)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_submodules_with_any_name_train_and_are_saved_as_in_the_plain_model(
    microbatches: int,
) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in NAMES:
                setattr(self, name, nn.Sequential(OrderedDict({name: nn.Linear(4, 4)})))
            self.hold_buffer = nn.Parameter(torch.ones(4))
            self.register_buffer("hold_parameter", torch.ones(4))
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            for name in ("sampler", "stored", "_run"):
                x = x + torch.tanh(getattr(self, name)(x)) * self.hold_parameter * self.hold_buffer
            return self.drop(x).pow(2).mean()

    torch.manual_seed(0)
    plain: Any = Named().eval()
    module: Any = autopar.compile(
        copy.deepcopy(plain),
        example_inputs=(X,),
        hardware="cpu-gloo",
        num_microbatches=microbatches,
    )
    assert [name for name, _ in module.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert list(module.state_dict()) == list(plain.state_dict())
    for model in (plain, module):
        model(X).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    module.load_state_dict(copy.deepcopy(module).state_dict())
    assert module.get_parameter("_run._run.weight").grad is not None
    for name, wanted in plain.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).full_tensor(), wanted)
        assert "." not in name or isinstance(
            module.get_submodule(name.rpartition(".")[0]), nn.Linear
        )
    assert isinstance(module.plan, autopar.Plan) and callable(module.sampler)
    module.manual_seed(3)
    module.train()
    module(X)
    assert isinstance(module.random_state, int)
    module.random_state = 5
    assert module.random_state == 5


def test_a_compiled_module_under_torch_compile_runs_without_tracing() -> None:
    plain, module = pair()
    traced: list[Any] = []
    compiled: Any = torch.compile(
        module, backend=lambda graph, _: traced.append(graph) or graph.forward
    )
    for model in (plain, compiled):
        model(X).backward()
    torch.testing.assert_close(module.own.weight.grad.full_tensor(), plain.own.weight.grad)
    assert not traced


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
def test_converted_parameters_are_refused_for_inputs_of_any_dtype(
    convert: str, microbatches: int
) -> None:
    _, module = pair(**({"num_microbatches": 2} if microbatches > 1 else {}))
    others = {name: getattr(p.detach(), convert)() for name, p in module.named_parameters()}
    for x in (X, getattr(X, convert)()):
        with pytest.raises(
            RuntimeStateError,
            match=r"the program expects torch\.float32 on cpu[\s\S]*before autopar\.compile",
        ):
            torch.func.functional_call(module, others, (x,))
    with pytest.raises(
        RuntimeStateError,
        match=r"cannot become torch\.\w+ on cpu: the program was compiled for torch\.float32",
    ):
        getattr(module, convert)()


class Asking(nn.Module):
    """A model that delegates missing attributes to a submodule, as the models of peft do."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.other, self.part = nn.Linear(4, 4), part
        self._is_tuned, self._weights = True, [torch.ones(1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.other(x))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "part":
                raise
            return getattr(self.part, name)

    @property
    def how(self) -> str:
        return "tuned" if self._is_tuned else "plain"


class Asked(nn.Module):
    depth = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(4, 4), {"size": 4}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def generate(self) -> str:
        return "made"


def test_a_compiled_model_delegates_missing_attributes_as_the_plain_model_does() -> None:
    model: Any = Asking(Asking(Asked()))
    module: Any = autopar.compile(model, example_inputs=(torch.ones(2, 4),), hardware="cpu-gloo")
    assert (module.settings, module.depth, module.device, module.how) == (
        model.settings,
        3,
        torch.device("cpu"),
        "tuned",
    )
    assert module.layer is module.part.part.layer
    assert module.generate() == "made"
    for absent in ("nothing", "_is_tuned", "_weights", "of_one_part_alone"):
        assert not hasattr(module, absent), absent
    assert not hasattr(model, "of_one_part_alone")


def test_a_custom_getattr_that_raises_other_errors_is_not_called() -> None:
    class Odd(Asked):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("of"):
                raise KeyError(name)
            return super().__getattr__(name)

    module: Any = autopar.compile(Odd(), example_inputs=(torch.ones(2, 4),), hardware="cpu-gloo")
    assert module.depth == 3 and not hasattr(module, "weight")
