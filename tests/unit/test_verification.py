"""Verification: equal programs pass, and one wrong node in an emitted graph is detected and
named."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import autopar
from autopar.capture import Trace, capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.emit import emit
from autopar.errors import VerificationError
from autopar.kernels import collectives as steps
from autopar.kernels.packing import into_bucket
from autopar.planner import Planned, PlanOptions, make_plan
from autopar.program.lockstep import run_lockstep
from autopar.program.program import Program, StageProgram
from autopar.verification import Verification, relative_error, verify_program
from autopar.verification import case as own_eps
from autopar.verification.check import _exact_on_a_gpu

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support")]
import expert  # noqa: E402
import zoo_small  # noqa: E402

MESH, H100 = Mesh({"data": 2, "tensor": 2}), HardwareProfile.load("h100-sxm")
Built = tuple[nn.Module, dict[str, torch.Tensor], Trace, Planned]


@pytest.fixture(scope="module")
def gpt2() -> Built:
    """A case without buckets, so that each collective is a separate node."""
    model, batch, trace, made = built("gpt2", expert.gpt2(fsdp=True))
    plan = replace(made.plan, buckets=())
    return model, batch, trace, replace(made, plan=plan, program=emit(trace, plan))


def built(kind: str, constraints: Any = (), **settings: Any) -> Built:
    model, batch = getattr(zoo_small, kind)(**settings)
    trace = capture(model, (), batch)
    return model, batch, trace, make_plan(trace, MESH, H100, PlanOptions(constraints=constraints))


def changed(case: Built, phase: str, change: Callable[[fx.Graph], None]) -> Program:
    """Emit the program of the case again, and change its forward or backward graph."""
    program = emit(case[2], case[3].plan)
    module = getattr(program.stages[0], phase)
    change(module.graph)
    module.recompile()
    return program


def collectives(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def failure(case: Built, program: Program) -> str:
    model, batch, trace, _ = case
    with pytest.raises(VerificationError) as caught:
        verify_program(trace, program, model, (), batch)
    return str(caught.value)


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean()


def test_an_equal_program_passes_and_the_report_names_its_worst_tensor(gpt2: Built) -> None:
    model, batch, trace, planned = gpt2
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = verify_program(trace, planned.program, model, (), batch)
    assert found.ok
    assert (
        found.num_collectives
        == sum(c.kind != "slice" for _, _, c in planned.program.stages[0].collectives)
        > 40
    )
    assert set(found.gradients) == {name for name, _ in model.named_parameters()}
    assert set(found.outputs) == {"logits"}
    assert found.worst in str(found) and "tolerance" in str(found)
    assert found.max_error == max(found.loss, *found.outputs.values(), *found.gradients.values())
    assert all(
        torch.equal(p, before[name]) and p.dtype == before[name].dtype
        for name, p in model.state_dict().items()
    )
    assert all(p.grad is None for p in model.parameters())


def test_float32_parts_of_the_model_are_named_and_widen_the_tolerance(
    gpt2: Built,
) -> None:
    model, batch, trace, planned = gpt2
    found = verify_program(trace, planned.program, model, (), batch)
    assert found.tolerance == 2e-6
    assert any("_log_softmax" in part and "float32" in part for part in found.lower_parts)
    assert found.traced is not None and found.traced < found.traced_tolerance == 1e-9


def test_a_model_without_float32_parts_has_a_tolerance_of_1e_9() -> None:
    model, batch, trace, planned = built("bert")
    found = verify_program(trace, planned.program, model, (), batch)
    assert (found.lower_parts, found.traced, found.tolerance) == ((), None, 1e-9)
    assert found.max_error < 1e-12


def test_the_first_verification_of_a_process_has_a_tolerance_of_1e_9() -> None:
    own_eps._eps_of.cache_clear()
    model, batch = nn.Sequential(nn.Linear(4, 4), Squares()), (torch.randn(8, 4),)
    plan = autopar.plan(model, Mesh({"gpu": 2}), example_inputs=batch, hardware="cpu-gloo")
    found = autopar.verify(plan, model, batch)
    assert found.ok and found.tolerance == 1e-9 and found.lower_parts == ()


def test_bfloat16_weights_and_integer_inputs_are_compared_in_float64() -> None:
    model, batch, trace, planned = built("llama", expert.llama(), dtype=torch.bfloat16)
    found = verify_program(trace, planned.program, model, (), batch)
    assert (
        found.ok and found.dtype == "float64" and found.traced is not None and found.traced < 1e-9
    )
    own = verify_program(trace, planned.program, model, (), batch, dtype=None)
    assert own.ok and (own.dtype, own.tolerance, own.lower_parts) == ("bfloat16", 5e-2, ())
    assert own.max_error > 1e-6


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_all_reduce_that_does_nothing_is_named(gpt2: Built, phase: str) -> None:
    nodes = collectives(getattr(gpt2[3].stage_program(), phase).graph, steps.all_reduce)
    assert nodes
    for index in range(0, len(nodes), 4):
        program = changed(
            gpt2,
            phase,
            lambda graph, index=index: identity(collectives(graph, steps.all_reduce)[index]),
        )
        told = failure(gpt2, program)
        assert f"the first node that differs is {nodes[index].meta['key']} in {phase}" in told
        assert (
            f"in module {nodes[index].meta['module']}".strip() in told
            or not nodes[index].meta["module"]
        )
        assert str(nodes[index].meta["holds"][1]) in told


def test_a_member_of_a_bucket_whose_step_does_nothing_is_named() -> None:
    case = built("gpt2", expert.gpt2(fsdp=True))
    keys = []

    def nothing(graph: fx.Graph) -> None:
        packed = next(n for n in graph.nodes if n.target is into_bucket)
        step = next(iter(packed.users))
        whole = step if step.target in steps.STEPS else next(iter(step.users))
        unpacked = next(iter(whole.users))
        keys.extend([unpacked.meta["key"], *(part.meta["key"] for part in unpacked.users)])
        with graph.inserting_before(unpacked):
            zeros = graph.call_function(torch.ops.aten.mul.Tensor, (whole, 0.0))
        whole.replace_all_uses_with(zeros, delete_user_cb=lambda user: user is unpacked)

    told = failure(case, changed(case, "backward", nothing))
    assert any(f"the first node that differs is {key} in backward" in told for key in keys[1:])
    assert f"its operands: {keys[0]}" in told


def identity(node: fx.Node) -> None:
    node.target, node.args = torch.ops.aten.clone.default, (node.args[0],)


def test_the_reader_of_a_removed_all_reduce_is_named_with_the_partial_sums_it_reads(
    gpt2: Built,
) -> None:
    keys = []

    def remove(graph: fx.Graph) -> None:
        node = collectives(graph, steps.all_reduce)[0]
        keys.extend(user.meta["key"] for user in node.users)
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)

    told = failure(gpt2, changed(gpt2, "backward", remove))
    assert any(f"first node that differs is {key} in backward" in told for key in keys)
    assert " as P" in told or "P(" in told or " P" in told.split("it reads")[1]


def test_a_scale_that_is_wrong_by_1e_6_is_named_with_the_line_of_the_model(gpt2: Built) -> None:
    keys = []

    def scale(graph: fx.Graph) -> None:
        node = next(
            n for n in graph.nodes if "holds" in n.meta and n.meta["module"].endswith("h.1.ln_2")
        )
        keys.append(node.meta["key"])
        with graph.inserting_after(node):
            wrong = graph.call_function(torch.ops.aten.mul.Tensor, (node, 1 + 1e-6))
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
        wrong.meta = dict(node.meta)

    told = failure(gpt2, changed(gpt2, "forward", scale))
    assert f"first node that differs is {keys[0]} in forward" in told
    assert "its relative error is 1.00e-06" in told
    assert "transformer.h.1.ln_2" in told and ".py:" in told


def test_a_wrong_capture_is_distinguished_from_a_wrong_program(gpt2: Built) -> None:
    model, batch, trace, planned = gpt2
    other = copy.deepcopy(model)
    other.transformer.h[0].register_forward_hook(lambda module, inputs, output: doubled(output))
    with pytest.raises(
        VerificationError,
        match="every node matches the traced graph, but the plain model computes a different value",
    ):
        verify_program(trace, planned.program, other, (), batch)


def doubled(output: Any) -> Any:
    return tuple(2 * part for part in output) if isinstance(output, tuple) else 2 * output


def test_a_too_small_tolerance_is_not_met(gpt2: Built) -> None:
    model, batch, trace, planned = gpt2
    with pytest.raises(VerificationError, match="tolerance 1e-12"):
        verify_program(trace, planned.program, model, (), batch, tolerance=1e-12)


def test_a_model_on_meta_cannot_be_verified(gpt2: Built) -> None:
    model, batch, trace, planned = gpt2
    with pytest.raises(
        VerificationError,
        match=r"on the meta device and have no values, first 'transformer\.wte\.weight'",
    ):
        verify_program(trace, planned.program, copy.deepcopy(model).to("meta"), (), batch)


def test_verification_in_16_bit_dtypes_is_refused(gpt2: Built) -> None:
    model, batch, _, planned = gpt2
    with pytest.raises(VerificationError, match=r"cannot verify in torch\.bfloat16"):
        autopar.verify(planned.plan, model, batch, dtype=torch.bfloat16)


def test_verification_on_a_gpu_uses_exact_kernels_and_restores_the_settings() -> None:
    kinds = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul)
    asked, torch.backends.cuda.matmul.fp32_precision = (
        torch.backends.cuda.matmul.fp32_precision,
        "tf32",
    )
    try:
        before = [kind.fp32_precision for kind in kinds], torch.backends.cudnn.deterministic
        with _exact_on_a_gpu():
            assert {kind.fp32_precision for kind in kinds} == {
                "ieee"
            } and torch.backends.cudnn.deterministic
        assert (
            [kind.fp32_precision for kind in kinds],
            torch.backends.cudnn.deterministic,
        ) == before
    finally:
        torch.backends.cuda.matmul.fp32_precision = asked


def test_a_nan_loss_is_refused(gpt2: Built) -> None:
    model, batch, trace, planned = gpt2
    broken = copy.deepcopy(model)
    broken.transformer.ln_f.weight.data.fill_(float("nan"))
    with pytest.raises(
        VerificationError, match=r"loss is nan: the comparison would be meaningless"
    ):
        verify_program(trace, planned.program, broken, (), batch)


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_an_index_outside_a_sharded_vocabulary_is_an_error(gpt2: Built, name: str) -> None:
    model, batch, trace, planned = gpt2
    wrong = {**batch, name: torch.full_like(batch[name], 10**6)}
    with pytest.raises(IndexError):
        model(**wrong)
    inputs = [wrong[i.path] for i in trace.inputs]
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    with pytest.raises(VerificationError, match=r"must be in 0…|out of range"):
        run_lockstep(planned.program, tensors, tensors, inputs)


def test_relative_errors_of_infinite_nan_zero_and_missing_values() -> None:
    x = torch.tensor([1.0, -4.0, float("-inf"), float("nan")])
    assert relative_error(x, x) == 0.0
    assert relative_error(torch.tensor([1.0, -3.0, float("-inf"), float("nan")]), x) == 0.25
    assert relative_error(torch.tensor([1.0, -4.0, float("-inf"), 0.0]), x) == float("inf")
    assert relative_error(torch.tensor([1.0, -4.0, 0.0, float("nan")]), x) == float("inf")
    assert relative_error(torch.zeros(3), x) == float("inf")
    assert relative_error(torch.tensor([1e-9]), torch.zeros(1), floor=1.0) == pytest.approx(1e-9)
    assert relative_error(torch.tensor([1e-9]), torch.zeros(1)) == float("inf")
    assert relative_error(None, torch.tensor([2.0])) == 1.0


def test_a_lost_gradient_counts_as_zeros_and_the_report_says_not_equal() -> None:
    lost = Verification(
        False,
        1e-9,
        "float64",
        0.0,
        {},
        {},
        {"weight": relative_error(None, torch.ones(2))},
        (),
        None,
        1e-9,
        0,
    )
    assert lost.rows[0] == ("gradient", "weight", 1.0)
    assert str(lost).startswith("NOT equal")
    assert replace(lost, ok=True).__str__().startswith("equal")


def test_complex_buffers_and_nested_inputs_are_computed_in_the_requested_dtype() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("turns", torch.polar(torch.ones(6, 4), torch.rand(6, 4)))

        def forward(self, parts: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            (x,) = parts["x"]
            pairs = torch.view_as_complex(self.layer(x).view(4, 6, 4, 2)) * self.turns
            return (torch.view_as_real(pairs).flatten(2) * x).pow(2).mean()

    model, batch = Rotary(), {"parts": {"x": [torch.randn(4, 6, 8)]}}
    trace = capture(model, (), batch)
    found = verify_program(
        trace, make_plan(trace, MESH, H100, PlanOptions()).program, model, (), batch
    )
    assert found.max_error < 1e-9 and found.dtype == "float64"


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_model_with_16_bit_parts_has_the_tolerance_of_these_parts(
    dtype: torch.dtype | None,
) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x).to(torch.bfloat16)
            return (
                nn.functional.linear(hidden, self.second.weight.to(torch.bfloat16))
                .float()
                .pow(2)
                .mean()
            )

    torch.manual_seed(0)
    model, batch = Mixed(), (torch.randn(8, 16),)
    trace = capture(model, batch)
    found = verify_program(
        trace, make_plan(trace, MESH, H100, PlanOptions()).program, model, batch, {}, dtype=dtype
    )
    assert found.ok and found.tolerance == 5e-2
    assert (found.traced is None) == (dtype is None)
    assert found.traced is None or found.traced <= 1e-9


class FloatOnly(nn.Module):
    """A model that fails in float64, because its float32 mask is filled with the minimum of the
    dtype of x."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(8, dtype=torch.float32).masked_fill(
            torch.arange(8) > 5, torch.finfo(x.dtype).min
        )
        return (self.linear(x) + mask).softmax(-1).pow(2).sum()


