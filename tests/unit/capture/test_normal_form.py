"""The normal form of the four model families matches the models and flattens no dims."""

from __future__ import annotations

import importlib.util
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from autopar import ops
from autopar.capture import Trace, capture, execute

aten = torch.ops.aten
FAMILIES = ["gpt2", "llama", "bert", "vit"]


def _zoo() -> ModuleType:
    path = Path(__file__).parents[2] / "zoo_small.py"
    spec = importlib.util.spec_from_file_location("zoo_small", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ZOO = _zoo()


@lru_cache
def _captured(
    family: str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, dict[str, Tensor], Trace]:
    model, batch = getattr(ZOO, family)(dtype=dtype)
    return model, batch, capture(model, (), batch)


def _max_rel(got: Tensor, want: Tensor, floor: float) -> float:
    return ((got - want).abs().max() / want.abs().max().clamp_min(floor)).item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    # All families except BERT and ViT cast to float32 in norms or the loss of a float64 model.
    ("dtype", "tolerance", "exact"),
    [(torch.float32, 1e-5, 1e-5), (torch.float64, 2e-6, 1e-9), (torch.bfloat16, 4e-2, 4e-2)],
    ids=["float32", "float64", "bfloat16"],
)
def test_loss_outputs_and_gradients_match_the_model(
    family: str, dtype: torch.dtype, tolerance: float, exact: float
) -> None:
    model, batch, trace = _captured(family, dtype)
    limit = exact if family in ("bert", "vit") else tolerance
    model.zero_grad()
    expected = model(**batch)
    expected.loss.backward()
    inputs = [batch[entry.path] for entry in trace.inputs]
    outputs, gradients, _ = execute(
        trace, dict(model.named_parameters()), dict(model.named_buffers()), inputs
    )
    for entry, output in zip(trace.outputs, outputs, strict=True):
        assert _max_rel(output, expected[entry.path].detach(), 1e-6) < limit, entry.path
    wanted = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert set(gradients) == set(wanted)
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    for (
        name,
        gradient,
    ) in (
        gradients.items()
    ):  # the exact gradient of key biases is zero, so the floor is relative to the largest one
        assert gradient.shape == wanted[name].shape and gradient.dtype == wanted[name].dtype
        assert _max_rel(gradient, wanted[name], 1e-2 * largest) < limit, name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_view_merges_batch_and_sequence(family: str) -> None:
    _, _, trace = _captured(family)
    for node in trace.graph.nodes:
        if node.target is aten.view.default:
            before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
            assert before[0] == after[0], f"{node.meta['key']}: {tuple(before)} → {tuple(after)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_only_ops_of_the_normal_form_are_left(family: str) -> None:
    _, _, trace = _captured(family, torch.bfloat16)
    gone = {
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.t,
        aten._unsafe_view,
        aten.reshape,
        aten.detach,
        aten.alias,
        aten.embedding,
    }
    gone |= {
        aten._log_softmax,
        aten.nll_loss_forward,
        aten.nll_loss_backward,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten.split,
    }
    left = {getattr(node.target, "overloadpacket", node.target) for node in trace.graph.nodes}
    assert not left & gone
    assert {
        ops.dot,
        ops.attention,
        ops.attention_backward,
        ops.sum_exp,
        ops.pick,
        ops.cross_entropy_backward,
    } <= left
    for node in trace.graph.nodes:
        if node.target in (aten.view.default, aten.expand.default):
            assert all(isinstance(size, int) and size >= 0 for size in node.args[1]), node.meta[
                "key"
            ]


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_gradients_have_the_orientation_of_the_parameters(family: str) -> None:
    _, _, trace = _captured(family)
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    for entry in trace.parameters:
        if entry.gradient is not None:
            assert tuple(results[entry.gradient].meta["val"].shape) == entry.view
            assert results[entry.gradient].target not in (aten.transpose.int, aten.view.default), (
                entry.name
            )


def test_fused_projections_of_gpt2_have_views_with_a_dim_of_parts() -> None:
    _, _, trace = _captured("gpt2")
    views = {
        entry.name: (entry.shape, entry.view)
        for entry in trace.parameters
        if entry.shape != entry.view
    }
    assert views == {
        f"transformer.h.{layer}.attn.c_attn.{name}": shapes
        for layer in range(2)
        for name, shapes in (("weight", ((32, 96), (32, 3, 32))), ("bias", ((96,), (3, 32))))
    }
    equations = [
        node.args[0]
        for node in trace.graph.nodes
        if node.target is ops.dot and "h.0.attn.c_attn" in node.meta["module"]
    ]
    assert [
        len(term) for equation in equations for term in equation.replace("->", ",").split(",")
    ] == [3, 3, 4, 4, 3, 3, 3, 4, 3]
    assert not any(
        node.target in (aten.split.Tensor, aten.cat.default) for node in trace.graph.nodes
    )


