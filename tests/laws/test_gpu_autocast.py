"""`torch.autocast("cuda")` casts a captured model, and the plain model on a CPU, as it does on a
GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import autocast, capture
from autopar.capture.trace import Trace
from autopar.constraints import fsdp
from autopar.errors import CaptureError, RuntimeStateError
from autopar.verification.comparison import relative_error

BF16 = torch.bfloat16
F = nn.functional


@contextmanager
def around(kind: str, dtype: torch.dtype = BF16) -> Iterator[None]:
    """Enter `torch.autocast` of a device type that need not exist."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


class Net(nn.Module):
    """A product, a norm, and a softmax. `cast` is the autocast that the model enters."""

    def __init__(self, cast: str = "") -> None:
        super().__init__()
        self.cast, self.up, self.norm = cast, nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        if self.cast:
            with torch.autocast(self.cast, dtype=BF16):
                return self.loss(x)
        return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).softmax(-1).square().mean()


class ByHand(Net):
    """The same computation with the casts of a GPU autocast written out."""

    def loss(self, x: Tensor) -> Tensor:
        up = F.linear(x.to(BF16), self.up.weight.to(BF16), self.up.bias.to(BF16))
        return self.norm(up.float()).softmax(-1).square().mean()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, 16)}


def dtypes(trace: Trace) -> list[tuple[str, torch.dtype]]:
    made = [
        node
        for node in trace.graph.nodes
        if node.op == "call_function" and isinstance(node.meta["val"], Tensor)
    ]
    return [(str(node.target), node.meta["val"].dtype) for node in made]


@pytest.mark.parametrize("inside", [True, False], ids=["in forward", "around the call"])
def test_gpu_autocast_is_captured_as_explicit_casts(inside: bool) -> None:
    wanted = capture(ByHand(), (), batch())
    if inside:
        found = capture(Net("cuda"), (), batch())
    else:
        with around("cuda"):
            found = capture(Net(), (), batch())
    assert dtypes(found) == dtypes(wanted)
    assert [p.compute_dtype for p in found.parameters] == [
        p.compute_dtype for p in wanted.parameters
    ]
    assert {p.compute_dtype for p in found.parameters} == {BF16, torch.float32}
    assert dtypes(capture(Net("cpu"), (), batch())) != dtypes(found)  # softmax in bf16


@pytest.mark.parametrize("inside", [True, False], ids=["in forward", "around the call"])
def test_programs_under_gpu_autocast_match_the_model_under_gpu_autocast(inside: bool) -> None:
    torch.manual_seed(0)
    model = Net("cuda" if inside else "")
    with torch.autocast("cpu", enabled=False) if inside else around("cuda"):
        plan = autopar.plan(
            model, 2, example_inputs=batch(), hardware="h100-sxm", constraints=(fsdp(),)
        )
        assert {
            s.collective.dtype for _, s in plan.steps() if s.collective.kind == "all_gather"
        } == {"bfloat16", "float32"}
        assert autopar.check(plan, model, batch()).ok
        assert autopar.verify(plan, model, batch()).ok
        assert autopar.verify(plan, model, batch(), dtype=None).dtype == "bfloat16"
        module = autopar.compile(model, 1, example_inputs=batch(), hardware="cpu-gloo")
        loss = module(**batch())
    plain = ByHand()
    plain.load_state_dict(model.state_dict())
    wanted = plain(**batch())
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(
        loss, wanted, rtol=5e-3, atol=0.0
    )  # the bias may be added before or after rounding
    for name, parameter in plain.named_parameters():
        assert (
            relative_error(module.get_parameter(name).grad.full_tensor(), parameter.grad, 0.0)
            < 2e-2
        )


