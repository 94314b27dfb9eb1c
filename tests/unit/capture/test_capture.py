"""Guarantees of `capture` for any model: values, gradients, inputs and outputs, errors, and an
unchanged model."""

from __future__ import annotations

import copy
import sys
import time
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
import zoo_small
from torch import Tensor, nn
from torch._dynamo import funcname_cache
from torch.nn import functional as F

import autopar
from autopar.capture import Trace, capture, execute
from autopar.errors import CaptureError


class Net(nn.Module):
    """Two linear layers and a norm. `returns` maps (hidden, loss) to the return value."""

    def __init__(self, returns: Any = lambda hidden, loss: loss, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(dropout)
        self.unused = nn.Linear(2, 2)
        self.returns = returns

    def forward(self, x: Tensor, y: Tensor, twice: bool = False, extra: Any = None) -> Any:
        hidden = self.norm(self.second(self.dropout(torch.relu(self.first(x)))))
        hidden = hidden if extra is None else hidden + extra["shift"][0]
        loss = ((hidden * (2 if twice else 1) - y) ** 2).mean()
        return self.returns(hidden, loss)


def _batch(rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, 6, generator=generator).double(),
        torch.randn(rows, 6, generator=generator).double(),
    )


def _net(**settings: Any) -> Net:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Net(**settings).double()


def _run(
    trace: Trace, model: nn.Module, *inputs: Tensor, **settings: Any
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return execute(
        trace, dict(model.named_parameters()), dict(model.named_buffers()), inputs, **settings
    )[:2]


def _assert_gradients(gradients: dict[str, Tensor], model: nn.Module) -> None:
    expected = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient,
            expected[name],
            rtol=1e-9,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(
    ("returns", "paths", "loss", "constants"),
    [
        (lambda hidden, loss: loss, [""], "", {}),
        (lambda hidden, loss: (hidden, loss, loss * 2), ["0", "1", "2"], "1", {}),
        (
            lambda hidden, loss: {"h": [hidden[:, 1:], None], "loss": loss, "name": "net"},
            ["h.0", "loss"],
            "loss",
            {1: None, 3: "net"},
        ),
    ],
    ids=["scalar", "tuple", "dict"],
)
def test_the_loss_is_found_and_outputs_keep_their_structure(
    returns: Any, paths: list[str], loss: str, constants: dict[int, Any]
) -> None:
    model, (x, y) = _net(returns=returns), _batch()
    trace = capture(model, (x, y))
    assert [output.path for output in trace.outputs] == paths
    assert [output.path for output in trace.outputs if output.is_loss] == [loss]
    assert trace.constants == constants
    outputs, gradients = _run(trace, model, x, y)
    leaves, spec = torch.utils._pytree.tree_flatten(model(x, y))
    assert spec == trace.out_spec
    for got, want in zip(
        outputs, [leaf for leaf in leaves if isinstance(leaf, Tensor)], strict=True
    ):
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)
    next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 0).backward()
    _assert_gradients(gradients, model)


def test_tensors_in_all_arguments_are_inputs_and_numbers_are_constants() -> None:
    model, (x, y) = _net(), _batch()
    shift = torch.ones(6, dtype=torch.float64)
    trace = capture(model, (x,), {"y": y, "twice": True, "extra": {"shift": [shift, 7]}})
    assert [entry.path for entry in trace.inputs] == ["0", "y", "extra.shift.0"]
    outputs, _ = _run(trace, model, x, y, shift)
    torch.testing.assert_close(outputs[0], model(x, y, True, {"shift": [shift]}).detach())
    assert not torch.allclose(outputs[0], model(x, y, False, {"shift": [shift]}))


def test_two_inputs_that_are_one_object_stay_two_inputs() -> None:
    model, (x, y) = _net(), _batch()
    trace = capture(model, (x, x))
    outputs, _ = _run(trace, model, x, y)
    torch.testing.assert_close(outputs[0], model(x, y).detach())


