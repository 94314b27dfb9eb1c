"""Programs for the remedies of calls of compiled modules, of backward, of optimizers and of
weights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import autopar
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.program import executor
from autopar.program.program import Microbatches
from autopar.runtime import dtensor_checkpoints, full_state, guards
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.module import ParallelModule
from tests.support import handwritten
from tests.support.handwritten import Toy, batch
from tests.support.remedy_programs import Net as ComputingNet
from tests.support.remedy_programs import Program

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Net(nn.Module):
    """Returns the mean square of a layer. With `also`, the mean of the layer is added to the loss
    or returned separately."""

    def __init__(self, also: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.also = nn.Linear(4, 4), also

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.layer(self.layer(x)))
        loss = y.square().mean()
        if self.also == "added":
            return {"loss": loss + y.mean()}
        return {"loss": loss, "mean": y.mean()} if self.also else loss


Work = Callable[[Any], object]


def compiled(model: nn.Module | None = None, *given: Tensor, **options: Any) -> Any:
    """Compile a model on one CPU, by default for a batch of [8, 4]."""
    model = Net() if model is None else model
    return autopar.compile(
        model, example_inputs=given or (X,), **{"hardware": "cpu-gloo", **options}
    )


def of_module(work: Work, *given: Any, **options: Any) -> Callable[[], object]:
    """Run `work` on a compiled module."""
    return lambda: work(compiled(*given, **options))


def _toy(
    work: Work,
    *,
    like: Callable[[Any], Any] = lambda program: program,
    model: Callable[[], nn.Module] = Toy,
    **options: Any,
) -> Callable[[], object]:
    """Run `work` on a module of the handwritten program, which has no programs for other calls."""

    def program() -> object:
        devices = device_mesh(Mesh({"data": 1, "tensor": 1}))
        return work(ParallelModule(like(handwritten.program(1, 1)), devices, model(), **options))

    return program


def _split_otherwise(program: Any) -> tuple[Any, ...]:
    """Return the inputs with another layout of the second one."""
    first, second = program.inputs
    return first, replace(second, layout=Layout.parse("R R"))


def _call_toy(
    change: Callable[[dict[str, Tensor]], Any] = lambda values: values,
) -> Callable[[], object]:
    def work(module: Any) -> object:
        values = change(batch())
        return module(values.pop("x"), **values)

    return _toy(work)


def _backward_twice(again: bool) -> Work:
    def work(module: Any) -> None:
        loss = module(X)
        loss.backward(retain_graph=True)
        (module(X) if again else loss).backward()

    return work


def _change_parameter(after: bool) -> Work:
    """Change the parameters between a call and its backward, or after backward."""

    def work(module: Any) -> None:
        loss = module(X)
        for change in (not after, after):
            if change:
                with torch.no_grad():
                    [p.mul_(0.5) for p in module.parameters()]
            else:
                loss.backward()

    return work


def _change_clone(module: Any) -> None:
    """Change a clone of an input in place."""
    loss = module(x := X.clone())
    x.clone().zero_()
    loss.backward()


def _inference(clone: bool) -> Work:
    def work(module: Any) -> object:
        with torch.inference_mode():
            x = X.clone()
        return module(x.clone() if clone else x)

    return work


def _call_with_dual(module: Any) -> object:
    with forward_ad.dual_level():
        return module(forward_ad.make_dual(X, torch.ones_like(X)))


def _graph(module: Any, create_graph: bool = True) -> object:
    return torch.autograd.grad(module(X), list(module.parameters()), create_graph=create_graph)


def _functional(values: Callable[[Any, Tensor], Any]) -> Work:
    """Call the module with other values in place of its parameters."""

    def work(module: Any) -> object:
        others = {name: values(module, p.detach()) for name, p in module.named_parameters()}
        return torch.func.functional_call(module, others, (X,))

    return work


def _call_with_gradients(*, inference: bool) -> Callable[[], object]:
    """Compile a model that reads the gradient mode, and call it with gradients."""

    def scale(net: nn.Module, x: Tensor) -> Tensor:
        return x * (2.0 if torch.is_grad_enabled() else 3.0)

    return lambda: compiled(ComputingNet(scale), inference=inference)(X)


def _call_under_default_dtype(dtype: torch.dtype) -> Callable[[], object]:
    """Compile a model, set the default dtype, and call the module."""

    def program() -> object:
        module, before = compiled(Net()), torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return module(X)
        finally:
            torch.set_default_dtype(before)

    return program


def _autocast(inside: bool) -> Callable[[], object]:
    def program() -> object:
        if not inside:
            module = compiled()
        with torch.autocast("cpu", torch.bfloat16):
            return (compiled() if inside else module)(X)

    return program


def _norm(clip: Callable[[Any], object]) -> Callable[[], object]:
    """Compute the norm of the gradients of one of several stages."""

    def work(module: Any) -> object:
        module(X).backward()
        mesh = module.layer.weight.device_mesh
        dtensor_checkpoints.of_one_stage(mesh)
        try:
            return clip(module)
        finally:
            dtensor_checkpoints._stages.discard(mesh)

    return of_module(work)


def _call_with_lengths(num: int, pad: bool) -> Callable[[], object]:
    """Call the module with batches of several lengths, or padded to one length."""

    def work(module: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guards, "MOST", 1)
            for length in range(1, num + 1):
                module(torch.ones(num if pad else length, 4))

    return lambda: work(compiled(None, torch.ones(num, 4)))


def _scale_loss(
    sets_scale: bool, changes: bool = False, noise: bool = False
) -> Callable[[], object]:
    """Multiply the loss by a factor that may not be set on the module."""

    class Noisy(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.dropout(self.layer(x), 0.5) if noise else self.layer(x)
            return x.square().mean() * 1e-7

    def program() -> None:
        module = compiled(Noisy(), num_microbatches=2)
        if sets_scale:
            module.loss_scale = 2.0**100
        loss = module(X) * 2.0**100
        if changes:
            with torch.no_grad():
                [p.mul_(0.5) for p in module.parameters()]
        loss.backward()

    return program


def _gather_strided(strided: bool, version: str = "2.11.0") -> Callable[[], object]:
    """Gather a tensor with a strided shard, with a given version of torch."""

    def work(module: Any) -> None:
        placement = _StridedShard(0, split_factor=2) if strided else Shard(0)
        x = DTensor.from_local(torch.zeros(4), module.device_mesh, [placement], run_check=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "__version__", TorchVersion(version))
            full_state._check_joined({"bias": x})

    return of_module(work)


def _cache(folder: str) -> Callable[[], object]:
    def program() -> None:
        with tempfile.TemporaryDirectory() as here, pytest.MonkeyPatch.context() as patch:
            Path(here, "file").touch()
            patch.setenv(executor._INDUCTOR_CACHE, os.path.join(here, folder))
            executor.use_private_cache()

    return program


def _unfreeze_and_call(module: Any) -> object:
    module.requires_grad_(True)
    return module(X)


def _as_function(module: Any) -> object:
    loss = module(X)
    return torch.autograd.grad(loss, list(module.parameters()))


PROGRAMS: dict[str, Program] = {
    "runtime/call_arguments.py Arguments._check_gradients 0": Program(
        of_module(_call_with_dual),
        "differentiate by backward",
        of_module(lambda module: module(X).backward()),
    ),
    "runtime/call_arguments.py Arguments._check_gradients 1": Program(
        _call_toy(lambda values: {**values, "x": values["x"].requires_grad_()}),
        "detach it",
        _call_toy(lambda values: {**values, "x": values["x"].requires_grad_().detach()}),
    ),
    "runtime/call_arguments.py Arguments._check_tensors 0": Program(
        _call_toy(lambda values: {**values, "target": None}),
        "with a batch of the same shapes and dtypes",
        _call_toy(),
    ),
    "runtime/call_arguments.py Arguments._check_tensors 1": Program(
        _call_toy(lambda values: {**values, "x": values["x"][:4]}),
        "with a batch of the same shapes and dtypes",
        _call_toy(),
    ),
    "runtime/call_arguments.py Arguments._check_tensors 2": Program(
        _call_toy(lambda values: {**values, "x": values["x"].to("meta")}),
        "move the batch to cpu",
        _call_toy(),
    ),
    "runtime/call_arguments.py _check_kind 0": Program(
        of_module(lambda module: module(DTensor.from_local(X, module.device_mesh, [Replicate()]))),
        "pass x.full_tensor()",
        of_module(
            lambda module: module(
                DTensor.from_local(X, module.device_mesh, [Replicate()]).full_tensor()
            )
        ),
    ),
    "runtime/call_arguments.py _check_kind 1": Program(
        of_module(lambda module: module(X.to_sparse())),
        "`a.to_dense()`",
        of_module(lambda module: module(X.to_sparse().to_dense())),
    ),
    "runtime/guarded_module.py Compiled._program_inputs 0": Program(
        of_module(lambda module: module(X.clone().requires_grad_()), inference=True),
        "call it under torch.no_grad",
        of_module(
            lambda module: torch.no_grad()(module)(X.clone().requires_grad_()), inference=True
        ),
    ),
    "runtime/guarded_module.py Compiled._check_call 0": Program(
        _toy(lambda module: module.eval()(batch()["x"], target=batch()["target"])),
        "compile the model once for each mode",
        _toy(lambda module: module.eval()(batch()["x"], target=batch()["target"]), both_modes=True),
    ),
    "runtime/guarded_module.py Compiled._check_call 1": Program(
        _call_with_gradients(inference=True),
        "without it for calls with gradients",
        _call_with_gradients(inference=False),
    ),
    "runtime/guarded_module.py Compiled._check_torch 0": Program(
        _autocast(False), "under the same torch.autocast", _autocast(True)
    ),
    "runtime/guarded_module.py Compiled._check_torch 1": Program(
        _call_under_default_dtype(torch.float64),
        "call torch.set_default_dtype(torch.float32)",
        _call_under_default_dtype(torch.float32),
    ),
    "runtime/guarded_module.py _thawed_error 0": Program(
        lambda: _unfreeze_and_call(compiled(Net().requires_grad_(False), num_microbatches=2)),
        "set requires_grad before autopar.compile",
        lambda: compiled(Net().requires_grad_(False).requires_grad_(True), num_microbatches=2)(
            X
        ).backward(),
    ),
    "runtime/guarded_module.py Compiled._ddp_params_and_buffers_to_ignore 0": Program(
        of_module(DistributedDataParallel),
        "use the compiled module directly",
        of_module(lambda module: module(X).backward()),
    ),
    "runtime/backward.py refuse_transforms 0": Program(
        of_module(lambda module: torch.func.grad(module)(X)),
        "torch.autograd.grad(pm(x), list(pm.parameters()))",
        of_module(_as_function),
    ),
    "runtime/backward.py refuse_tracing 0": Program(
        of_module(lambda module: torch.fx.symbolic_trace(module)),
        "trace the plain model",
        lambda: torch.jit.trace(Net(), X),
    ),
    "runtime/backward.py ran_twice 0": Program(
        of_module(_backward_twice(False)),
        "call the module again before each backward",
        of_module(_backward_twice(True)),
    ),
    "runtime/backward.py ran_twice 0 | microbatches": Program(
        of_module(_backward_twice(False), num_microbatches=2),
        "call the module again before each backward",
        of_module(_backward_twice(True), num_microbatches=2),
    ),
    "runtime/backward.py first_derivatives_only.refuse_create_graph 0": Program(
        of_module(_graph), "leave create_graph out", of_module(lambda module: _graph(module, False))
    ),
    "runtime/guarded_outputs.py _Refused.backward 0": Program(
        of_module(lambda module: sum(module(X).values()).backward(), Net("beside")),
        "return the sum as the loss",
        of_module(lambda module: module(X)["loss"].backward(), Net("added")),
    ),
    "runtime/guarded_outputs.py _Refused.backward 0 | detached": Program(
        of_module(lambda module: sum(module(X).values()).backward(), Net("beside")),
        "or detach this output",
        of_module(
            lambda module: (module(X)["loss"] + module(X)["mean"].detach()).backward(),
            Net("beside"),
        ),
    ),
    "runtime/tensor_guards.py WatchedTensors.check 0": Program(
        of_module(_change_parameter(False)),
        "run backward before optimizer.step()",
        of_module(_change_parameter(True)),
    ),
    "runtime/tensor_guards.py WatchedTensors.check 0 | clone": Program(
        of_module(lambda module: (loss := module(x := X.clone()), x.zero_(), loss.backward())),
        "change a clone of an input",
        of_module(_change_clone),
    ),
    "runtime/tensor_guards.py WatchedTensors.watch 0": Program(
        of_module(_inference(False)),
        "clone it outside torch.inference_mode",
        of_module(_inference(True)),
    ),
    "runtime/guards.py Variants.find 0": Program(
        _call_with_lengths(4, False), "pad batches to a few shapes", _call_with_lengths(4, True)
    ),
    "program/program.py Microbatches.split 0": Program(
        lambda: Microbatches(2, {"x": 0}, {}, "").split({"x": torch.ones(3)}),
        "of the planned size",
        lambda: Microbatches(2, {"x": 0}, {}, "").split({"x": torch.ones(4)}),
    ),
    "runtime/parameters.py Storage.local 0": Program(
        of_module(_functional(lambda module, p: p.double())),
        "convert the model before autopar.compile",
        lambda: compiled(Net().double(), X.double())(X.double()),
    ),
    "runtime/parameters.py Storage._replaced_error 0": Program(
        of_module(_functional(lambda module, p: torch.ones(3))),
        "compute it from p = pm.get_parameter('layer.weight')",
        of_module(_functional(lambda module, p: p * 2)),
    ),
    "runtime/parameter_module.py Holder._storage 0": Program(
        _toy(lambda module: module, model=lambda: Toy().double()),
        "build the model as it was when planned",
        _toy(lambda module: module),
    ),
    "runtime/module.py ParallelModule._no_sampler 0": Program(
        _toy(
            lambda module: module.sampler(range(8)),
            like=lambda program: replace(
                program, stages=(replace(program.stages[0], inputs=_split_otherwise(program)),)
            ),
            batch="local",
        ),
        'use batch="global"',
        _toy(lambda module: module(batch()["x"], target=batch()["target"]), batch="global"),
    ),
    "program/executor.py usable_backend 0": Program(
        _toy(lambda module: module, backend="fast"),
        'use "eager" or "inductor"',
        _toy(lambda module: module, backend="eager"),
    ),
    "program/executor.py use_private_cache 0": Program(
        _cache("file/cache"),
        f"choose another folder: {executor._INDUCTOR_CACHE}=FOLDER",
        _cache("cache"),
    ),
    "runtime/backward.py _refuse_no_norm 0": Program(
        of_module(lambda module: module.clip_grad_norm_(1.0, norm_type=-1.0)),
        "math.inf for the largest element",
        of_module(lambda module: module.clip_grad_norm_(1.0, norm_type=torch.inf)),
    ),
    "runtime/dtensor.py _refuse_one_stage 0": Program(
        _norm(lambda module: torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)),
        "pm.clip_grad_norm_(max_norm)",
        _norm(lambda module: module.clip_grad_norm_(1.0)),
    ),
    "runtime/dtensor.py _refuse_sum_of_stage 0": Program(
        _norm(lambda module: sum(p.square().sum() for p in module.parameters())),
        "compute the term in the model's forward",
        of_module(lambda module: module(X)["loss"].backward(), Net("added")),
    ),
    "runtime/loss_scaling.py LossScale.user_factor 0": Program(
        of_module(lambda module: setattr(module, "loss_scale", 0.0), num_microbatches=2),
        "set a positive number",
        of_module(lambda module: setattr(module, "loss_scale", 2.0), num_microbatches=2),
    ),
    "runtime/scheduled_calls.py ScaledStep._check_unchanged 0": Program(
        _scale_loss(False, changes=True),
        "set pm.loss_scale to the factor of the loss before the call",
        _scale_loss(True, changes=True),
    ),
    "runtime/scheduled_calls.py ScaledStep._check_unchanged 0 | order": Program(
        _scale_loss(False, changes=True),
        "run backward before anything changes the tensor",
        _scale_loss(False),
    ),
    "runtime/scheduled_calls.py ScaledStep._run_again 0": Program(
        _scale_loss(False, noise=True),
        "set pm.loss_scale = scaler.get_scale() before the first call",
        _scale_loss(True, noise=True),
    ),
    "runtime/gather_fallback.py read_whole 0": Program(
        of_module(lambda module: torch.tensor([p.detach().sum() for p in module.parameters()])),
        "use torch.stack([...])",
        of_module(lambda module: torch.stack([p.sum() for p in module.parameters()])),
    ),
    "runtime/gather_fallback.py read_whole 0 | numbers": Program(
        of_module(lambda module: torch.tensor([p.detach().sum() for p in module.parameters()])),
        "torch.tensor([float(x) for x in ...])",
        of_module(
            lambda module: torch.tensor([float(p.detach().sum()) for p in module.parameters()])
        ),
    ),
    "runtime/full_state.py _check_joined 0": Program(
        _gather_strided(True), "or use a newer torch", _gather_strided(True, "2.13.0")
    ),
}
