"""Modules and functions whose captures are compared with the plain model, by memory format: the
remaining cases, and the list of all cases."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from format_cases import (
    CONVOLUTIONS,
    IMAGE,
    NORMS,
    POOLING,
    SEQUENCE,
    SPACE,
    TOKENS,
    Case,
    apart,
    ids,
    module,
    of,
    symmetric,
)
from format_cases_of_rows import ATTENTION, LOSSES, RECURRENT, TABLES
from torch import Tensor, nn

SORTED: Mapping[str, Case] = {
    "cumsum": of(lambda x: x.cumsum(1), IMAGE),
    "cumprod": of(lambda x: x.cumprod(2), IMAGE),
    "cummax": of(lambda x: x.cummax(1).values, IMAGE, ties=True),
    "cummin": of(lambda x: x.cummin(3).values, IMAGE, ties=True),
    "logcumsumexp": of(lambda x: x.logcumsumexp(1), IMAGE),
    "sort": of(lambda x: x.sort(1).values, IMAGE, ties=True),
    "sort descending": of(
        lambda x: x.sort(dim=-1, descending=True, stable=True).values, IMAGE, ties=True
    ),
    "topk": of(lambda x: x.topk(2, 1).values, IMAGE, ties=True),
    "kthvalue": of(lambda x: x.kthvalue(3, 2).values, IMAGE, ties=True),
    "median": of(lambda x: x.median(1).values, IMAGE, ties=True),
    "mode": of(lambda x: x.mode(-1).values, IMAGE, ties=True),
    "quantile": of(lambda x: x.quantile(0.3, 1), IMAGE, ties=True),
    "max": of(lambda x: x.max(1).values, IMAGE, ties=True),
    "amax": of(lambda x: x.amax((1, 3)), IMAGE, ties=True),
    "aminmax": of(lambda x: torch.stack(x.aminmax(dim=1)), IMAGE, ties=True),
    "gather": of(lambda x: x.gather(1, ids(4, 2, 3, 6, 6)), IMAGE),
    "scatter": of(
        lambda x, y: x.scatter(1, torch.tensor([2, 0]).view(1, 2, 1, 1).expand(2, 2, 6, 6), y),
        IMAGE,
        (2, 2, 6, 6),
    ),
    "scatter add": of(lambda x, y: x.scatter_add(2, ids(6, *IMAGE), y), IMAGE, IMAGE),
    "scatter reduce": of(
        lambda x, y: x.scatter_reduce(2, ids(6, *IMAGE), y, "amax"), IMAGE, IMAGE, ties=True
    ),
    "scatter product": of(
        lambda x, y: x.scatter_reduce(2, ids(6, *IMAGE), y, "prod"), IMAGE, IMAGE
    ),
    "scatter mean": of(lambda x, y: x.scatter_reduce(2, ids(6, *IMAGE), y, "mean"), IMAGE, IMAGE),
    "index select": of(lambda x: x.index_select(1, ids(4, 5)), IMAGE),
    "index add": of(lambda x, y: x.index_add(2, ids(6, 6), y, alpha=2), IMAGE, IMAGE),
    "index copy": of(lambda x, y: x.index_copy(1, torch.tensor([2, 0, 1, 3]), y), IMAGE, IMAGE),
    "index fill": of(lambda x: x.index_fill(1, torch.tensor([2, 0]), 0.5), IMAGE),
    "index put": of(
        lambda x, y: x.index_put((ids(2, 6), ids(4, 6)), y[0, 0], accumulate=True), IMAGE, IMAGE
    ),
    "index": of(lambda x: x[:, ids(4, 5), ids(6, 5)], IMAGE),
    "index apart": of(lambda x: x[ids(2, 5), :, ids(6, 5)], IMAGE),
    "take along": of(lambda x: x.take_along_dim(ids(4, 2, 3, 6, 6), 1), IMAGE),
    "take": of(lambda x: x.take(ids(200, 7)), IMAGE),
    "put": of(
        lambda x, y: x.put(ids(200, 7), y[0, 0, 0, 0].expand(7), accumulate=True), IMAGE, IMAGE
    ),
    "masked fill": of(lambda x: x.masked_fill(ids(2, 2, 1, 6, 6).bool(), 0.5), IMAGE),
    "masked scatter": of(lambda x, y: x.masked_scatter(ids(2, *IMAGE).bool(), y), IMAGE, IMAGE),
    "where": of(lambda x, y: torch.where(ids(2, *IMAGE).bool(), x, y), IMAGE, IMAGE),
    "prod": of(lambda x: x.prod(1), IMAGE),
    "prod of all": of(lambda x: x.prod(), (2, 3, 4)),
    "std": of(lambda x: x.std((1, 2)), IMAGE),
    "var": of(lambda x: torch.stack(torch.var_mean(x, 1)), IMAGE),
    "norm": of(lambda x: x.norm(2, 1), IMAGE),
    "norm of threes": of(lambda x: x.norm(3, (1, 2)), IMAGE),
    "logsumexp": of(lambda x: x.logsumexp(1), IMAGE),
    "softmax": of(lambda x: x.softmax(1), IMAGE),
    "log softmax": of(lambda x: x.log_softmax(1), IMAGE),
    "repeat": of(lambda x: x.repeat(2, 1, 3, 1), IMAGE),
    "repeat interleave": of(lambda x: x.repeat_interleave(3, 1), IMAGE),
    "trapezoid": of(lambda x: torch.trapezoid(x, dim=1), IMAGE),
    "cumulative trapezoid": of(lambda x: torch.cumulative_trapezoid(x, dim=1), IMAGE),
    "diff": of(lambda x: x.diff(dim=2), IMAGE),
    "renorm": of(lambda x: x.renorm(2, 1, 1.0), IMAGE),
    "diagonal": of(lambda x: x.diagonal(0, 1, 3), IMAGE),
    "diag embed": of(lambda x: x.diag_embed(1, 0, 2), SEQUENCE),
    "tril": of(lambda x: x.tril(1), IMAGE),
    "triu": of(lambda x: x.triu(-1), IMAGE),
    "view dtype": of(
        lambda x: torch.view_as_real(torch.view_as_complex(x.contiguous())), (2, 3, 2)
    ),
}

POINTWISE: Mapping[str, Case] = {
    name: of(function, IMAGE)
    for name, function in {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "mish": F.mish,
        "elu": F.elu,
        "selu": F.selu,
        "celu": lambda x: F.celu(x, 0.7),
        "softplus": F.softplus,
        "hardtanh": F.hardtanh,
        "hardswish": F.hardswish,
        "hardsigmoid": F.hardsigmoid,
        "leaky": F.leaky_relu,
        "softshrink": F.softshrink,
        "hardshrink": F.hardshrink,
        "threshold": lambda x: F.threshold(x, 0.1, 0.2),
        "logsigmoid": F.logsigmoid,
        "tanhshrink": F.tanhshrink,
        "softsign": F.softsign,
        "glu": lambda x: F.glu(x, 1),
        "softmin": lambda x: F.softmin(x, 2),
        "relu6": F.relu6,
        "erfinv": lambda x: torch.erfinv(x.tanh() * 0.9),
        "clamp": lambda x: x.clamp(-0.5, 0.5),
        "sinc": torch.sinc,
        "digamma": lambda x: torch.digamma(x.abs() + 1),
    }.items()
}
POINTWISE = {
    **POINTWISE,
    "prelu": module(lambda: nn.PReLU(4), IMAGE),
    "bilinear": module(lambda: _Bilinear(), (6, 4)),
    "add of a row": of(lambda x, y: x + y, IMAGE, (6, 1)),
    "lerp": of(torch.lerp, IMAGE, IMAGE, IMAGE),
    "addcmul": of(torch.addcmul, IMAGE, IMAGE, IMAGE),
    "addcdiv": of(lambda x, y, z: torch.addcdiv(x, y, z.exp()), IMAGE, IMAGE, IMAGE),
    "max of two": of(torch.maximum, IMAGE, IMAGE),
    "copysign": of(torch.copysign, IMAGE, IMAGE),
    "atan2": of(torch.atan2, IMAGE, IMAGE),
    "cross": of(lambda x, y: torch.linalg.cross(x, y, dim=1), (2, 3, 4, 4), (2, 3, 4, 4)),
    "cat": of(lambda x, y: torch.cat([x, y, x], 1), IMAGE, IMAGE),
    "stack": of(lambda x, y: torch.stack([x, y], 2), IMAGE, IMAGE),
    "chunks": of(lambda x: torch.cat(x.chunk(3, 2)[::-1], 1), IMAGE),
}


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(4, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.tanh())


PRODUCTS: Mapping[str, Case] = {
    "linear": module(lambda: nn.Linear(8, 5), TOKENS),
    "linear of an image": module(lambda: nn.Linear(6, 5), IMAGE),
    "linear of a vector": module(lambda: nn.Linear(6, 5), (6,)),
    "mm": of(torch.mm, (5, 6), (6, 4)),
    "bmm": of(torch.bmm, (3, 5, 6), (3, 6, 4)),
    "matmul": of(torch.matmul, IMAGE, (6, 5)),
    "matmul broadcast": of(torch.matmul, IMAGE, (4, 6, 5)),
    "mv": of(torch.mv, (5, 6), (6,)),
    "dot": of(torch.dot, (6,), (6,)),
    "outer": of(torch.outer, (6,), (5,)),
    "addmm": of(lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), (4,), (5, 6), (6, 4)),
    "baddbmm": of(torch.baddbmm, (3, 5, 4), (3, 5, 6), (3, 6, 4)),
    "addbmm": of(torch.addbmm, (5, 4), (3, 5, 6), (3, 6, 4)),
    "addmv": of(torch.addmv, (5,), (5, 6), (6,)),
    "einsum": of(lambda x, y: torch.einsum("nchw,cd->ndwh", x, y), IMAGE, (4, 5)),
    "einsum of batches": of(lambda x, y: torch.einsum("nchw,nchv->nwvh", x, y), IMAGE, IMAGE),
    "tensordot": of(lambda x, y: torch.tensordot(x, y, ([1, 3], [0, 1])), IMAGE, (4, 6, 5)),
    "kron": of(torch.kron, (2, 3), (4, 2)),
    "baddbmm expanded": of(
        lambda x, y: torch.baddbmm(x[:1, :1].expand(3, 5, 4), x[..., :1].expand(3, 5, 6), y),
        (3, 5, 4),
        (3, 6, 4),
    ),
}

SQUARE = (2, 4, 4)
LINALG: Mapping[str, Case] = {
    "inv": of(torch.linalg.inv, SQUARE, prepare=symmetric, ties=True),
    "pinv": of(torch.linalg.pinv, (2, 5, 3), prepare=apart, ties=True),
    "solve": of(lambda a, b: torch.linalg.solve(symmetric(a), b), SQUARE, (2, 4, 3)),
    "solve right": of(
        lambda a, b: torch.linalg.solve(symmetric(a), b, left=False), SQUARE, (2, 3, 4)
    ),
    "solve of a vector": of(lambda a, b: torch.linalg.solve(symmetric(a), b), (4, 4), (4,)),
    "triangular": of(
        lambda a, b: torch.linalg.solve_triangular(symmetric(a), b, upper=True), SQUARE, (2, 4, 3)
    ),
    "cholesky": of(lambda a: torch.linalg.cholesky(symmetric(a)), SQUARE),
    "cholesky solve": of(
        lambda b, a: torch.cholesky_solve(b, torch.linalg.cholesky(symmetric(a))), (2, 4, 3), SQUARE
    ),
    "cholesky inverse": of(
        lambda a: torch.cholesky_inverse(torch.linalg.cholesky(symmetric(a))), SQUARE
    ),
    "det": of(torch.linalg.det, SQUARE, prepare=symmetric, ties=True),
    "slogdet": of(lambda a: torch.linalg.slogdet(a)[1], SQUARE, prepare=symmetric, ties=True),
    "svd": of(
        lambda a: torch.linalg.svd(a, full_matrices=False)[1], (2, 5, 3), prepare=apart, ties=True
    ),
    "svd vectors": of(
        lambda a: torch.cat([x.abs().flatten() for x in torch.linalg.svd(a, full_matrices=False)]),
        (2, 5, 3),
        prepare=apart,
        ties=True,
    ),
    "svdvals": of(torch.linalg.svdvals, (2, 5, 3), prepare=apart, ties=True),
    "qr": of(lambda a: torch.linalg.qr(apart(a))[1].abs(), (2, 5, 3)),
    "qr vectors": of(lambda a: torch.linalg.qr(apart(a))[0].abs(), (2, 5, 3)),
    "eigh": of(lambda a: torch.linalg.eigh(symmetric(a))[0], SQUARE, ties=True),
    "eigh vectors": of(lambda a: torch.linalg.eigh(symmetric(a))[1].abs(), SQUARE, ties=True),
    "eigvalsh": of(lambda a: torch.linalg.eigvalsh(symmetric(a)), SQUARE, ties=True),
    "eig": of(lambda a: torch.linalg.eig(symmetric(a))[0].abs().sort(-1).values, SQUARE, ties=True),
    "lu": of(lambda a: torch.linalg.lu(symmetric(a))[2], SQUARE, ties=True),
    "lu solve": of(
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(symmetric(a)), b),
        SQUARE,
        (2, 4, 3),
    ),
    "matrix power": of(lambda a: torch.linalg.matrix_power(a, 3), SQUARE),
    "matrix exp": of(lambda a: torch.linalg.matrix_exp(a * 0.3), SQUARE),
    "matrix norm": of(
        lambda a: torch.linalg.matrix_norm(a, 2), (2, 5, 3), prepare=apart, ties=True
    ),
    "nuclear norm": of(
        lambda a: torch.linalg.matrix_norm(a, "nuc"), (2, 5, 3), prepare=apart, ties=True
    ),
    "householder": of(
        lambda a, t: torch.linalg.householder_product(a.tril(-1), t), (2, 5, 3), (2, 3)
    ),
    "vander": of(lambda x: torch.linalg.vander(x), (2, 4)),
    "multi dot": of(lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (3, 4), (4, 5), (5, 2)),
}


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x)


WAVES: Mapping[str, Case] = {
    "fft": of(lambda x: _real(torch.fft.fft(x)), SEQUENCE),
    "fft of channels": of(lambda x: _real(torch.fft.fft(x, dim=1)), IMAGE),
    "rfft": of(lambda x: _real(torch.fft.rfft(x)), SEQUENCE),
    "irfft": of(lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j), n=9), SEQUENCE),
    "fft2": of(lambda x: _real(torch.fft.fft2(x)), IMAGE),
    "rfft2": of(lambda x: _real(torch.fft.rfft2(x, norm="ortho")), IMAGE),
    "irfft2": of(lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 1j), IMAGE),
    "fftn": of(lambda x: _real(torch.fft.fftn(x, dim=(1, 2))), IMAGE),
    "hfft": of(lambda x: torch.fft.hfft(torch.fft.ihfft(x) * (1 + 1j), n=9), SEQUENCE),
    "fftshift": of(lambda x: torch.fft.fftshift(x, dim=2), IMAGE),
    "stft": of(
        lambda x: _real(
            torch.stft(x, 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True)
        ),
        (2, 24),
    ),
    "istft": of(
        lambda x: torch.istft(
            torch.stft(x, 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True),
            8,
            4,
            window=torch.hann_window(8, dtype=x.dtype),
        ),
        (2, 24),
    ),
    "complex": of(lambda x, y: torch.complex(x, y).abs(), IMAGE, IMAGE),
    "complex product": of(
        lambda x, y: _real(torch.complex(x, y) @ torch.complex(y, x).mT), IMAGE, IMAGE
    ),
    "conjugate": of(
        lambda x, y: (torch.complex(x, y).conj() * torch.complex(y, x)).imag, IMAGE, IMAGE
    ),
    "adjoint": of(lambda x, y: _real(torch.complex(x, y).mH @ torch.complex(y, x)), IMAGE, IMAGE),
    "polar": of(lambda x, y: _real(torch.polar(x.exp(), y)), IMAGE, IMAGE),
    "angle": of(lambda x, y: torch.angle(torch.complex(x, y)), IMAGE, IMAGE),
    "complex inverse": of(
        lambda x, y: _real(torch.linalg.inv(torch.complex(symmetric(x), y * 0.1))), SQUARE, SQUARE
    ),
}

GROUPS: Mapping[str, Mapping[str, Case]] = {
    "convolutions": CONVOLUTIONS,
    "pooling": POOLING,
    "space": SPACE,
    "norms": NORMS,
    "attention": ATTENTION,
    "tables": TABLES,
    "recurrent": RECURRENT,
    "losses": LOSSES,
    "sorted": SORTED,
    "pointwise": POINTWISE,
    "products": PRODUCTS,
    "linalg": LINALG,
    "waves": WAVES,
}
CASES: Mapping[str, Case] = {
    name: case for group in GROUPS.values() for name, case in group.items()
}