def test_a_model_that_cannot_be_run_in_float64_is_compared_in_its_own_dtype() -> None:
    model, batch = FloatOnly(), (torch.randn(8, 8),)
    trace = capture(model, batch)
    found = verify_program(
        trace, make_plan(trace, MESH, H100, PlanOptions()).program, model, batch, {}
    )
    assert found.ok and (found.dtype, found.tolerance) == ("float32", 1e-4)
    assert "cannot be compared in float64: the plain model fails: value cannot be converted" in str(
        found
    )


class Waves(nn.Module):
    """A model with complex numbers in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            (torch.fft.fftn(self.linear(x), dim=(0, 1)).real * torch.empty(8).fill_(self.scale))
            .pow(2)
            .mean()
        )


def test_complex_numbers_are_computed_in_double_precision() -> None:
    model, batch = Waves(), (torch.randn(8, 8),)
    trace = capture(model, batch)
    assert any(
        dtype.is_complex
        for n in trace.graph.nodes
        for dtype in (*n.args, *n.kwargs.values())
        if isinstance(dtype, torch.dtype)
    )
    found = verify_program(
        trace, make_plan(trace, MESH, H100, PlanOptions()).program, model, batch, {}
    )
    assert found.max_error < 1e-13 and found.dtype == "float64"


def test_uninitialized_values_are_not_reported_as_a_difference() -> None:
    model, batch = Waves(), (torch.randn(8, 8),)
    trace = capture(model, batch)
    assert any("empty" in str(node.target) for node in trace.graph.nodes)
    model.scale = 0.25  # now the model differs, although all nodes are correct
    with pytest.raises(VerificationError, match="every node matches the traced graph"):
        verify_program(trace, make_plan(trace, MESH, H100, PlanOptions()).program, model, batch, {})


class Shifted(nn.Module):
    """A model whose softmax does not depend on the shift, so that the gradient of the shift is
    noise. The softmax is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.shift).float().softmax(-1).pow(2).sum()


