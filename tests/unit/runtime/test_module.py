"""A program as a module, on a mesh of one device, without a launcher."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from handwritten import Toy, batch, program, reference
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.core.mesh import Mesh
from autopar.errors import CallError, MeshError, RuntimeStateError
from autopar.program import executor
from autopar.program.abstract_executor import LiveBytes
from autopar.program.peak_memory import trace_peak
from autopar.program.program import Program
from autopar.runtime.device_mesh import device_mesh, mesh_of
from autopar.runtime.direct_calls import DirectCalls
from autopar.runtime.module import ParallelModule
from autopar.runtime.scheduled_calls import ScheduledCalls


@pytest.fixture(scope="module")
def devices() -> Iterator[DeviceMesh]:
    yield device_mesh(Mesh({"data": 1, "tensor": 1}))
    dist.destroy_process_group()


def build(devices: DeviceMesh, **options: Any) -> ParallelModule:
    return ParallelModule(program(1, 1), devices, Toy(), **options)


def call(model: torch.nn.Module, seed: int = 1) -> dict[str, Any]:
    values = batch(seed)
    result: dict[str, Any] = model(values["x"], target=values["target"])
    return result


def test_a_module_on_one_device_needs_no_launcher_and_matches_the_plain_model(
    devices: DeviceMesh,
) -> None:
    module, plain = build(devices), Toy()
    out = call(module)
    out["loss"].backward()
    outputs, gradients = reference(plain, dtype=torch.float32)
    torch.testing.assert_close(out["loss"].detach(), outputs["loss"].detach())
    torch.testing.assert_close(out["logits"], outputs["logits"].detach())
    torch.testing.assert_close(module.mean, plain.mean)
    for name, gradient in gradients.items():
        stored = module.get_parameter(name).grad
        assert isinstance(stored, DTensor)
        torch.testing.assert_close(stored.full_tensor(), gradient)


class Scores(torch.nn.Module):
    """A model that returns a loss and one output per sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.down(torch.tanh(self.up(x))).squeeze(-1)
        return {"loss": (scores - y).square().mean(), "scores": scores.detach()}


SAMPLES = {"x": torch.linspace(-1.0, 1.0, 64).reshape(8, 8), "y": torch.linspace(0.0, 1.0, 8)}


def test_a_schedule_with_one_stage_and_one_microbatch_equals_a_direct_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"hardware": "cpu-gloo", "outputs": "full"}
    direct = autopar.compile(Scores(), 1, example_inputs=SAMPLES, **options)
    assert isinstance(direct._program_calls, DirectCalls)
    monkeypatch.setattr(Program, "is_single", property(lambda _: False))
    scheduled = ParallelModule(direct.program, direct.device_mesh, Scores())
    assert isinstance(scheduled._program_calls, ScheduledCalls)
    ours, theirs = scheduled(**SAMPLES), direct(**SAMPLES)
    for name, output in theirs.items():
        assert torch.equal(ours[name], output)
    ours["loss"].backward()
    theirs["loss"].backward()
    for (name, p), (other, q) in zip(
        scheduled.named_parameters(), direct.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(p.grad.to_local(), q.grad.to_local())


@pytest.mark.parametrize("num", [1, 2])
def test_a_module_has_the_same_type_and_methods_for_every_plan(num: int) -> None:
    module = autopar.compile(
        Scores(),
        1,
        example_inputs=SAMPLES,
        hardware="cpu-gloo",
        outputs="loss",
        num_microbatches=num,
    )
    assert type(module) is ParallelModule and module.plan.num_microbatches == num
    assert [str(layout) for layout in module.input_layouts.values()] == ["R", "R"]
    assert sorted(module.sampler(range(8))) == list(range(8))
    module.loss_scale = 4.0
    (module(**SAMPLES)["loss"] * module.loss_scale).backward()
    plain = Scores()
    (plain(**SAMPLES)["loss"] * 4.0).backward()
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    norm = module.clip_grad_norm_(1e-3)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))


def test_gradients_of_two_calls_accumulate(devices: DeviceMesh) -> None:
    module, plain = build(devices), Toy()
    for seed in (1, 2):
        call(module, seed)["loss"].backward()
        call(plain, seed)["loss"].backward()
    torch.testing.assert_close(module.first.weight.grad.full_tensor(), plain.first.weight.grad)


