"""`autopar.compile` with world size 1 in this process, without a launcher."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo_small
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from autopar.api import as_mesh, check, compile, plan, verify
from autopar.api.tracing import batch_size
from autopar.constraints import ddp
from autopar.core.mesh import Mesh, read_mesh
from autopar.errors import (
    AutoparError,
    CaptureError,
    ConstraintError,
    MeshError,
    PlanError,
    RuntimeStateError,
)
from autopar.plans import Plan


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Squares(nn.Linear):
    """A linear layer that returns its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).pow(2).mean()


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (
            lambda model, x: compile(model, 1, example_inputs=x),
            "already compiled by autopar: ParallelModule",
        ),
        (lambda model, x: compile(model, 1), "already compiled by autopar: Deferred"),
        (
            lambda model, x: torch.compile(model, backend="eager"),
            "the result of torch.compile: OptimizedModule",
        ),
        (
            lambda model, x: nn.DataParallel(model),
            "already wrapped by torch for parallelism: DataParallel",
        ),
        (
            lambda model, x: nn.parallel.DistributedDataParallel(model),
            "already wrapped by torch for parallelism: DistributedDataParallel",
        ),
        (lambda model, x: fully_shard(model), "already sharded by torch: FSDPSquares"),
    ],
    ids=[
        "compile",
        "compile at the first call",
        "torch.compile",
        "DataParallel",
        "DDP",
        "fully_shard",
    ],
)
def test_a_model_that_is_already_parallel_or_compiled_is_refused(wrap: Any, says: str) -> None:
    x = torch.randn(4, 6)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = wrap(Squares(6, 6), x)
    with pytest.raises(CaptureError, match=says) as refusal:
        plan(wrapped, 2, example_inputs=x)
    assert "pass the plain module" in refusal.value.remedy
    with pytest.raises(AutoparError, match=says):
        compile(wrapped, 1, example_inputs=x)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "vit"])
def test_a_compiled_model_trains_as_the_plain_model(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = getattr(zoo_small, kind)()
    plain = copy.deepcopy(model)
    pm = compile(model, 1, example_inputs=batch)
    assert {n: tuple(p.shape) for n, p in pm.named_parameters()} == {
        n: tuple(p.shape) for n, p in plain.named_parameters()
    }
    ours, theirs = (
        torch.optim.AdamW(pm.parameters(), lr=1e-3),
        torch.optim.AdamW(plain.parameters(), lr=1e-3),
    )
    for _ in range(3):
        result, expected = pm(**batch), plain(**batch)
        assert type(result) is type(expected)
        assert result.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
        torch.testing.assert_close(
            result.logits.full_tensor(), expected.logits.detach(), rtol=1e-4, atol=1e-4
        )
        result.loss.backward()
        expected.loss.backward()
        assert float(pm.clip_grad_norm_(1.0)) == pytest.approx(
            float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)), rel=1e-4
        )
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


def test_without_example_inputs_planning_happens_at_the_first_call_and_errors_say_so() -> None:
    model, batch = zoo_small.gpt2()
    pm = compile(model, 1)
    for ask in (
        lambda: list(pm.parameters()),
        pm.state_dict,
        lambda: pm.clip_grad_norm_(1.0),
        lambda: pm.input_layouts,
    ):
        with pytest.raises(RuntimeStateError, match="call the model once first"):
            ask()
    loss = pm(**batch).loss
    assert all(isinstance(p, DTensor) for p in pm.parameters())
    assert "transformer.wte.weight" in dict(pm.named_parameters())
    loss.backward()


@pytest.mark.slow
def test_a_saved_plan_is_used_and_a_plan_for_another_model_is_refused_with_the_difference(
    tmp_path: Path,
) -> None:
    model, batch = zoo_small.llama()
    made = plan(model, 1, example_inputs=batch, hardware="cpu-gloo")
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    pm = compile(model, 1, example_inputs=batch, plan=tmp_path / "plan.json")
    assert pm.plan == made
    deeper, batch = zoo_small.llama(num_layers=3)
    with pytest.raises(
        PlanError, match=r"parameters in the model, not in the plan: model\.layers\.2\.\S+"
    ):
        compile(deeper, 1, example_inputs=batch, plan=made)
    with pytest.raises(PlanError, match="mesh: the plan is for"):
        compile(model, 1, example_inputs=batch, plan=replace(made, mesh=Mesh({"a": 2})))