def test_a_fused_linear_without_bias_has_a_view_with_a_dim_of_parts() -> None:
    class GateUp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up, self.down = nn.Linear(6, 16, bias=False), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return (x + self.down(torch.nn.functional.silu(gate) * up)).square().mean()

    model, x = GateUp().double(), torch.randn(2, 3, 6).double()
    trace = capture(model, (x,))
    assert [
        (entry.name, entry.view) for entry in trace.parameters if entry.shape != entry.view
    ] == [("gate_up.weight", (2, 8, 6))]
    _, gradients, _ = execute(trace, dict(model.named_parameters()), {}, [x])
    model(x).backward()
    torch.testing.assert_close(gradients["gate_up.weight"], model.gate_up.weight.grad)


class Sliced(nn.Module):
    """A model that reads a fused projection by slices in any order."""

    def __init__(self, bias: bool, cuts: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.fused, self.cuts = nn.Linear(6, 24, bias=bias), cuts

    def forward(self, x: Tensor) -> Tensor:
        y = self.fused(x)
        a, b, c = (y[..., first:end] for first, end in self.cuts)
        return (a * b.tanh() + c).square().mean()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("cuts", "seen"),
    [
        (((0, 8), (8, 16), (16, 24)), True),
        (((16, 24), (0, 8), (8, 16)), True),
        (((0, 8), (8, 16), (15, 23)), False),
        (((0, 8), (8, 16), (8, 16)), False),
    ],
    ids=["in order", "out of order", "overlapping", "twice"],
)
def test_slices_that_partition_a_fused_projection_become_its_parts(
    cuts: tuple[tuple[int, int], ...], bias: bool, seen: bool
) -> None:
    model, x = Sliced(bias, cuts).double(), torch.randn(2, 3, 6).double()
    trace = capture(model, (x,))
    assert any(entry.shape != entry.view for entry in trace.parameters) == seen
    assert (
        not any(node.target is aten.slice_backward.default for node in trace.graph.nodes)
        or not seen
    )
    _, gradients, _ = execute(trace, dict(model.named_parameters()), {}, [x])
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_uneven_parts_of_a_projection_stay_unchanged() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = nn.Linear(6, 16)

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = self.fused(x).split([8, 4, 4], dim=-1)
            return (a * torch.cat([b, c], -1)).square().mean()

    model, x = Uneven().double(), torch.randn(2, 3, 6).double()
    trace = capture(model, (x,))
    assert all(entry.shape == entry.view for entry in trace.parameters)
    _, gradients, _ = execute(trace, dict(model.named_parameters()), {}, [x])
    model(x).backward()
    torch.testing.assert_close(gradients["fused.weight"], model.fused.weight.grad)