def test_tied_parameters_are_one_parameter_with_a_summed_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight, self.b.bias = self.a.weight, self.a.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x))).square().mean()

    model, (x, _) = Tied().double(), _batch()
    trace = capture(model, (x,))
    assert [(entry.name, entry.aliases) for entry in trace.parameters] == [
        ("a.weight", ("b.weight",)),
        ("a.bias", ("b.bias",)),
    ]
    _, gradients = _run(trace, model, x)
    model(x).backward()
    _assert_gradients(gradients, model)


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    model, (x, y) = _net(), _batch()
    model.first.requires_grad_(False)
    trace = capture(model, (x, y))
    without = {entry.name for entry in trace.parameters if entry.gradient is None}
    assert without == {"first.weight", "first.bias", "unused.weight", "unused.bias"}
    assert {entry.name for entry in trace.parameters if not entry.requires_grad} == {
        "first.weight",
        "first.bias",
    }
    _, gradients = _run(trace, model, x, y)
    model(x, y).backward()
    _assert_gradients(gradients, model)


def test_buffers_that_forward_changes_are_recorded() -> None:
    trace = capture(_net(), _batch())
    assert set(trace.mutated) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    assert sorted(trace.mutated.values()) == list(range(len(results) - 3, len(results)))
    model, (x, y) = _net(), _batch()
    expected = copy.deepcopy(model)
    expected(x, y)
    position = trace.mutated["norm.running_mean"]
    values = [dict(model.named_parameters()).get(entry.name) for entry in trace.parameters]
    values += [dict(model.named_buffers())[entry.name] for entry in trace.buffers]
    with torch.no_grad():
        new = torch.fx.Interpreter(torch.fx.GraphModule({}, trace.graph)).run(
            *values, x, y, torch.ones((), dtype=x.dtype)
        )
    torch.testing.assert_close(new[position], expected.norm.running_mean)


def test_the_tangent_scales_the_gradients() -> None:
    model, (x, y) = _net(), _batch()
    trace = capture(model, (x, y))
    _, plain = _run(trace, model, x, y)
    _, scaled = _run(trace, model, x, y, tangent=torch.tensor(3.0).double())
    torch.testing.assert_close(scaled["first.weight"], 3 * plain["first.weight"])


def test_a_float32_model_can_be_executed_in_float64() -> None:
    model, (x, y) = _net(), _batch()
    trace = capture(copy.deepcopy(model).float(), (x.float(), y.float()))
    outputs, gradients = _run(trace, model, x, y, dtype=torch.float64)
    assert outputs[0].dtype == torch.float64
    torch.testing.assert_close(outputs[0], model(x, y).detach(), rtol=1e-12, atol=1e-12)
    model(x, y).backward()
    _assert_gradients(gradients, model)