@pytest.mark.slow
def test_planning_works_on_meta_tensors_and_does_not_change_the_model() -> None:
    real, batch = zoo_small.llama()
    state = {n: t.clone() for n, t in real.state_dict().items()}
    on_meta = copy.deepcopy(real).to("meta")
    here = plan(real, 4, example_inputs=batch, hardware="h100-sxm")
    there = plan(
        on_meta, 4, example_inputs={k: v.to("meta") for k, v in batch.items()}, hardware="h100-sxm"
    )
    assert here.dumps() == there.dumps()
    assert all(torch.equal(t, state[n]) for n, t in real.state_dict().items())
    assert not dist.is_initialized()


def test_a_mesh_argument_is_a_mesh_a_count_nodes_and_devices_or_named_axes() -> None:
    assert as_mesh(4) == Mesh(4)
    assert as_mesh({"a": 2, "b": 2}) == Mesh({"a": 2, "b": 2})
    assert as_mesh("a=2,b=2") == Mesh({"a": 2, "b": 2})
    assert as_mesh((4, 2)) == Mesh({"node": 4, "gpu": 2})
    for wrong in ("4x2", (4,), (4, 2, 2), (4.0, 2), (True, 2), True):
        with pytest.raises(MeshError, match="is not a mesh"):
            as_mesh(wrong)  # type: ignore[arg-type]


def test_mesh_text_is_read_as_a_count_nodes_and_devices_or_named_axes() -> None:
    assert [read_mesh(text) for text in ("8", "4x8", "node=4,gpu=8")] == [
        8,
        (4, 8),
        Mesh({"node": 4, "gpu": 8}),
    ]
    with pytest.raises(MeshError, match="cannot read mesh"):
        read_mesh("4x8x2")


def test_a_deferred_module_shows_the_settings_of_the_plain_model_before_the_first_call() -> None:
    model, batch = zoo_small.gpt2()
    waiting = compile(model, 1)
    assert (waiting.config, waiting.device, waiting.dtype) == (
        model.config,
        model.device,
        model.dtype,
    )
    for name in ("transformer", "generate", "plan"):
        assert not hasattr(waiting, name)
        with pytest.raises(
            RuntimeStateError, match=f"{name} is not available before the first call"
        ):
            getattr(waiting, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        waiting.nothing  # noqa: B018
    waiting(**batch)
    assert waiting.device == model.device and waiting.transformer is not None


def test_changes_to_a_deferred_module_before_the_first_call_are_refused_or_applied() -> None:
    x = torch.randn(4, 8)
    waiting = compile(Squared(nn.Linear(8, 8)), 1)
    done: list[Callable[[], object]] = [
        waiting.half,
        lambda: waiting.to(torch.float64),
        lambda: waiting.apply(lambda m: None),
        lambda: dict(waiting.named_modules()),
        lambda: list(waiting.children()),
        lambda: setattr(waiting, "net", nn.Linear(8, 8)),
        lambda: setattr(waiting, "scale", 2.0),
    ]
    for do in done:
        with pytest.raises(RuntimeStateError, match="before the first call"):
            do()
    assert waiting.eval().training is False and waiting.train().training
    waiting(x)
    assert [name for name, _ in waiting.named_modules()] == ["", "net"] and "net" in dir(waiting)
    with torch.no_grad():
        waiting.apply(lambda m: m.weight.zero_() if isinstance(m, nn.Linear) else None)
    assert not waiting.net.weight.full_tensor().any()
    with pytest.raises(RuntimeStateError, match="cannot be replaced or added"):
        waiting.net = nn.Linear(8, 8)
    assert waiting.eval().module.training is False


def test_a_plan_is_checked_and_verified_from_its_file(tmp_path: Path) -> None:
    model, x = Squared(nn.Linear(8, 8)), torch.randn(4, 8)
    file = tmp_path / "plan.json"
    plan(model, 2, example_inputs=(x,), hardware="cpu-gloo").save(file)
    assert check(file, model, (x,)).ok and verify(str(file), model, (x,)).ok
    for certify in (check, verify):
        with pytest.raises(PlanError, match="Linear is not a plan"):
            certify(nn.Linear(8, 8), model, (x,))  # type: ignore[arg-type]


def test_a_class_as_model_and_a_tensor_as_mesh_are_refused() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(
        AutoparError, match=r"Linear is a class, not a model[\s\S]*Linear\(\.\.\.\)"
    ):
        compile(nn.Linear, 1, example_inputs=(x,))  # type: ignore[arg-type]
    with pytest.raises(
        MeshError, match=r"tensor of shape \(2, 8\)[\s\S]*pass the batch as example_inputs="
    ):
        compile(nn.Linear(8, 8), (x,))  # type: ignore[arg-type]


def test_the_random_state_of_a_deferred_module_is_available_after_the_first_call() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)
    step = compile(Squared(model), 1)
    with pytest.raises(RuntimeStateError, match="before the first call"):
        step.random_state = 3
    step(batch)
    step.manual_seed(7)
    state = step.random_state
    losses = [step(batch).item(), step(batch).item()]
    step.random_state = state
    assert step(batch).item() == losses[0] != losses[1]