def test_disabling_autocast_for_the_device_type_of_a_tensor_disables_gpu_autocast() -> None:
    class Island(Net):
        def loss(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                return self.up(x).square().mean()

    with around("cuda"):
        trace = capture(Island(), (), batch())
        assert (
            autopar.verify(
                autopar.plan(Island(), 2, example_inputs=batch(), hardware="h100-sxm"),
                Island(),
                batch(),
            ).lower_parts
            == ()
        )
    assert {dtype for _, dtype in dtypes(trace)} == {torch.float32}


def test_gpu_autocast_within_a_model_has_the_default_dtype_of_a_gpu() -> None:
    class Half(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda"):
                hidden = self.up(x)
            with torch.autocast("cuda", enabled=False):
                return self.loss(hidden.float())

    trace = capture(Half(), (), batch())
    assert {dtype for name, dtype in dtypes(trace) if "dot" in name} == {
        torch.float16,
        torch.float32,
    }
    assert autopar.verify(
        autopar.plan(Half(), 2, example_inputs=batch(), hardware="h100-sxm"),
        Half(),
        batch(),
        dtype=None,
    ).ok


def test_a_call_must_have_the_autocast_of_compile_for_any_device_type() -> None:
    with around("cuda"):
        module = autopar.compile(Net(), 1, example_inputs=batch(), hardware="cpu-gloo")
    with pytest.raises(
        RuntimeStateError,
        match=r"called under no autocast, but compiled under autocast to torch\.bfloat16 of cuda",
    ):
        module(**batch())
    with (
        around("cpu"),
        pytest.raises(
            RuntimeStateError, match=r"called under autocast to torch\.bfloat16, but compiled under"
        ),
    ):
        module(**batch())


def test_autocast_to_two_dtypes_is_refused() -> None:
    with (
        around("cuda"),
        around("cpu", torch.float16),
        pytest.raises(CaptureError, match="for two device types with different dtypes"),
    ):
        capture(Net(), (), batch())


def test_ops_that_gpu_autocast_refuses_are_refused() -> None:
    class Unsafe(Net):
        def loss(self, x: Tensor) -> Tensor:
            return F.binary_cross_entropy(self.up(x).sigmoid(), x.sigmoid().detach())

    with pytest.raises(CaptureError, match=r"binary_cross_entropy under torch\.autocast"):
        capture(Unsafe("cuda"), (), batch())
    assert capture(Unsafe("cpu"), (), batch())


def test_the_autocast_state_is_restored_afterwards() -> None:
    states = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    own = [getattr(torch.autocast, name) for name in ("__init__", "__enter__", "__exit__")]
    capture(Net("cuda"), (), batch())

    class Failing(Net):
        def loss(self, x: Tensor) -> Tensor:
            return self.up(x).mean() if self.up(x).mean() > 0 else self.up(x).sum()

    with pytest.raises(CaptureError):
        capture(Failing("cuda"), (), batch())
    assert [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ] == states
    assert [getattr(torch.autocast, name) for name in ("__init__", "__enter__", "__exit__")] == own
    with torch.autocast("cpu", dtype=BF16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).softmax(-1).dtype == BF16


_MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": autocast._LOWER,
    "AT_FORALL_FP32": autocast._FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": autocast._FP32_RESULT,
    "AT_FORALL_PROMOTE": autocast._WIDEST,
}


def test_autocast_lists_match_the_installed_torch() -> None:
    text = (Path(torch.__path__[0]) / "include/ATen/autocast_mode.h").read_text()
    there = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    }
    listed = set()
    for macro, ops in _MACROS.items():
        body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", text)[1]
        names = {".".join(re.split(r",\s*", name)) for name in re.findall(r"_\(([\w, ]+)\)", body)}
        assert names and {name.partition(".")[0] for name in names} <= ops, macro
        listed |= names
    others = {
        name for name in there - listed if "cudnn" not in name and ".names_" not in name
    }  # older versions of torch have named dims
    others -= {"linalg_matrix_sqrth"}  # new in torch 2.15, not in a macro
    assert others == {*autocast._WITH_FP32_RESULT, *autocast._REFUSED}
    every = [*_MACROS.values(), autocast._REFUSED, frozenset({"norm"})]
    assert sum(map(len, every)) == len(frozenset().union(*every))