def test_the_gradient_of_a_scaled_loss_is_scaled(devices: DeviceMesh) -> None:
    module, plain = build(devices), Toy()
    (3 * call(module)["loss"]).backward()
    (3 * call(plain)["loss"]).backward()
    torch.testing.assert_close(module.first.weight.grad.full_tensor(), plain.first.weight.grad)


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_through_one_call_is_refused(devices: DeviceMesh, retain: bool) -> None:
    loss = call(build(devices))["loss"]
    loss.backward(retain_graph=retain)
    with pytest.raises(RuntimeStateError, match="backward ran a second time for one call"):
        loss.backward()


def test_parameters_that_backward_reads_must_not_change_before_backward(
    devices: DeviceMesh,
) -> None:
    module = build(devices)
    loss = call(module)["loss"]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    with pytest.raises(
        RuntimeStateError, match="was changed in place after the call, and backward reads it"
    ):
        loss.backward()
    again = call(module)["loss"]
    again.backward()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step()
    call(module)["loss"].backward()  # after a step the call is valid


def test_a_call_without_backward_frees_its_saved_tensors(devices: DeviceMesh) -> None:
    module, values = build(devices), batch()
    with LiveBytes() as live:
        live.register([*module.parameters(), *module.buffers(), *values.values()])
        before = live.live_bytes
        out = module(values["x"], target=values["target"])
        assert live.live_bytes - before == trace_peak(program(1, 1).stages[0]).kept_bytes
        del out
        assert live.live_bytes == before


def test_under_no_grad_only_forward_runs_and_nothing_is_saved(devices: DeviceMesh) -> None:
    module, values = build(devices), batch()
    predicted = trace_peak(program(1, 1).stages[0], train=False)
    with LiveBytes() as live, torch.no_grad():
        live.register([*module.parameters(), *module.buffers(), *values.values()])
        before = live.live_bytes
        out = module(values["x"], target=values["target"])
        assert live.live_bytes - before == predicted.kept_bytes == 4 + 8 * 8 * 4
        assert live.peak_bytes == predicted.peak_bytes
    assert not out["loss"].requires_grad
    assert predicted.peak_bytes < trace_peak(program(1, 1).stages[0]).peak_bytes


def test_frozen_parameters_get_no_gradient(
    devices: DeviceMesh,
) -> None:
    module = build(devices)
    module.requires_grad_(False)
    assert not call(module)["loss"].requires_grad
    module.second.bias.requires_grad_(True)
    call(module)["loss"].backward()
    assert [name for name, p in module.named_parameters() if p.grad is not None] == ["second.bias"]


def test_unfreezing_a_parameter_that_was_planned_as_frozen_is_refused(devices: DeviceMesh) -> None:
    module = build(devices)
    module.scale.requires_grad_(True)
    with pytest.raises(RuntimeStateError, match="'scale' was frozen when the model was compiled"):
        call(module)


def test_names_values_and_state_dict_match_the_plain_model(devices: DeviceMesh) -> None:
    module, plain = build(devices), Toy()
    state = plain.state_dict()
    assert list(module.state_dict()) == list(state)
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert module.tied.weight is module.first.weight
    for name, value in module.state_dict().items():
        assert torch.equal(
            value.full_tensor() if isinstance(value, DTensor) else value, state[name]
        )
    assert not module.state_dict().keys() & {"offset"}


def test_loading_full_tensors_sets_the_values_and_names_size_mismatches(
    devices: DeviceMesh,
) -> None:
    module, plain = build(devices), Toy()
    state = {name: value + 1 for name, value in plain.state_dict().items()}
    module.load_state_dict(state)
    assert torch.equal(module.first.weight.full_tensor(), state["first.weight"])
    assert torch.equal(module.mean, state["mean"])
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        module.load_state_dict({**state, "first.weight": torch.ones(2, 2)})


def test_arguments_may_be_passed_by_position_or_by_name_in_any_order(devices: DeviceMesh) -> None:
    module, values = build(devices), batch()
    expected = call(module)["logits"]
    assert torch.equal(module(target=values["target"], x=values["x"])["logits"], expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: {"x": v["x"]}, r"forward\(\) is missing 'target'"),
        (lambda v: {**v, "more": v["x"]}, r"forward\(\) has no argument 'more'"),
        (
            lambda v: {**v, "x": v["x"][:4]},
            r"argument '0' is torch.float32 \(4, 8\), but the program expects torch.float32"
            r" \(8, 8\)",
        ),
        (lambda v: {**v, "x": v["x"].double()}, "argument '0' is torch.float64"),
        (lambda v: {**v, "target": None}, "argument 'target' is NoneType, not a tensor"),
        (
            lambda v: {**v, "x": v["x"].to("meta")},
            "argument '0' is on meta, but the mesh is on cpu",
        ),
    ],
)
def test_wrong_arguments_are_named(devices: DeviceMesh, change: Any, words: str) -> None:
    with pytest.raises((RuntimeStateError, CallError), match=words):
        build(devices)(**change(batch()))