class Squared(nn.Module):
    """A net with the mean square of its output as the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x).square().mean()
        return loss


def test_bad_options_say_what_to_pass() -> None:
    model, batch = zoo_small.gpt2()
    with pytest.raises(AutoparError, match="adamw"):
        plan(model, 1, example_inputs=batch, optimizer="adamW2")
    for size, remedy in ((-1, "bytes per device"), ("3 boxes", "write for example 72GiB")):
        with pytest.raises(AutoparError, match=remedy):
            plan(model, 1, example_inputs=batch, memory_bytes=size)
    for constraints in (ddp(), "ddp"):
        with pytest.raises(ConstraintError, match="pass a list of constraints"):
            plan(model, 1, example_inputs=batch, constraints=constraints)  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="pass one of global, local"):
        compile(model, 1, example_inputs=batch, batch="both")  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="pass the batch as forward takes it"):
        plan(model, 1, example_inputs=None)  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match=r"pass a torch\.nn\.Module"):
        plan(model.state_dict(), 1, example_inputs=batch)  # type: ignore[arg-type]
    with pytest.raises(RuntimeStateError, match="needs example_inputs"):
        compile(model, 1, batch="local")


def test_each_value_of_a_plain_argument_has_its_own_program() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(
            self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None
        ) -> torch.Tensor:
            y = self.layer(x) if mask is None else self.layer(x) * mask
            return y.pow(2).mean() * scale

    values = {"x": torch.randn(2, 4), "scale": 2.0, "mask": None}
    module = compile(Scaled(), 1, example_inputs=values)
    assert module(**{**values, "scale": 3.0}).item() == pytest.approx(1.5 * module(**values).item())
    masked = module(**{**values, "mask": torch.zeros(2, 4)})  # another program runs this call
    assert masked.item() == 0.0 and module(**values).item() > 0.0


class _Filled(torch.nn.Module):
    """A model that creates a tensor of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).double() * torch.full((4,), 0.1)).sum()


def test_a_call_must_have_the_default_dtype_of_compile() -> None:
    model, x = _Filled(), torch.randn(8, 4)
    module = compile(model, 1, example_inputs=(x,))
    expected = model(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert not torch.equal(model(x), expected)
        with pytest.raises(RuntimeStateError, match=r"default dtype is torch\.float64"):
            module(x)
        assert torch.equal(compile(model, 1, example_inputs=(x,))(x), model(x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(module(x), expected)


def test_a_call_must_have_the_same_autocast_as_compile() -> None:
    torch.manual_seed(0)
    plain, x = (
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1), _Mean()),
        torch.randn(8, 16),
    )
    cast = torch.autocast("cpu", dtype=torch.bfloat16)
    module = compile(plain, 1, example_inputs=(x,))
    with (
        cast,
        pytest.raises(
            RuntimeStateError,
            match=r"called under autocast to torch\.bfloat16, but compiled under no autocast",
        ),
    ):
        module(x)
    with cast:
        module = compile(plain, 1, example_inputs=(x,))
        ours, theirs = module(x), plain(x)
        ours.backward()
        theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0.0)
    for parameter, reference in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad.full_tensor(), reference.grad, rtol=2e-2, atol=1e-2
        )
    with pytest.raises(
        RuntimeStateError,
        match=r"called under no autocast, but compiled under autocast to torch\.bfloat16",
    ):
        module(x)


class _Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean()


