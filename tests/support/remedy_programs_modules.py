"""Programs for the remedies of operations on a compiled module, its submodules, and the plain
model."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar.runtime.dtensor_checkpoints import reduce_whole
from autopar.runtime.guarded_outputs import refuse_reads
from tests.support.remedy_programs import Program

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Part(nn.Linear):
    """A layer with a length, a property with a computation, and a method that calls a non-tensor
    attribute."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.helper = lambda: 3

    @property
    def size(self) -> float:
        return self.weight.norm().item()

    def __len__(self) -> int:
        return 3

    def helped(self) -> int:
        return int(self.helper())


class Net(nn.Module):
    """A model that reads an attribute, a buffer and a plain tensor, with an extra state that is not
    a tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.drop, self.factor = Part(), nn.Dropout(0.0), 2.0
        self.beside, self.version = torch.ones(4), 1
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.body(x)) * self.factor * self.scale * self.beside
        return y.square().mean()

    def get_extra_state(self) -> Any:
        return {"version": self.version}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]


class Counting(nn.Module):
    """A model that runs its layer as often as a buffer or an argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("times", torch.tensor(1))

    def forward(self, x: Tensor, times: Tensor | None = None) -> Tensor:
        for _ in range(int(self.times) if times is None else len(times)):
            x = self.layer(x)
        return x.square().mean()


class Asking(nn.Module):
    """A model that calls a function of its own and looks for an attribute that it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.compute = nn.Linear(4, 4), torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return (self.compute(self.layer(x)) * getattr(self, "gain", 1.0)).square().mean()


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).square().mean()


class Given(nn.Module):
    """A model with an argument that is an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, given: torch.Generator) -> Tensor:
        return self.layer(x).square().mean()


Work = Callable[[Any, Any], object]


def compiled(plain: nn.Module, *batch: Any, **options: Any) -> Any:
    """Compile a model on one CPU, by default for a batch of [8, 4]."""
    return autopar.compile(plain, example_inputs=batch or (X,), hardware="cpu-gloo", **options)


def _pair(work: Work, kind: Callable[[], nn.Module] = Net) -> Callable[[], object]:
    """Run `work` on a plain model and its compiled module."""

    def program() -> object:
        plain = kind()
        return work(plain, compiled(plain))

    return program


def _call_after(*changes: Work, kind: Callable[[], nn.Module] = Net) -> Callable[[], object]:
    """Call the compiled module after some changes."""

    def work(plain: Any, module: Any) -> object:
        for change in changes:
            change(plain, module)
        return module(X)

    return _pair(work, kind)


def _before(
    change: Callable[[Any], object], work: Work = lambda plain, module: module(X)
) -> Callable[[], object]:
    """Change the plain model before it is compiled."""

    def kind() -> nn.Module:
        net = Net()
        change(net)
        return net

    return _pair(work, kind)


def on_a_copy(plain: nn.Module, module: Any) -> Any:
    """Return a plain copy with the trained values."""
    model = copy.deepcopy(plain)
    model.load_state_dict(module.full_state_dict(), assign=True)
    return model


def _with_copy(work: Callable[[Any], object]) -> Callable[[], object]:
    return _pair(lambda plain, module: work(on_a_copy(plain, module)))