def test_the_other_mode_is_refused_unless_the_graph_is_the_same_in_both_modes(
    devices: DeviceMesh,
) -> None:
    with pytest.raises(RuntimeStateError, match="the program was compiled in train mode"):
        call(build(devices).eval())
    assert call(build(devices, both_modes=True).eval())["loss"].isfinite()


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.double(),
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="meta"),
        lambda m: m.type(torch.float64),
        lambda m: next(iter(m.children())).half(),
        lambda m: m.apply(lambda part: part.double()),
    ],
)
def test_a_conversion_is_refused_and_changes_nothing(
    devices: DeviceMesh, convert: Callable[[Any], Any]
) -> None:
    module = build(devices)
    with pytest.raises(
        RuntimeStateError,
        match=r"' cannot become torch\.\w+ on \w+: the program was compiled for torch\.float32",
    ):
        convert(module)
    assert call(module)["loss"].isfinite()


def test_conversions_without_effect_are_allowed(devices: DeviceMesh) -> None:
    module = build(devices)
    held = list(module.parameters())
    before = call(module)["loss"]
    for same in (module.cpu(), module.float(), module.to("cpu", torch.float32), module.to(held[0])):
        assert same is module and all(
            a is b for a, b in zip(held, module.parameters(), strict=True)
        )
    assert torch.equal(call(module)["loss"], before)


def test_shared_memory_is_refused(devices: DeviceMesh) -> None:
    with pytest.raises(RuntimeStateError, match="cannot be put into shared memory"):
        build(devices).share_memory()


def test_a_parameter_replaced_by_one_with_another_dtype_is_refused(
    devices: DeviceMesh,
) -> None:
    module = build(devices)
    others = {name: p.detach().double() for name, p in module.named_parameters()}
    with pytest.raises(
        RuntimeStateError, match=r"is torch.float64 on cpu, but the program expects torch.float32"
    ):
        torch.func.functional_call(module, others, (), batch())


def test_a_model_that_is_not_the_planned_one_is_refused(devices: DeviceMesh) -> None:
    with pytest.raises(
        RuntimeStateError, match=r"is torch\.float64 \(\), but the program expects torch\.float32"
    ):
        ParallelModule(program(1, 1), devices, Toy().double())
    with pytest.raises(
        MeshError, match="compiled for mesh data=2,tensor=2, but the device mesh is data=1"
    ):
        ParallelModule(program(2, 2), devices, Toy())


def test_a_program_without_a_loss_runs_forward_only(devices: DeviceMesh) -> None:
    target = program(1, 1)
    (stage,) = target.stages
    outputs = tuple(replace(tensor, is_loss=False, has_gradient=False) for tensor in stage.outputs)
    parameters = tuple(replace(tensor, has_gradient=False) for tensor in stage.parameters)
    stage = replace(stage, outputs=outputs, parameters=parameters)
    assert not call(ParallelModule(replace(target, stages=(stage,)), devices, Toy()))[
        "loss"
    ].requires_grad


def test_without_a_compiler_inductor_falls_back_to_eager_with_a_warning(
    devices: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="none was found: running eagerly"):
        assert call(build(devices, backend="inductor"))["loss"].isfinite()
    with pytest.raises(RuntimeStateError, match="unknown backend 'fast'"):
        build(devices, backend="fast")


@pytest.mark.parametrize("named", [True, False])
def test_the_inductor_cache_is_private_to_the_user(
    tmp_path: Path, named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "named"))
    if not named:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    executor.use_private_cache()
    first = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert first.parent == tmp_path and first.stat().st_mode & 0o777 == 0o700 and not caplog.records
    first.chmod(0o777)
    executor.use_private_cache()
    assert (
        os.environ["TORCHINDUCTOR_CACHE_DIR"] != str(first)
        and "TORCHINDUCTOR_CACHE_DIR=FOLDER" in caplog.text
    )


def test_a_mesh_round_trips_through_a_device_mesh(devices: DeviceMesh) -> None:
    assert mesh_of(devices) == Mesh({"data": 1, "tensor": 1})


@pytest.mark.slow
def test_a_module_with_inductor_matches_the_plain_model(devices: DeviceMesh) -> None:
    module = build(devices, backend="inductor")
    out = call(module)
    out["loss"].backward()
    outputs, gradients = reference(Toy(), dtype=torch.float32)
    torch.testing.assert_close(out["loss"].detach(), outputs["loss"].detach())
    for name, gradient in gradients.items():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), gradient)