def test_attention_written_as_matmuls_becomes_dots_over_heads() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).view(2, 5, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
            out = (q @ k.mT).softmax(-1) @ v
            return out.transpose(1, 2).reshape(2, 5, 8).square().mean()

    model, x = Attention().double(), torch.randn(2, 5, 8).double()
    trace = capture(model, (x,))
    assert not any(node.target in (aten.bmm.default, aten.mm.default) for node in trace.graph.nodes)
    equations = [node.args[0] for node in trace.graph.nodes if node.target is ops.dot]
    assert sum(len(equation) == len("bhsd,bhtd->bhst") for equation in equations) == 6
    _, gradients, _ = execute(trace, dict(model.named_parameters()), {}, [x])
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_llama_is_causal_without_a_mask_and_reads_a_given_mask() -> None:
    model, batch, trace = _captured("llama")
    attention = [node for node in trace.graph.nodes if node.target is ops.attention]
    assert [node.args[3:5] for node in attention] == [(None, True)] * 2
    mask = torch.ones_like(batch["input_ids"])
    mask[1, :4] = 0
    masked = capture(model, (), {**batch, "attention_mask": mask})
    inputs = [{**batch, "attention_mask": mask}[entry.path] for entry in masked.inputs]
    outputs, *_ = execute(
        masked, dict(model.named_parameters()), dict(model.named_buffers()), inputs
    )
    torch.testing.assert_close(outputs[0], model(**batch, attention_mask=mask).loss.detach())
    assert not torch.allclose(outputs[0], model(**batch).loss.detach(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["by name", "by position", "inside a module"])
def test_packed_sequences_are_recognized_however_positions_are_passed(how: str) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
            return self.inner(input_ids=input_ids, labels=labels, position_ids=positions).loss

    inner, batch = ZOO.llama(num_layers=1)
    positions = torch.arange(12).remainder(6).expand(4, 12).contiguous()
    model = Outer(inner) if how == "inside a module" else inner
    named = {
        "by name": {**batch, "position_ids": positions},
        "inside a module": {**batch, "positions": positions},
    }
    args, kwargs = (
        ((batch["input_ids"], None, positions), {"labels": batch["labels"]})
        if how == "by position"
        else ((), named[how])
    )
    trace = capture(model, args, kwargs)
    known = {**{str(number): value for number, value in enumerate(args)}, **kwargs}
    outputs, *_ = execute(
        trace,
        dict(model.named_parameters()),
        dict(model.named_buffers()),
        [known[entry.path] for entry in trace.inputs],
    )
    torch.testing.assert_close(outputs[0], inner(**batch, position_ids=positions).loss.detach())


@pytest.mark.slow
def test_a_llama_layer_has_fewer_than_150_nodes() -> None:
    _, _, trace = _captured("llama", torch.bfloat16)
    layers = Counter(
        ".".join(node.meta["module"].split(".")[:3])
        for node in trace.graph.nodes
        if node.op == "call_function"
    )
    assert layers["model.layers.0"] == layers["model.layers.1"] < 150


@pytest.mark.slow
def test_a_model_on_meta_gives_the_same_graph_and_stays_on_meta() -> None:
    _, batch, trace = _captured("llama")
    real, _ = ZOO.llama()
    model = type(real)(real.config).train().to("meta")
    on_meta = capture(model, (), {name: tensor.to("meta") for name, tensor in batch.items()})
    assert [node.format_node() for node in on_meta.graph.nodes] == [
        node.format_node() for node in trace.graph.nodes
    ]
    assert on_meta.fingerprint == trace.fingerprint
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_caches_are_off_in_the_graph_and_the_config_is_unchanged() -> None:
    model, batch = ZOO.gpt2(num_layers=1, use_cache=True)
    trace = capture(model, (), batch)
    assert {output.path for output in trace.outputs} == {"loss", "logits"}
    assert model.config.use_cache is True


def test_nodes_have_the_module_paths_of_the_model() -> None:
    model, _, trace = _captured("llama")
    known = {
        "",
        *dict(model.named_modules()),
        *dict(model.named_parameters()),
        *dict(model.named_buffers()),
    }
    assert {node.meta["module"] for node in trace.graph.nodes} <= known
    unlabelled = [
        n
        for n in trace.graph.nodes
        if n.target is aten.add.Tensor and n.meta["phase"] == "backward" and not n.meta["module"]
    ]
    assert not unlabelled


class _Gates(nn.Module):
    """A model with two fused projections of one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        a, b = self.left(hidden).chunk(2, -1)
        c, d = self.right(hidden).chunk(2, -1)
        return (a * b.sigmoid() + c * d.sigmoid()).pow(2).mean()


def test_two_fused_projections_of_one_activation_have_views_with_a_dim_of_parts() -> None:
    model, x = _Gates().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    trace = capture(model, (x,))
    assert {e.name for e in trace.parameters if e.view == (2, 4, 8)} == {
        "left.weight",
        "right.weight",
    }
    _, gradients, _ = execute(trace, dict(model.named_parameters()), {}, [x])
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-14)


def test_if_all_labels_are_ignored_the_loss_is_nan_and_the_gradient_zero_as_in_torch() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    model, batch = Classifier(), (torch.randn(4, 6, 8), torch.full((4, 6), -100))
    (loss,), gradients, _ = execute(
        capture(model, batch), dict(model.named_parameters()), {}, batch
    )
    model(*batch).backward()
    assert loss.isnan()
    assert model.head.weight.grad is not None and not model.head.weight.grad.any()
    assert not gradients["head.weight"].any() and not gradients["head.bias"].any()