def test_backward_reads_the_value_of_a_buffer_before_forward_changed_it() -> None:
    class Decaying(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = (self.layer(x) * self.scale.clone()).sum()
            self.scale.add_(5.0)
            return loss

    torch.manual_seed(0)
    x = torch.randn(3, 4)
    module = compile(Decaying(), 1, example_inputs=(x,))
    for _ in range(2):
        module(x).backward()
    torch.testing.assert_close(
        module.layer.weight.grad.full_tensor(), torch.stack([(2 + 7) * x.sum(0)] * 4)
    )
    assert torch.equal(module.scale, torch.full((4,), 12.0))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"memmory_bytes": 3},
            "compile has no argument 'memmory_bytes'\n.*did you mean memory_bytes",
        ),
        (
            {"outputs": "fulll"},
            "outputs='fulll' is not known\n.*pass one of full, local, dtensor, loss",
        ),
        ({"backend": "aot"}, "backend='aot' is not known"),
        (
            {"plan": "plan.json", "constraints": (ddp(),), "hardware": "h100-sxm"},
            "constraints passed together with plan=",
        ),
    ],
    ids=["a slip", "outputs", "backend", "options beside a plan"],
)
def test_options_are_checked_before_the_first_call(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(AutoparError, match=complaint):
        compile(nn.Linear(4, 4), 1, **options)


class Counted(nn.Module):
    """A model that returns a loss, the number of correct predictions, and the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(x)
        return {
            "loss": nn.functional.cross_entropy(scores, labels),
            "hits": (scores.argmax(-1) == labels).sum(),
            "scores": scores,
        }


def counted() -> tuple[Counted, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Counted(), {"x": torch.randn(8, 8), "labels": torch.randint(0, 5, (8,))}


def test_outputs_of_microbatches_have_the_values_and_dtypes_of_the_whole_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = counted()
    wanted = model(**batch)
    whole = compile(model, 1, example_inputs=batch, num_microbatches=2, outputs="full")(**batch)
    assert whole["hits"].dtype == torch.int64 and whole["hits"] == wanted["hits"] > 0
    torch.testing.assert_close(whole["scores"], wanted["scores"].detach())
    assert not caplog.messages
    found = compile(model, 1, example_inputs=batch, num_microbatches=2)(**batch)
    assert found["scores"] is None and found["hits"] is None
    told = "output 1 (hits), output 2 (scores) are None, because the batch runs in 2 microbatches"
    assert told in caplog.text and 'outputs="full" returns' in caplog.text


@pytest.mark.parametrize(
    "options", [{}, {"num_microbatches": 2}], ids=["one piece", "microbatches"]
)
@pytest.mark.parametrize("deferred", [True, False])
def test_training_continues_after_a_call_in_inference_mode(
    options: dict[str, Any], deferred: bool
) -> None:
    model, batch = counted()
    wanted = model(**batch)["loss"]
    wanted.backward()
    module = compile(
        model, 1, example_inputs=None if deferred else batch, outputs="loss", **options
    )
    with torch.inference_mode():
        assert module(**batch)["loss"].item() == pytest.approx(wanted.item())
    module(**batch)["loss"].backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), model.get_parameter(name).grad)


def test_microbatches_refuse_the_same_calls_as_an_unsplit_batch() -> None:
    model, batch = counted()
    model.head.bias.requires_grad_(False)
    module = compile(model, 1, example_inputs=batch, num_microbatches=2, outputs="loss")
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(RuntimeStateError, match="called under autocast to"),
    ):
        module(**batch)
    module.get_parameter("head.bias").requires_grad_(True)
    with pytest.raises(
        RuntimeStateError, match=r"'head\.bias' was frozen when the model was compiled"
    ):
        module(**batch)


def test_the_batch_size_is_the_size_of_the_first_tensor_with_two_dims() -> None:
    assert batch_size((torch.zeros(8, 128), torch.zeros(128)), {}) == 8
    assert batch_size((torch.zeros(128), torch.zeros(8, 128), torch.zeros(8)), {}) == 8


def test_a_mesh_from_text_is_refused_with_the_call_that_parses_it() -> None:
    with pytest.raises(MeshError, match=r"pass autopar\.Mesh\.parse\('node=2,gpu=2'\)"):
        Mesh("node=2,gpu=2")  # type: ignore[arg-type]