def test_noise_in_a_zero_gradient_is_compared_with_the_precision_of_the_model() -> None:
    torch.manual_seed(0)
    model, batch = Shifted(), (torch.randn(8, 8),)
    trace = capture(model, batch)
    found = verify_program(
        trace, make_plan(trace, MESH, H100, PlanOptions()).program, model, batch, {}
    )
    assert found.ok and found.lower_parts and found.traced is not None and found.traced < 1e-9


class Offset(nn.Module):
    """A norm of float32 numbers with a large mean. The kernel of torch accumulates in float64, and
    the sums of the program are rounded. Both are correct."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(8, 8), nn.BatchNorm1d(8), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(self.linear(x))
        return (
            normed @ torch.ones(8, 8, dtype=torch.float32) + normed.relu().square()
        ).mean() * self.scale


def offset() -> tuple[Offset, tuple[torch.Tensor], Trace, Program]:
    torch.manual_seed(0)
    model, batch = Offset(), (torch.randn(256, 8) + 4,)
    trace = capture(model, batch)
    return model, batch, trace, make_plan(trace, MESH, H100, PlanOptions()).program


def test_a_program_that_rounds_sums_differently_is_compared_in_float64() -> None:
    model, batch, trace, program = offset()
    with pytest.raises(VerificationError):
        verify_program(trace, program, model, batch, {}, dtype=None)
    found = verify_program(trace, program, model, batch, {})
    assert found.ok and found.dtype == "float64" and found.tolerance == 1e-4
    assert found.traced is not None and found.traced < 1e-9 < found.max_error
    assert "it ran in float32, the program in float64" in str(found)


def test_a_difference_from_the_model_is_reported_in_the_float64_comparison() -> None:
    model, batch, trace, program = offset()
    model.scale = 1.001
    with pytest.raises(VerificationError):
        verify_program(trace, program, model, batch, {})


def test_a_model_with_computed_weights_is_verified() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = Squared(nn.utils.weight_norm(nn.Linear(8, 8)))  # it has a weight that is not a leaf
    batch = {"x": torch.randn(6, 8)}
    plan = autopar.plan(model, Mesh({"a": 2}), example_inputs=batch, hardware="cpu-gloo")
    assert autopar.verify(plan, model, batch).ok


class Squared(nn.Module):
    """A net with the mean square of its output as the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x).square().mean()
        return loss