def test_captures_do_not_change_the_model_or_each_other() -> None:
    model = _net()
    before = {
        name: (id(t), t.clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    first = capture(model, _batch())
    other = capture(_net(), _batch(rows=7))
    model.dropout.p = 0.5
    assert capture(model, _batch()).mutated.keys() != first.mutated.keys()
    model.dropout.p = 0.0
    with pytest.raises(CaptureError):
        capture(model, _batch()[:1])
    again = capture(model, _batch())
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert [node.meta["key"] for node in first.graph.nodes] == [
        node.meta["key"] for node in again.graph.nodes
    ]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_a_failed_capture_leaves_the_model_unchanged() -> None:
    model = _net(returns=lambda hidden, loss: loss if hidden.sum() > 0 else -loss)
    before = {name: id(tensor) for name, tensor in model.named_parameters()}
    with pytest.raises(CaptureError, match="one graph"):
        capture(model, _batch())
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == before


def test_every_node_has_a_unique_key_a_module_and_a_source_line() -> None:
    trace = capture(_net(), _batch())
    keys = [node.meta["key"] for node in trace.graph.nodes]
    assert len(set(keys)) == len(keys)
    assert {"first/dot/forward/0", "first/dot/backward/0", "norm/placeholder/forward/0"} & set(
        keys
    ) >= {"first/dot/forward/0"}
    dot = next(node for node in trace.graph.nodes if node.meta["key"] == "second/dot/backward/0")
    assert dot.meta["phase"] == "backward"
    assert "test_capture.py" in dot.meta["source"] and "self.second(" in dot.meta["source"]
    assert all(
        isinstance(node.meta["module"], str) and "L[" not in node.meta["module"]
        for node in trace.graph.nodes
    )


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_of_parameters_are_refused(register: str) -> None:
    net = _net()
    getattr(net.first.weight, register)(lambda x: None)
    with pytest.raises(CaptureError, match=r"'first\.weight' has gradient hooks"):
        capture(net, _batch())


@pytest.mark.parametrize(
    ("module", "batch", "complaint"),
    [
        (nn.Embedding(10, 4, max_norm=1.0), torch.arange(4), "max_norm=1.0 of Embedding"),
        (nn.BatchNorm1d(4, momentum=None), torch.randn(4, 4), "momentum=None of BatchNorm1d"),
        (nn.LazyLinear(4), torch.randn(4, 4), "'inner.weight' has no shape yet"),
    ],
    ids=[
        "a table that lookups change",
        "a momentum that follows the steps",
        "a module that waits for its shape",
    ],
)
def test_modules_that_torch_cannot_capture_are_refused_with_their_path(
    module: nn.Module, batch: Tensor, complaint: str
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.layer = module, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.layer(self.inner(x)).square().mean()
            return loss

    with pytest.raises(CaptureError, match=complaint) as refused:
        capture(Net(), (batch,))
    assert "in module inner" in str(refused.value)


def test_an_op_that_torch_cannot_run_is_refused_with_its_cause() -> None:
    with pytest.raises(
        CaptureError, match="forward does not accept this call: Unsupported dtype BFloat16"
    ) as refused:
        capture(
            _net(returns=lambda hidden, loss: torch.fft.rfft(hidden.bfloat16()).abs().mean()),
            _batch(),
        )
    assert "test_capture.py" in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_are_refused_with_the_line(dtype: torch.dtype) -> None:
    with pytest.raises(CaptureError, match=rf"tensors of {dtype}(?s:.*)test_capture\.py"):
        capture(
            _net(returns=lambda hidden, loss: loss + hidden.to(dtype).to(hidden.dtype).mean()),
            _batch(),
        )


def test_different_parameters_that_share_memory_are_refused() -> None:
    class Net(nn.Module):
        def __init__(self, first: nn.Parameter, second: nn.Parameter) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.first @ self.second).square().mean()

    whole = torch.randn(8, 4)
    first, second = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    assert len(capture(Net(first, second), (torch.randn(2, 4),)).parameters) == 2
    assert len(capture(Net(first, first), (torch.randn(2, 4),)).parameters) == 1
    with pytest.raises(
        CaptureError, match="'first' and 'second' are different tensors that share memory"
    ):
        capture(Net(first, nn.Parameter(first.data)), (torch.randn(2, 4),))


def test_operands_of_different_dtypes_that_torch_accepts_in_a_capture_are_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(
                self.layer(x), y, weight=torch.tensor([1.0, 2.0, 3.0])
            )

    with pytest.raises(
        CaptureError,
        match=r"float64 \(4,\) in the capture, torch\.float32(.|\n)*test_capture",
    ):
        capture(Net().double(), (torch.randn(4, 4).double(), torch.randint(0, 3, (4,))))


@pytest.mark.slow
def test_dropout_between_recurrent_layers_is_refused_in_training() -> None:
    class Net(nn.Module):
        def __init__(self, **settings: Any) -> None:
            super().__init__()
            self.net = nn.LSTM(4, 4, **settings)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.net(x)[0].square().mean()
            return loss

    x = torch.randn(2, 3, 4)
    with pytest.raises(CaptureError, match="dropout between the layers of LSTM"):
        capture(Net(num_layers=2, dropout=0.5), (x,))
    for net in (Net(num_layers=2), Net(dropout=0.0), Net(num_layers=2, dropout=0.5).eval()):
        trace = capture(net, (x,))
        assert not any("mkldnn" in str(node.target) for node in trace.graph.nodes), (
            "an op that exists only on CPUs does not model a GPU"
        )


def test_a_loss_that_torch_decomposes_wrongly_is_refused_with_a_remedy() -> None:
    def returns(hidden: Tensor, loss: Tensor) -> Tensor:
        return loss + nn.functional.multilabel_margin_loss(hidden, hidden.detach().long())

    with pytest.raises(CaptureError) as refusal:
        capture(_net(returns=returns), _batch())
    assert "multilabel_soft_margin_loss" in refusal.value.remedy


@pytest.mark.parametrize(
    "changes",
    [
        lambda waves: torch.view_as_real(waves.conj().resolve_conj()),
        lambda waves: waves.conj() * waves.real,
        lambda waves: waves.conj().imag.resolve_neg(),
    ],
    ids=["resolved", "a view", "a negated part"],
)
def test_conjugate_and_negative_views_are_materialized(changes: Any) -> None:
    def returns(hidden: Tensor, loss: Tensor) -> Tensor:
        return loss + changes(torch.fft.fft(hidden)).abs().sum()

    model, batch = _net(returns=returns), _batch()
    (output,), gradients = _run(capture(model, batch), model, *batch)
    loss = model(*batch)
    torch.testing.assert_close(output, loss.detach())
    loss.backward()
    _assert_gradients(gradients, model)


@pytest.mark.parametrize(
    "checked", [torch.linalg.inv, torch.linalg.cholesky, lambda a: torch.linalg.solve(a, a.sum(-1))]
)
def test_linear_algebra_ops_are_captured_without_their_error_checks(checked: Any) -> None:
    def returns(hidden: Tensor, loss: Tensor) -> Tensor:
        square: Tensor = hidden.mT @ hidden + torch.eye(hidden.shape[-1])
        return loss + checked(square).square().sum()

    model, (x, y) = _net(returns=returns), _batch()
    outputs, gradients = _run(capture(model, (x, y)), model, x, y)
    loss = model(x, y)
    loss.backward()
    torch.testing.assert_close(outputs[0], loss.detach())
    _assert_gradients(gradients, model)


def test_data_dependent_control_flow_is_refused_with_the_line() -> None:
    def returns(hidden: Tensor, loss: Tensor) -> Tensor:
        if hidden.sum() > 0:
            return loss
        return loss * 2

    with pytest.raises(CaptureError) as refusal:
        capture(_net(returns=returns), _batch())
    assert "if hidden.sum() > 0" in str(refusal.value)
    assert "torch.where" in refusal.value.remedy


class Routed(nn.Module):
    """Experts that process the rows routed to them or, if `masked`, all rows with weight 0 for the
    other rows."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        weights, picks = self.gate(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.masked:
                result = result + expert(x) * (weights * (picks == number)).sum(-1, keepdim=True)
            else:
                rows, which = torch.where(picks == number)
                result = result.index_add(0, rows, expert(x[rows]) * weights[rows, which, None])
        return result.pow(2).mean()


def test_experts_in_a_loop_are_captured_as_experts_with_masked_rows() -> None:
    loop, x = Routed(masked=False).double(), _batch()[0]
    masked = Routed(masked=True).double()
    masked.load_state_dict(loop.state_dict())
    for model in (loop, masked):
        outputs, _ = _run(capture(model, (x,)), model, x)
        torch.testing.assert_close(outputs[0], loop(x).detach())


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        (
            lambda hidden, loss: hidden[: int(hidden.sum().abs()) + 1].sum(),
            "do not read the value of a tensor",
        ),
        (lambda hidden, loss: hidden[hidden > 0].cumsum(0).sum(), "multiply by a mask"),
        (lambda hidden, loss: loss * time.time(), "outside the model"),
        (
            lambda hidden, loss: loss * float(numpy.random.default_rng(0).random()),
            "torch.manual_seed",
        ),
        (lambda hidden, loss: loss * float(numpy.random.rand()), "torch.manual_seed"),
        (
            lambda hidden, loss: torch.cond(loss > 0, lambda x: x * 2, lambda x: x * 3, (loss,)),
            "torch.where",
        ),
        (lambda hidden, loss: loss * len(numpy.array_str(numpy.eye(2))), "fullgraph=True"),
    ],
    ids=[
        "item",
        "a mask as index",
        "a call",
        "numpy's generator",
        "numpy's own",
        "branches",
        "an error that torch finds too",
    ],
)
def test_the_remedy_of_an_error_matches_its_cause(returns: Any, says: str) -> None:
    with pytest.raises(CaptureError) as refusal:
        capture(_net(returns=returns), _batch())
    assert says in refusal.value.remedy


def test_a_large_constant_is_refused_with_a_remedy() -> None:
    with pytest.raises(CaptureError) as refusal:
        capture(
            _net(returns=lambda hidden, loss: (loss * torch.tensor([2.0] * 20000)).sum()), _batch()
        )
    assert "register_buffer" in refusal.value.remedy


def test_a_detached_loss_has_no_gradients() -> None:
    trace = capture(_net(returns=lambda hidden, loss: loss.detach()), _batch())
    assert (
        trace.loss is not None
        and not trace.differentiable
        and not any(p.gradient for p in trace.parameters)
    )


@pytest.mark.parametrize(
    "scale",
    [
        lambda: torch.tensor(2.5),
        lambda: torch.tensor([[0.1, -3.0], [float("inf"), 1.0]]).clamp(max=4.0).sum(),
        lambda: torch.where(torch.tensor([True, False]), torch.tensor([3, 2]), 1).sum(),
        lambda: torch.tensor([]).sum() + 2,
    ],
    ids=["a scalar", "a matrix", "a mask", "nothing"],
)
def test_a_constant_that_forward_builds_is_in_the_graph(scale: Any) -> None:
    model, (x, y) = _net(returns=lambda hidden, loss: loss * scale()), _batch()
    outputs, _ = _run(capture(model, (x, y)), model, x, y)
    torch.testing.assert_close(outputs[0], model(x, y).detach())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(4, 5), (4,)])
def test_cross_entropy_is_exact_with_ignored_labels(reduction: str, shape: tuple[int, ...]) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 11)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(
                self.linear(x).view(-1, 11), labels.view(-1), ignore_index=3, reduction=reduction
            )

    model = Head().double()
    x, labels = torch.randn(*shape, 6).double(), torch.randint(0, 11, shape)
    labels.view(-1)[:2], labels.view(-1)[-1] = (
        3,
        5,
    )  # some labels are ignored, but not all, because the mean of no labels is nan
    trace = capture(model, (x, labels))
    assert not any(
        "log_softmax" in str(node.target) or "nll_loss" in str(node.target)
        for node in trace.graph.nodes
    )
    outputs, gradients = _run(trace, model, x, labels)
    loss = model(x, labels)
    loss.backward()
    torch.testing.assert_close(outputs[0], loss.detach(), rtol=1e-12, atol=1e-12)
    _assert_gradients(gradients, model)


def test_the_fingerprint_depends_on_the_arguments_of_ops() -> None:
    class Soft(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.dim, self.layer = dim, nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).softmax(self.dim).pow(2).sum()

    marks = [capture(Soft(dim), (torch.randn(6, 6),)).fingerprint for dim in (0, 1, 0)]
    assert marks[0] == marks[2] != marks[1]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_forward_reassigns_is_refused_unless_it_is_changed_in_place(
    in_place: bool,
) -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if in_place:
                self.mean.copy_(self.mean + x.detach().mean(0))
            else:
                self.mean = self.mean + x.detach().mean(0)
            return (x * self.mean).sum()

    model, x = nn.Sequential(nn.Linear(4, 4), Average()), torch.randn(3, 4)
    if in_place:
        assert set(capture(model, (x,)).mutated) == {"1.mean"}
        return
    with pytest.raises(
        CaptureError,
        match=r"assigns a new tensor to a buffer or parameter(.|\n)*in module 1\n(.|\n)*copy_",
    ):
        capture(model, (x,))


def test_a_buffer_rebuilt_for_new_shapes_is_refused_until_a_call_has_rebuilt_it() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.zeros(1, 1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.places.shape[1] != x.shape[1]:
                self.places = torch.arange(x.shape[1]).expand(1, -1) / x.shape[1]
            return (x * self.places).sum()

    model, x = nn.Sequential(nn.Linear(4, 4), Places()), torch.randn(3, 4)
    with pytest.raises(CaptureError, match="first call the model once on a batch of these shapes"):
        capture(model, (x,))
    model(x)
    assert not capture(model, (x,)).mutated


def test_a_buffer_reassigned_to_itself_is_captured_and_the_model_is_unchanged() -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.arange(4.0))
            self.cache, self.calls = None, 0

        def forward(self, x: Tensor) -> Tensor:
            self.scale = self.scale.to(device=x.device, dtype=x.dtype)
            self.calls += 1
            self.cache = self.scale * 2
            return (self.linear(x) * self.cache).sum()

    model, x = Moved(), torch.randn(3, 4)
    scale = model.scale
    trace = capture(model, (x,))
    assert model.scale is scale and model.cache is None and model.calls == 0
    outputs, _ = _run(trace, model, x)
    torch.testing.assert_close(outputs[0], model(x).detach())


def test_the_output_recorder_of_transformers_can_be_read_under_capture() -> None:
    recording = pytest.importorskip("transformers.utils.output_capturing")

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            nobody = recording._active_collector.get() is None
            return self.linear(x).sum() * (2 if nobody else 3)

    variable = recording._active_collector.context_var
    model, x = Asks(), torch.randn(3, 4)
    outputs, _ = _run(capture(model, (x,)), model, x)
    torch.testing.assert_close(outputs[0], model(x).detach())
    assert recording._active_collector.context_var is variable


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x.square()


class OwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Cubed.apply(self.linear(x)).sum()


class Returned(OwnBackward):
    def forward(self, x: Tensor) -> Tensor:
        return Cubed.apply(self.linear(x))


def test_a_custom_backward_may_be_the_first_backward_op() -> None:
    model, x = Returned().double(), torch.randn(4, 4).double()
    plan = autopar.plan(
        model, 2, example_inputs=(x,), hardware="cpu-gloo", constraints=[autopar.constraints.ddp()]
    )
    assert autopar.verify(plan, model, (x,)).ok


def test_the_ops_of_a_custom_backward_are_in_the_backward_phase() -> None:
    model, x = OwnBackward().double(), torch.randn(3, 4).double()
    trace = capture(model, (x,))
    phases = {
        node.meta["phase"]
        for node in trace.graph.nodes
        if node.meta.get("source", "").endswith("return 3 * grad * x.square()")
    }
    assert phases == {"backward"}
    _, gradients = _run(trace, model, x)
    model(x).backward()
    _assert_gradients(gradients, model)


ASKING = """
import torch
from torch import nn

def is_torchdynamo_compiling():
    return torch.compiler.is_compiling()

class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask=None):
        if mask is None and not is_torchdynamo_compiling():
            mask = torch.arange(4.0)
        return (self.linear(x) * mask).sum()
"""


@pytest.mark.parametrize("package", ["transformers", "elsewhere"])
def test_eager_branches_of_a_transformers_model_are_captured_if_its_traced_ones_fail(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = ModuleType(f"{package}.asking")
    monkeypatch.setitem(sys.modules, home.__name__, home)
    exec(ASKING, vars(home))
    model, x = home.Asking(), torch.randn(3, 4)
    if package == "elsewhere":
        with pytest.raises(CaptureError):
            capture(model, (x,))
        return
    outputs, _ = _run(capture(model, (x,)), model, x)
    torch.testing.assert_close(outputs[0], model(x).detach())
    assert home.is_torchdynamo_compiling.__name__ == "is_torchdynamo_compiling"


def test_source_files_are_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo tokenizes source files for a log of calls that is not requested."""
    model, batch = zoo_small.gpt2()
    funcname_cache.clearcache()
    added: list[str] = []
    monkeypatch.setattr(funcname_cache, "_add_file", added.append)
    capture(model, (), batch)
    assert not added
