"""The seconds that a kernel saves by overlapping a product with the collective next to it. Both
streams are simulated chunk by chunk.

With n ranks and q chunks of each rank's part, (n−1)·q chunks move. For an all_gather, a rank
multiplies its own part while the first chunk arrives, and each other chunk as soon as it has
arrived. For a reduce_scatter, it computes the others' chunks first. It sends each one after
computing it and after sending the previous one. It computes its own part last, and adds the
received chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.certificate.intra_op import call_s, count_work, local_infos, product_dtype
from autopar.certificate.rates import Rates
from autopar.core.layout import Strategy
from autopar.rules import Call, TensorInfo

_NAMES = {"all_gather": "all_gather_matmul", "reduce_scatter": "matmul_reduce_scatter"}
_CHUNKS = (1, 2, 4)
Normed = Sequence[tuple[Call, Strategy]]


@dataclass(frozen=True, slots=True)
class SavingProduct:
    """A product whose operand or result is moved by a collective.

    Attributes:
        call: the call of the product, with the shapes of whole tensors.
        strategy: the layouts of its operands and results.
        rates: rates of the mesh and profile.
        kind: kind of the collective.
        num: number of ranks of the collective.
        dim: dim of the product's result along which chunks are cut.
        adds: whether another tensor of the result's shape is added to it.
    """

    call: Call
    strategy: Strategy
    rates: Rates
    kind: str
    num: int
    dim: int
    adds: bool

    def find_saving(self, moved_s: float, normed: Normed) -> tuple[float, int]:
        """Return the seconds that a kernel saves, and the number of chunks of a rank's part.

        Args:
            moved_s: seconds of the collective alone.
            normed: calls that the kernel computes after the product.
        """
        kernels = self.rates.profile.kernels
        reached = kernels.get(_NAMES[self.kind], 0.0)
        hidden = list(self._hidden_seconds(moved_s)) if reached else []
        most, chunks = max(hidden, key=lambda pair: (pair[0], -pair[1]), default=(0.0, 1))
        most, chunks = (most, chunks) if most > 0.0 else (0.0, 1)
        if not normed:
            return reached * most, chunks
        tail, further_s = kernels.get("reduce_add_rmsnorm", 0.0), 0.0
        if tail and most:
            apart_s = sum(call_s(call, strategy, self.rates) for call, strategy in normed)
            further_s = self._pass_s(1) + apart_s - self._pass_s(3) / tail
        return (min(reached * most + further_s, moved_s) if further_s > 0.0 else 0.0), chunks

    def _hidden_seconds(self, moved_s: float) -> Iterator[tuple[float, int]]:
        """Yield (seconds of overlap, number of chunks) for each number of chunks that divides the
        parts evenly."""
        length, product_s = self._result_chunk(1).shape[self.dim], self._product_s(1)
        for chunks in _CHUNKS:
            if length % (self.num * chunks) == 0:
                both_s = product_s + moved_s - self._overlapped_s(moved_s, chunks)
                yield min(both_s, product_s, moved_s), chunks

    def _overlapped_s(self, moved_s: float, chunks: int) -> float:
        others = (self.num - 1) * chunks
        one_s, own_s = self._product_s(self.num * chunks), self._product_s(self.num)
        sent_s = moved_s / others + self.rates.profile.launch_overhead_s
        computed = moved = 0.0
        if self.kind == "all_gather":
            computed = own_s
            for _ in range(others):
                moved += sent_s
                computed = max(computed, moved) + one_s
            return computed
        for _ in range(others):
            computed += one_s
            moved = max(moved, computed) + sent_s
        return max(computed + own_s, moved) + self._pass_s(1)

    def _product_s(self, num: int) -> float:
        """Return the seconds of one of `num` chunks of the product."""
        sizes = self.rates.mesh.shape
        factors, result_term = self._terms()
        letter = result_term[self.dim]
        reads = local_infos(self.call.inputs, self.strategy.inputs, sizes)
        cut = [_cut_dim(i, term, letter, num) for i, term in zip(reads, factors, strict=False)]
        bias = reads[len(cut) :]  # it has the last dims of the result
        cut += [
            _cut_dim(i, result_term[len(result_term) - len(i.shape) :], letter, num) for i in bias
        ]
        result = self._result_chunk(num)
        work = count_work(self.call, cut, [result], mirrored=False)
        seconds = self.rates.op_s("matmul", *work, product_dtype(cut))
        if self.adds:
            size = math.prod(result.shape) * result.dtype.itemsize
            seconds += self.rates.op_s("elementwise", 0, 3 * size, result.dtype)
        return seconds

    def _result_chunk(self, num: int) -> TensorInfo:
        """Return the shape and dtype of one of `num` chunks of the local result."""
        (result_info,) = local_infos(
            self.call.outputs, self.strategy.outputs, self.rates.mesh.shape
        )
        _, result = self._terms()
        return _cut_dim(result_info, result, result[self.dim], num)

    def _terms(self) -> tuple[list[str], str]:
        factor_terms, result = str(self.call.args[0]).replace(" ", "").split("->")
        return factor_terms.split(","), result

    def _pass_s(self, further: int) -> float:
        """Return the seconds of a pass over one part per rank and `further` additional parts."""
        chunk = self._result_chunk(1)
        part = chunk.dtype.itemsize * math.prod(chunk.shape) // self.num
        return self.rates.op_s("elementwise", 0, (self.num + further) * part, chunk.dtype)


def _cut_dim(info: TensorInfo, term: str, letter: str, num: int) -> TensorInfo:
    """Return a tensor's shape and dtype after the dim of one letter is cut into `num` chunks."""
    pairs = zip(term, info.shape, strict=True)
    return TensorInfo(tuple(-(-n // num) if at == letter else n for at, n in pairs), info.dtype)