class Blind(nn.Module):
    """A loss that does not depend on its parameters, for one of several reasons."""

    WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda z: z.softmax(-1).sum(),
        "softmax of many": lambda z: (1000 * z).softmax(-1).mean(),
        "in float32": lambda z: z.float().softmax(-1).sum(),
        "centred": lambda z: (z - z.mean(-1, keepdim=True)).sum() + 1,
        "layer norm": lambda z: nn.functional.layer_norm(z, z.shape[-1:]).sum() + 1,
        "dead": lambda z: (z - 100).relu().sum() + 1,
        "multiplied by zero": lambda z: (z * 0).sum() + 1,
    }

    def __init__(self, way: str, factor: float = 1.0) -> None:
        super().__init__()
        self.up, self.down, self.way, self.factor = (
            nn.Linear(8, 16),
            nn.Linear(16, 8),
            self.WAYS[way],
            factor,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self.down(self.up(x).tanh())) * self.factor


def planned_blind(model: nn.Module) -> tuple[tuple[torch.Tensor], Trace, Planned]:
    torch.manual_seed(0)
    batch = (torch.randn(12, 8),)
    trace = capture(model, batch)
    return (
        batch,
        trace,
        make_plan(
            trace,
            MESH,
            H100,
            PlanOptions(constraints=(autopar.constraints.tensor_parallel("1d", axes="tensor"),)),
        ),
    )