@contextmanager
def two_ranks() -> Iterator[None]:
    """Run as the first of two ranks, with collectives that do nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _output(work: Callable[[Any], object]) -> Callable[[], object]:
    """Run `work` on an output that is sharded over two ranks."""

    def program() -> object:
        with two_ranks():
            mesh = init_device_mesh("cpu", (2,))
            return work(
                refuse_reads(
                    DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)], run_check=False)
                )
            )

    return program


def _set(name: str, value: Any) -> Callable[[Any], None]:
    def change(of: Any) -> None:
        if (
            isinstance(value, Tensor)
            and not isinstance(value, nn.Parameter)
            and isinstance(of, Net)
        ):
            vars(of).pop(name, None)
            of.register_buffer(name, value)
        else:
            setattr(of, name, value)

    return change


def _written(p: Any) -> None:
    with torch.no_grad():
        p.copy_(torch.ones(p.shape))


def _saved(plain: Any, module: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        autopar.save_weights(module, folder)
        fresh = Net()
        autopar.load_weights(compiled(fresh), folder)
    torch.save(module.full_state_dict(), io.BytesIO())


def _larger(plain: Any) -> object:
    plain.body.weight, plain.body.bias = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(8))
    plain.beside = torch.ones(8)
    return compiled(plain)(X)


def _copied(module: Any) -> nn.Parameter:
    return nn.Parameter(module.last.weight.detach().clone())


def _on_meta() -> dict[str, Tensor]:
    return {"body.weight": torch.ones(4, 4, device="meta")}


def _assign_tied(module: Any, last: float) -> None:
    """Assign ones to the first name of a tied tensor, and another number to its other name."""
    state = {"first.weight": torch.ones(4, 4), "last.weight": torch.full((4, 4), last)}
    module.load_state_dict(state, assign=True, strict=False)


def _untied() -> object:
    plain = Tied()
    plain.last.weight = nn.Parameter(plain.first.weight.detach().clone())
    module = compiled(plain)
    module.last.weight = _copied(module)
    return module(X)


def _double(plain: Any) -> object:
    double = copy.deepcopy(plain).double()
    double.beside = double.beside.double()
    return compiled(double, X.double())(X.double())


def _hook(plain: Any, module: Any) -> Any:
    return plain.body.register_forward_hook(lambda *_: None)


def _with_hook_removed(plain: Any, module: Any) -> object:
    _hook(plain, module).remove()
    return module(X)


def _partly_frozen() -> nn.Module:
    net = Net()
    net.body.weight.requires_grad_(False)
    return net


def _with_drop_set_back(plain: Any) -> None:
    own, plain.drop = plain.drop, nn.Dropout(0.5)
    plain.drop = own


def _change_count(change: bool, again: bool = False) -> Callable[[], object]:
    """Change a buffer that determines how often a layer runs."""

    def work(plain: Any, module: Any) -> object:
        if change:
            module.times.fill_(2)
        if again:
            plain.times.fill_(2)
            return compiled(plain)(X)
        return module(X)

    return _pair(work, Counting)


def _state(change: bool) -> Work:
    def work(plain: Any, module: Any) -> object:
        other = Net()
        other.version = 2
        if not change:
            plain.load_state_dict(other.state_dict())
            return compiled(plain)(X)
        return module.load_state_dict(other.state_dict())

    return work


STANDING: dict[str, Program] = {
    "runtime/module_shell.py ModuleShell.__getattr__ 0": Program(
        _pair(lambda plain, module: module.no_sync()), "leave it out", _call_after()
    ),
    "runtime/module_shell.py ModuleShell._read_property 0": Program(
        _pair(lambda plain, module: module.body.size),
        "plain.load_state_dict(pm.full_state_dict(), assign=True)",
        _with_copy(lambda plain: plain.body.size),
    ),
    "runtime/module_shell.py ModuleShell._refuse_value 0": Program(
        _pair(lambda plain, module: setattr(module, "factor", 3.0)),
        "register_buffer('factor', torch.tensor(...))",
        _before(
            _set("factor", torch.tensor(2.0)),
            lambda plain, module: (module.factor.fill_(3.0), module(X)),
        ),
    ),
    "runtime/module_shell.py ModuleShell._refuse_value 0 | copy": Program(
        _pair(lambda plain, module: setattr(module, "factor", 3.0)),
        "and compile that copy",
        _with_copy(lambda plain: (setattr(plain, "factor", 3.0), compiled(plain)(X))),
    ),
    "runtime/module_shell.py ModuleShell._refuse_value 1": Program(
        _pair(lambda plain, module: setattr(module.drop, "p", 0.5)),
        "and compile that copy",
        _with_copy(lambda plain: (setattr(plain.drop, "p", 0.5), compiled(plain)(X))),
    ),
    "runtime/module_shell.py ModuleShell._check_held 0": Program(
        _pair(lambda plain, module: setattr(module.last, "weight", _copied(module)), Tied),
        "write into it under torch.no_grad()",
        _pair(lambda plain, module: (_written(module.last.weight), module(X)), Tied),
    ),
    "runtime/parameter_module.py Holder.check_ties 0": Program(
        _call_after(
            lambda plain, module: module.last._parameters.update(weight=_copied(module)), kind=Tied
        ),
        "or untie the tensors of the plain model, and compile it again",
        _untied,
    ),
    "runtime/call_arguments.py Arguments._check_settings 1": Program(
        lambda: compiled(Given(), X, torch.Generator())(X, torch.Generator()),
        "pass the same object in every call",
        lambda: (given := torch.Generator()) and compiled(Given(), X, given)(X, given),
    ),
    "runtime/module_shell.py ModuleShell._check_held 1": Program(
        _pair(lambda plain, module: setattr(module.body, "weight", nn.Parameter(torch.ones(8, 4)))),
        "and compile that",
        _with_copy(_larger),
    ),
    "runtime/module_shell.py ModuleShell._check_held 2": Program(
        _pair(lambda plain, module: setattr(module.body, "weight", nn.Parameter(torch.ones(4, 4)))),
        "write into 'weight' under torch.no_grad(): p.copy_(...)",
        _call_after(lambda plain, module: _written(module.body.weight)),
    ),
    "runtime/module_shell.py ModuleShell._check_held 2 | whole": Program(
        _pair(lambda plain, module: setattr(module.body, "weight", nn.Parameter(torch.ones(4, 4)))),
        "pass full tensors to pm.load_state_dict",
        _call_after(
            lambda plain, module: module.load_state_dict(
                {"body.weight": torch.ones(4, 4)}, strict=False
            )
        ),
    ),
    "runtime/module_shell.py ModuleShell._apply 0": Program(
        _pair(lambda plain, module: module.double()),
        "convert or move the plain model and its batch",
        lambda: _double(Net()),
    ),
    "runtime/module_shell.py ModuleShell._apply 1": Program(
        _pair(lambda plain, module: module.share_memory()),
        "remove the call to share_memory",
        _call_after(),
    ),
    "runtime/module_shell.py ModuleShell.__reduce_ex__ 0": Program(
        _pair(lambda plain, module: pickle.dumps(module)),
        "autopar.save_weights(pm, folder)",
        _pair(_saved),
    ),
    "runtime/module_shell.py Part.forward 0": Program(
        _pair(lambda plain, module: module.body(X)),
        "or call the part on a plain copy",
        _with_copy(lambda plain: plain.body(X)),
    ),
    "runtime/module_shell.py Part.forward 0 | compiled": Program(
        _pair(lambda plain, module: module.body(X)),
        "or compile this part",
        lambda: compiled(Net().body)(X),
    ),
    "runtime/module_shell.py Part.train 0": Program(
        _pair(lambda plain, module: module.drop.eval()),
        "set it on the plain model before autopar.compile",
        _before(lambda net: net.drop.eval()),
    ),
    "runtime/module_shell.py Part.train 0 | whole": Program(
        _pair(lambda plain, module: module.drop.eval()),
        "or call pm.train() or pm.eval()",
        _call_after(lambda plain, module: module.eval()),
    ),
    "runtime/module_shell.py Part.register_forward_hook 0": Program(
        _pair(lambda plain, module: module.body.register_forward_hook(lambda *_: None)),
        "a forward hook registered on the plain model before autopar.compile",
        _before(lambda net: net.body.register_forward_hook(lambda of, args, out: out * 2)),
    ),
    "runtime/module_shell.py _of_another_model 0": Program(
        _pair(lambda plain, module: setattr(module, "drop", nn.Dropout(0.5))),
        "change the plain model, and compile it again",
        _before(lambda net: setattr(net, "drop", nn.Dropout(0.5))),
    ),
    "runtime/methods.py method_of 0": Program(
        _pair(lambda plain, module: module.body.reset_parameters()),
        "on a plain copy",
        _with_copy(lambda plain: plain.body.reset_parameters()),
    ),
    "runtime/methods.py _refuse 0": Program(
        _pair(lambda plain, module: module.body.helped()),
        "on a plain copy",
        _with_copy(lambda plain: plain.body.helped()),
    ),
    "runtime/part_classes.py _refuse_operator.refuse 0": Program(
        _pair(lambda plain, module: len(module.body)),
        "use the operator of the plain model's module",
        _pair(lambda plain, module: len(plain.body)),
    ),
    "runtime/guarded_outputs.py _in_part 0": Program(
        _output(lambda out: out.mean().item()),
        "out.full_tensor()",
        _output(lambda out: out.full_tensor().mean().item()),
    ),
    "runtime/guarded_outputs.py _in_part 0 | beside a plain tensor": Program(
        _output(lambda out: out - torch.ones(8, 4)),
        "out.full_tensor()",
        _output(lambda out: out.full_tensor() - torch.ones(8, 4)),
    ),
    "runtime/guarded_outputs.py _in_part 0 | whole": Program(
        _output(lambda out: out.mean().item()),
        'pass outputs="full" to autopar.compile',
        lambda: compiled(nn.Linear(4, 4), outputs="full")(X).mean().item(),
    ),
    "runtime/dtensor_checkpoints.py refuse_parts 0": Program(
        _output(lambda out: reduce_whole(out, 4)),
        "state = pm.full_state_dict()",
        _pair(lambda plain, module: torch.save(module.full_state_dict(), io.BytesIO())),
    ),
    "runtime/parameter_module.py holder_of 0": Program(
        lambda: autopar.save_weights(Net(), tempfile.gettempdir()),
        "the result of autopar.compile(model, example_inputs=batch)",
        _pair(_saved),
    ),
    "runtime/parameter_module.py _as_stored 0": Program(
        _pair(lambda plain, module: module.load_state_dict(_on_meta(), strict=False)),
        "leave it out and pass strict=False",
        _pair(lambda plain, module: module.load_state_dict({}, strict=False)),
    ),
    "runtime/parameter_module.py _check_equal_ties 0": Program(
        _pair(lambda plain, module: _assign_tied(module, 0.0), Tied),
        "pass equal values",
        _pair(lambda plain, module: _assign_tied(module, 1.0), Tied),
    ),
    "runtime/parameter_module.py _check_equal_ties 0 | untied": Program(
        _pair(lambda plain, module: _assign_tied(module, 0.0), Tied),
        "or untie the tensors of the plain model, and compile it again",
        _untied,
    ),
    "runtime/parameter_module.py _load_state_dict_hook 0": Program(
        _pair(_state(True)),
        "load it into the plain model, and compile the model again",
        _pair(_state(False)),
    ),
}

PLAIN: dict[str, Program] = {
    "runtime/plain_model.py PlainModel.check 0": Program(
        _call_after(lambda plain, module: plain.body.weight.register_hook(lambda grad: grad)),
        "register it on pm.get_parameter('body.weight')",
        _call_after(
            lambda plain, module: module.get_parameter("body.weight").register_hook(
                lambda grad: grad
            )
        ),
    ),
    "runtime/plain_model.py PlainModel._check_mode 0": Program(
        _call_after(lambda plain, module: plain.eval()),
        "call pm.eval()",
        _call_after(lambda plain, module: plain.eval(), lambda plain, module: module.eval()),
    ),
    "runtime/plain_model.py PlainModel._check_mode 0 | part": Program(
        _call_after(lambda plain, module: plain.drop.eval()),
        "set it back",
        _call_after(
            lambda plain, module: plain.drop.eval(), lambda plain, module: plain.drop.train()
        ),
    ),
    "runtime/plain_model.py PlainModel._check_hooks 0": Program(
        _call_after(_hook), "remove it", _pair(_with_hook_removed)
    ),
    "runtime/plain_model.py PlainModel._check_hooks 0 | before": Program(
        _call_after(_hook),
        "or register it before compiling",
        _before(lambda net: _hook(net, None)),
    ),
    "runtime/plain_model.py PlainModel._check_frozen 0": Program(
        _call_after(lambda plain, module: plain.body.weight.requires_grad_(False)),
        "pm.get_parameter('body.weight').requires_grad_(False)",
        _call_after(
            lambda plain, module: plain.body.weight.requires_grad_(False),
            lambda plain, module: module.get_parameter("body.weight").requires_grad_(False),
        ),
    ),
    "runtime/plain_model.py PlainModel._check_frozen 0 | unfrozen": Program(
        _call_after(
            lambda plain, module: plain.body.weight.requires_grad_(True), kind=_partly_frozen
        ),
        "pm.get_parameter('body.weight').requires_grad_(True)",
        _call_after(
            lambda plain, module: plain.body.weight.requires_grad_(True),
            lambda plain, module: module.get_parameter("body.weight").requires_grad_(True),
            kind=_partly_frozen,
        ),
    ),
    "runtime/plain_model.py PlainModel._report_written 0": Program(
        _call_after(
            lambda plain, module: plain.load_state_dict(
                {"body.weight": torch.ones(4, 4)}, strict=False
            )
        ),
        "call load_state_dict of the compiled module",
        _call_after(
            lambda plain, module: module.load_state_dict(
                {"body.weight": torch.ones(4, 4)}, strict=False
            )
        ),
    ),
    "runtime/plain_model.py PlainModel._report_written 0 | before": Program(
        _call_after(lambda plain, module: _written(plain.body.weight)),
        "or load the weights before compiling",
        _before(lambda net: net.load_state_dict({"body.weight": torch.ones(4, 4)}, strict=False)),
    ),
    "runtime/guards.py Forwards.check 0": Program(
        _call_after(lambda plain, module: setattr(plain.body, "forward", lambda x: x)),
        "set it back",
        _call_after(
            lambda plain, module: setattr(plain.body, "forward", lambda x: x),
            lambda plain, module: delattr(plain.body, "forward"),
        ),
    ),
    "runtime/guards.py Forwards._check_submodules 0": Program(
        _call_after(lambda plain, module: setattr(plain, "drop", nn.Dropout(0.5))),
        "set it back",
        _call_after(lambda plain, module: _with_drop_set_back(plain)),
    ),
    "runtime/guards.py FrozenConstants._check_own_attribute 0": Program(
        _call_after(lambda plain, module: setattr(module, "gain", 2.0), kind=Asking),
        "set it on the plain model, and compile that model",
        _pair(lambda plain, module: (setattr(plain, "gain", 2.0), compiled(plain)(X)), Asking),
    ),
    "runtime/guards.py _changed_error 0": Program(
        _call_after(lambda plain, module: setattr(plain, "compute", torch.tanh), kind=Asking),
        "set it back",
        _call_after(
            lambda plain, module: setattr(plain, "compute", torch.tanh),
            lambda plain, module: setattr(plain, "compute", torch.relu),
            kind=Asking,
        ),
    ),
    "runtime/guards.py _changed_error 1": Program(
        _call_after(lambda plain, module: setattr(plain, "gain", 2.0), kind=Asking),
        "restore it",
        _call_after(
            lambda plain, module: setattr(plain, "gain", 2.0),
            lambda plain, module: delattr(plain, "gain"),
            kind=Asking,
        ),
    ),
    "runtime/guards.py _changed_error 2": Program(
        _call_after(lambda plain, module: plain.beside.add_(1.0)),
        "let forward read it from a buffer (register_buffer)",
        _before(
            _set("beside", torch.ones(4)),
            lambda plain, module: (module.beside.add_(1.0), module(X)),
        ),
    ),
    "runtime/guards.py _changed_error 3 | again": Program(
        _call_after(lambda plain, module: setattr(plain, "factor", 3.0)),
        "for the new value, compile the model again",
        _pair(lambda plain, module: (setattr(plain, "factor", 3.0), compiled(plain)(X))),
    ),
    "runtime/guards.py _changed_error 3": Program(
        _call_after(lambda plain, module: setattr(plain, "factor", 3.0)),
        "set it back to 2.0",
        _call_after(
            lambda plain, module: setattr(plain, "factor", 3.0),
            lambda plain, module: setattr(plain, "factor", 2.0),
        ),
    ),
    "runtime/guards.py KnownBuffers.check 0": Program(
        _change_count(True),
        "compile the model again with these values",
        _change_count(False, again=True),
    ),
    "runtime/dtensor.py _refuse_other_data 0": Program(
        _call_after(lambda plain, module: setattr(module.body.weight, "data", torch.ones(4, 4))),
        "p.copy_(value)",
        _call_after(lambda plain, module: _written(module.body.weight)),
    ),
}

PROGRAMS: dict[str, Program] = {**STANDING, **PLAIN}