def test_each_autocast_list_casts_its_ops() -> None:
    x, wide = torch.randn(4, 4), torch.randn(4, 4, dtype=torch.float64)
    narrow = x.to(BF16)
    with autocast.gpu_autocast(on_gpu=False), torch.autocast("cuda", dtype=BF16):
        assert (x @ x).dtype == F.linear(x, x, x[0]).dtype == nn.LSTM(4, 4)(x)[0].dtype == BF16
        assert {
            v.dtype
            for v in (
                narrow.exp(),
                F.layer_norm(narrow, (4,)),
                F.mse_loss(narrow, narrow),
                narrow**2,
            )
        } == {torch.float32}
        assert {
            v.dtype
            for v in (narrow.sum(), narrow.softmax(0), narrow.norm(), torch.norm(narrow, 2, 1))
        } == {torch.float32}
        assert (
            narrow.softmax(0, dtype=torch.float64).dtype
            == wide.sum().dtype
            == torch.norm(wide, 1, 0).dtype
            == torch.float64
        )
        assert (
            torch.addcmul(x, narrow, narrow).dtype == torch.float32
            and torch.addcmul(narrow, narrow, narrow).dtype == BF16
        )
        assert (wide @ wide).dtype == torch.float64 and torch.ones(
            2, 2, dtype=torch.int64
        ).sum().dtype == torch.int64
        torch.testing.assert_close(torch.norm(narrow, 1, 0), narrow.float().abs().sum(0))
        torch.testing.assert_close(narrow.norm(), narrow.float().square().sum().sqrt())


def test_cpu_autocast_around_a_model_on_a_gpu_casts_nothing() -> None:
    x = torch.randn(4, 4)
    with around("cpu"), autocast.gpu_autocast(on_gpu=True):
        assert (x @ x).dtype == torch.float32
        with torch.autocast(x.device.type, dtype=BF16):
            assert (x @ x).dtype == BF16 and (x @ x).softmax(-1).dtype == torch.float32


class Product(torch.autograd.Function):
    """A product written by a user with support for autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class WideProduct(Product):
    """The same in fp32 for all input dtypes."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight


class Again(Net):
    """Enters autocast again in backward."""

    def __init__(self, how: str) -> None:
        super().__init__("cuda")
        self.how, self.weight = how, nn.Parameter(torch.randn(16, 16))

    def loss(self, x: Tensor) -> Tensor:
        if self.how == "a checkpoint":
            return torch.utils.checkpoint.checkpoint(super().loss, x, use_reentrant=False)  # type: ignore[no-any-return]
        product = WideProduct if self.how == "a product in fp32" else Product
        return product.apply(self.up(x), self.weight).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.float64, None], ids=str)
@pytest.mark.parametrize("how", ["a checkpoint", "a product", "a product in fp32"])
def test_autocast_entered_in_backward_has_the_meaning_of_forward(
    how: str, dtype: torch.dtype | None
) -> None:
    model = Again(how)
    plan = autopar.plan(model, 2, example_inputs=batch(), hardware="h100-sxm")
    assert autopar.verify(plan, model, batch(), dtype=dtype).ok
    products = {made for name, made in dtypes(capture(model, (), batch())) if "dot" in name}
    assert products == ({BF16, torch.float32} if how == "a product in fp32" else {BF16})


def test_an_autocast_created_earlier_that_torch_disabled_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):

        class Decorated(Net):
            @torch.autocast("cuda", dtype=BF16)
            def forward(self, x: Tensor) -> Tensor:
                return self.loss(x)

    assert BF16 not in dict(dtypes(capture(Decorated(), (), batch()))).values()
    assert caplog.text.count("disabled torch.autocast('cuda') with dtype torch.bfloat16") == 1
    caplog.clear()
    capture(Net("cuda"), (), batch())
    assert "disabled" not in caplog.text