@pytest.mark.parametrize("way", Blind.WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_that_are_all_zero_are_compared_with_the_size_of_their_summands(
    way: str, dtype: torch.dtype
) -> None:
    model = Blind(way)
    batch, trace, made = planned_blind(model)
    assert verify_program(trace, made.program, model, batch, {}, dtype=dtype).ok


@pytest.mark.parametrize("way", ["softmax", "centred", "layer norm"])
@pytest.mark.parametrize("share", [1.0, 1e-6])
def test_a_nonzero_gradient_is_detected_if_all_gradients_should_be_zero(
    way: str, share: float
) -> None:
    model = Blind(way)
    batch, trace, made = planned_blind(model)
    change_first_gradient(made.program.stages[0], torch.ops.aten.add.Tensor, share)
    with pytest.raises(VerificationError):
        verify_program(trace, made.program, model, batch, {})


def change_first_gradient(program: StageProgram, op: Any, number: float) -> None:
    output = next(iter(reversed(program.backward.graph.nodes)))
    first, *others = output.args[0]
    with program.backward.graph.inserting_before(output):
        output.args = ((program.backward.graph.call_function(op, (first, number)), *others),)
    program.backward.recompile()


@pytest.mark.parametrize("factor", [1e-15, 1e-25])
def test_very_small_true_gradients_are_not_taken_for_zeros(factor: float) -> None:
    torch.manual_seed(0)
    model = Blind("dead", factor)
    model.way = lambda z: z.square().sum()
    batch, trace, made = planned_blind(model)
    assert verify_program(trace, made.program, model, batch, {}).ok
    change_first_gradient(made.program.stages[0], torch.ops.aten.mul.Tensor, 1.001)
    with pytest.raises(VerificationError):
        verify_program(trace, made.program, model, batch, {})
