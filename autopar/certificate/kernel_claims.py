"""Check every kernel of a plan: whether its product is at an end of the collective and can run in
the kernel, and whether it saves as much as claimed.

Ranks along the collective's axis are in one node, so they can access each other's memory. A product
runs with one collective of a tensor, and is divided into chunks along its operand or along its
result. A result that is scattered as it is computed never exists as a whole, so nothing else starts
from it, reads it or keeps it. A collective that has slack in every plan has no kernel. The product
must be able to run where its operand is first read: its other factor is a parameter, an input, or a
forward result. A tensor from another stage counts as computed in its phase, and has slack in the
other phase. If a product is only added to another tensor, in its own phase, its kernel can also add
that tensor and scatter the sum, unless the layout changes before. A forward product can also
compute the norm after the sum (`NormWalk`).

The memory that kernels share with their peers along an axis is allocated once for all kernels that
move a tensor of the same form in the same pieces. With n ranks and q chunks, it has two slots for a
rank's part if the tensor is gathered, and 2·n slots if it is scattered, each a multiple of a line
of 128 bytes, and 1 + n + n·q flags, each in a separate line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from autopar import ops
from autopar.analysis.fusable import NORMED
from autopar.capture.trace import Trace
from autopar.certificate.facts import Claims, Facts, Tensor, TensorReader
from autopar.certificate.intra_op import OwnWalk
from autopar.certificate.rates import Rates
from autopar.certificate.report import Finding, near
from autopar.certificate.savings import SavingProduct
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.cost.kernel_times import NAMES, terms_of
from autopar.plans import Communication, InKernel, Plan
from autopar.rules import Call, TensorInfo, call_of, operands_of
from autopar.sharding import pattern_of
from autopar.validation.shards import local_lengths

# --------------------------------------------------------------------------------------------------
# Kernels that also compute a norm. Sum and norm follow the product, have whole rows in the layout
# of its part, and round in the same way as the product.

_WIDE = {torch.float64: torch.float64}  # all other dtypes are normalized in float32


@dataclass(frozen=True, slots=True)
class NormWalk:
    """The sum after one product, `total`, its squares and its norm."""

    facts: Facts
    claims: Claims
    product: str
    nodes: tuple[fx.Node, ...]

    @staticmethod
    def of(facts: Facts, claims: Claims, product: str) -> NormWalk | None:
        """Find the sum of a product and the first weighted norm of it in forward.

        Args:
            facts: the traced model.
            claims: the plan's strategies.
            product: key of the node that computes the product.

        Returns:
            None if the product has no such sum or norm.
        """
        readers = facts.tensors[product, 0].readers
        total = facts.nodes.get(readers[0].key) if len(readers) == 1 else None
        if total is None or total.target is not torch.ops.aten.add.Tensor:
            return None
        for reader in facts.tensors[total.meta["key"], 0].readers:
            norm = facts.nodes.get(reader.key)  # None for an output
            if (
                norm is None
                or norm.target is not ops.rms_norm
                or norm.args[0] is not total
                or norm.meta["phase"] != "forward"
            ):
                continue
            squares, weight = norm.args[1:3]
            # A weight that is computed later may not exist when the sum is computed.
            if isinstance(squares, fx.Node) and isinstance(weight, fx.Node) and weight < total:
                return NormWalk(facts, claims, product, (total, squares, norm))
        return None

    @property
    def strategies(self) -> list[Strategy | None]:
        """Return the strategies of the sum, of the squares and of the norm; None for one that the
        plan does not list."""
        return [self.claims.chosen.get(node.meta["key"]) for node in self.nodes]

    def wrong(self, layout: Layout) -> Iterator[str]:
        """Yield the reasons why a kernel cannot compute sum and norm if a part has this layout."""
        if len(self.facts.nodes[self.product].args) > 3:
            yield "its product has a bias"
        if not self._is_plain_sum():
            yield "the added tensor has a different shape or dtype"
        if not self._is_plain_norm():
            yield "the norm is computed or rounded differently"
        yield from self._check_layouts(layout)

    def _is_plain_sum(self) -> bool:
        """Return whether the product is added to another tensor of its shape and dtype, with no
        other arguments."""
        total, product = self.nodes[0], self.facts.nodes[self.product].meta["val"]
        if total.kwargs or len(total.args) != 2 or total.args[0] is total.args[1]:
            return False
        return all(
            isinstance(x, fx.Node)
            and (x.meta["val"].shape, x.meta["val"].dtype) == (product.shape, product.dtype)
            for x in total.args
        )

    def _is_plain_norm(self) -> bool:
        """Return whether the norm is over the whole last dim of the sum, computed in the wide
        dtype, with a weight and a result in the product's dtype."""
        total, squares, norm = self.nodes
        product = self.facts.nodes[self.product].meta["val"]
        dtype, wide = product.dtype, _WIDE.get(product.dtype, torch.float32)
        _, _, weight, n, _, in_dtype, rounded, _ = norm.args
        has_weight = isinstance(weight, fx.Node) and weight.meta["val"].dtype == dtype
        is_of_total = squares.target is ops.square_sum and squares.args == (total, wide)
        is_in_dtypes = (
            in_dtype == wide and rounded in (dtype, wide) and norm.meta["val"].dtype == dtype
        )
        return has_weight and is_of_total and is_in_dtypes and n == product.shape[-1]

    def _check_layouts(self, layout: Layout) -> Iterator[str]:
        summing, squaring, norming = self.strategies
        if summing is None or {*summing.inputs, *summing.outputs} != {layout}:
            yield "the layout of the sum differs from the scattered tensor"
        if squaring is None or norming is None or squaring.inputs != (layout,):
            yield "the squared tensor has a different layout"
        elif (
            norming.inputs[:2] != (layout, squaring.outputs[0])
            or norming.outputs != (layout,)
            or squaring.outputs[0].has_partial
        ):
            yield "the norm is not over full rows"
        elif not norming.inputs[2].is_replicated:
            yield "the norm has only a shard of its weight"

    def calls(self) -> tuple[tuple[Call, Strategy], ...]:
        """Return the calls that the kernel computes in addition to its product, with their
        strategies."""
        return tuple(
            (call_of(node), how)
            for node, how in zip(self.nodes, self.strategies, strict=True)
            if how is not None
        )


_LINE = 128  # bytes


@dataclass
class KernelWalk:
    """All kernels of a plan."""

    facts: Facts
    claims: Claims
    mesh: Mesh
    profile: HardwareProfile
    shared: dict[tuple[object, ...], int] = field(
        default_factory=dict
    )  # (kind, axis, form) → bytes, for the kernels checked so far
    _normed: dict[str, str] = field(
        default_factory=dict
    )  # sum → the product whose kernel adds and norms it
    _doing: dict[tuple[str, bool], tuple[str, set[object]]] = field(
        default_factory=dict
    )  # (product, recomputed) → name of its kernel, and patterns of the tensors

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each claim about kernels that does not hold."""
        for (key, phase), steps in self.claims.steps.items():
            for step in steps:
                if step.kernel is not None:
                    name = (
                        f"{step.collective.kind} from {step.source} to {step.target} in {phase} by"
                        f" {step.kernel.name}"
                    )
                    for fault in self._find_faults(key, phase, step, step.kernel, steps):
                        yield Finding("kernels", f"{name}: {fault}", key[0])

    def _find_faults(
        self,
        key: tuple[str, int],
        phase: str,
        step: Communication,
        kernel: InKernel,
        steps: Sequence[Communication],
    ) -> Iterator[str]:
        """Yield the faults of one kernel. The first fault that prevents further checks is the last
        one."""
        tensor = self.facts.tensors.get(key)
        if tensor is None or not self._is_offered(tensor, key, phase):
            yield "the problem offers no kernel here"
            return
        name = NAMES["reduce_scatter"] if kernel.name == NORMED else kernel.name
        if name != NAMES.get(step.collective.kind) or step.collective.reduce_op not in ("", "sum"):
            yield "the kernel does not support this collective"
            return
        yield from self._check_peers(step)
        if step.collective.kind == "all_gather":
            product = self._find_reader(tensor, kernel, phase)
        else:
            product = self._find_maker(tensor, kernel)
        chosen = self._strategy_of(product, kernel)
        if product is None or chosen is None:
            yield f"{kernel.node} is not a matrix product at its end"
            return
        if product.operand > 1:
            yield f"{kernel.node} has it as its bias, which is not a factor"
            return
        yield from self._check_end(tensor, step, steps, product, chosen)
        yield from self._check_product(key, phase, step, kernel, product, chosen)

    def _check_product(
        self,
        key: tuple[str, int],
        phase: str,
        step: Communication,
        kernel: InKernel,
        product: TensorReader,
        chosen: Strategy,
    ) -> Iterator[str]:
        """Yield the reasons why a kernel cannot compute a product with the sum and the norm after
        it, or does not save what the plan states.

        Args:
            key: the tensor that the step moves.
            phase: the phase of the step.
            step: the collective.
            kernel: the kernel.
            product: the product, as a reader of the tensor or the node that computes it.
            chosen: the product's strategy.
        """
        tensor = self.facts.tensors[key]
        name = NAMES["reduce_scatter"] if kernel.name == NORMED else kernel.name
        adds = product.operand < 0 and product.key != tensor.key
        if adds:
            yield from self._check_sum(tensor, step, product)
        yield from self._check_alone(product.key, kernel, name, pattern_of(key[0])[0])
        normed: tuple[tuple[Call, Strategy], ...] = ()
        if kernel.name == NORMED:
            is_maker = product.key == tensor.key
            after = NormWalk.of(self.facts, self.claims, product.key) if is_maker else None
            yield from self._check_norm(key, phase, step, kernel, product, after)
            normed = () if after is None else after.calls()
        yield from self._check_saving(step, kernel, product, chosen, adds=adds, normed=normed)

    def _is_offered(self, tensor: Tensor, key: tuple[str, int], phase: str) -> bool:
        """Return whether a collective of a tensor in a phase can run in a kernel. Outside of the
        phase that computes the tensor, it can only if the tensor does not cross between stages."""
        if phase not in ("forward", "backward"):
            return False
        return phase == tensor.phase or not self._crosses(key)

    def _strategy_of(self, product: TensorReader | None, kernel: InKernel) -> Strategy | None:
        """Return the strategy of a kernel's product; None if it is not a product, or if the plan
        has no strategy for it."""
        if product is None or self.facts.nodes[product.key].target is not ops.dot:
            return None
        return (self.claims.recomputed if kernel.again else self.claims.chosen).get(product.key)

    def _check_peers(self, step: Communication) -> Iterator[str]:
        """Yield a fault if compute does not wait for the collective, or if its ranks cannot access
        each other's memory."""
        if step.beside:
            yield "it overlaps compute already"
        if self.mesh.link(step.collective.axis) != "intra":
            yield (
                f"ranks along {self.mesh.axes[step.collective.axis].name!r} cannot access each"
                " other's memory"
            )

    def _check_norm(
        self,
        key: tuple[str, int],
        phase: str,
        step: Communication,
        kernel: InKernel,
        product: TensorReader,
        after: NormWalk | None,
    ) -> Iterator[str]:
        """Yield a fault if no sum and norm of the product follow in forward, or if another product
        is already normed with them.

        Args:
            key: the tensor that the step moves.
            phase: the phase of the step.
            step: the collective.
            kernel: the kernel.
            product: the product.
            after: the sum and the norm after the product; None if there are none.
        """
        if after is None or kernel.again or phase != "forward":
            yield "forward has no sum and norm after it"
        if after is None:
            return
        yield from after.wrong(step.target)
        if step.target in self.claims.kept.get(key, ()):
            yield "the operand of the norm is also kept for backward"
        if self._normed.setdefault(after.nodes[0].name, product.key) != product.key:
            yield "another product of the sum already includes the norm"

    def _find_reader(self, tensor: Tensor, kernel: InKernel, phase: str) -> TensorReader | None:
        """Return the first reader of a tensor that matches the kernel's node pattern; None if there
        is none."""
        reading_phase = "forward" if kernel.again else phase
        return next(
            (
                r
                for r in tensor.readers
                if pattern_of(r.key)[0] == kernel.node and r.phase == reading_phase
            ),
            None,
        )

    def _find_maker(self, tensor: Tensor, kernel: InKernel) -> TensorReader | None:
        """Return the node that computes a tensor, or one whose result it adds, as a reader without
        an operand."""
        node = self.facts.nodes.get(tensor.key)
        operands = (
            () if node is None else sorted(operands_of(node), reverse=True)
        )  # the last one first
        keys = [
            key
            for key in (tensor.key, *(self.facts.names[x.name] for x in operands))
            if key in self.facts.nodes
        ]
        equal_keys = [key for key in keys if pattern_of(key)[0] == kernel.node]
        alone = [
            key
            for key in equal_keys
            if key == tensor.key
            or [r.key for r in self.facts.tensors[key, 0].readers] == [tensor.key]
        ]
        return next((TensorReader(key, -1, tensor.phase) for key in (*alone, *equal_keys)), None)

    def _check_sum(
        self, total: Tensor, step: Communication, product: TensorReader
    ) -> Iterator[str]:
        """Yield the reasons why a product cannot wait for its sum: another reader, or a tensor in
        another layout."""
        node, strategy = self.facts.nodes[total.key], self.claims.chosen.get(total.key)
        summand = self.facts.tensors[product.key, 0]
        plain = (
            node.target is torch.ops.aten.add.Tensor
            and len(operands_of(node)) == len(node.args) == 2
            and not node.kwargs
        )
        are_alike = all(_is_like(x, node) for x in operands_of(node))
        if (
            not plain
            or not are_alike
            or step.kernel is None
            or step.kernel.again
            or total.phase != "backward"
        ):
            yield "its operand is not a sum of two tensors into which the product can accumulate"
        if [r.key for r in summand.readers] != [total.key] or summand.phase != total.phase:
            yield "another op also reads the product"
        if strategy is None or {*strategy.inputs, *strategy.outputs} != {step.source}:
            yield "the terms of the sum have a different layout"

    def _check_end(
        self,
        tensor: Tensor,
        step: Communication,
        steps: Sequence[Communication],
        product: TensorReader,
        chosen: Strategy,
    ) -> Iterator[str]:
        """Yield the faults at the product's end of the collective. The product must read the layout
        that the collective produces, or compute the layout from which it starts."""
        node = self.facts.nodes[product.key]
        if product.operand < 0:
            if chosen.outputs[0] != step.source:
                yield "the product returns another layout"
            if sum(other.source == step.source for other in steps) > 1 or self._read_whole(
                tensor, step.source
            ):
                yield "another op reads the full tensor"
            if step.collective.dtype != str(tensor.dtype).removeprefix("torch."):
                yield "it is reduced in a different dtype"
            return
        if chosen.inputs[product.operand] != step.target:
            yield "the product reads another layout"
        others = [
            other for number, other in enumerate(operands_of(node)) if number != product.operand
        ]
        if any(
            made_in and (made_in, node.meta["phase"]) != ("forward", "backward")
            for made_in in map(self._phase_of, others)
        ):
            yield "another operand of the product may not be available at its first use"

    def _crosses(self, key: tuple[str, int]) -> bool:
        """Return whether a tensor arrives from another stage."""
        return key[0] not in self.facts.nodes and not self.facts.tensors[key].given

    def _phase_of(self, node: fx.Node) -> str:
        """Return the phase of a node; ``""`` for stored values."""
        if node.op != "placeholder":
            return str(node.meta["phase"])
        tensor = self.facts.tensors[self.facts.names[node.name], 0]
        return "" if tensor.given else tensor.phase

    def _read_whole(self, tensor: Tensor, layout: Layout) -> bool:
        read = {
            self.claims.chosen[r.key].inputs[r.operand]
            for r in tensor.readers
            if r.phase == tensor.phase
        }
        return layout in read or layout in self.claims.kept.get((tensor.key, tensor.result), ())

    def _check_alone(self, product: str, kernel: InKernel, name: str, tensor: str) -> Iterator[str]:
        way, tensors = self._doing.setdefault((product, kernel.again), (name, set()))
        if way != name or tensor in tensors:
            yield "its product already has another collective"
        tensors.add(tensor)

    def _check_saving(
        self,
        step: Communication,
        kernel: InKernel,
        product: TensorReader,
        chosen: Strategy,
        *,
        adds: bool,
        normed: tuple[tuple[Call, Strategy], ...],
    ) -> Iterator[str]:
        call, c = call_of(self.facts.nodes[product.key]), step.collective
        sizes = tuple(self.mesh.shape)
        dim, info = c.dim, call.outputs[0] if product.operand < 0 else call.inputs[product.operand]
        split = step.target if product.operand < 0 else step.source
        if info.shape[dim] % split.num_shards(dim, sizes):
            yield "shards differ in length"
            return
        if product.operand >= 0:
            terms = terms_of(call)
            letter = terms[product.operand][dim]
            if letter not in terms[2] or letter in terms[1 - product.operand]:
                yield "the product contracts the gathered dim, or both factors have it"
                return
            dim = terms[2].index(letter)
        self._note_shared(step, kernel, info)
        rates = Rates(self.mesh, self.profile)
        saved_s, chunks = SavingProduct(
            call, chosen, rates, c.kind, sizes[c.axis], dim, adds
        ).find_saving(step.time_s, normed)
        if not near(saved_s, kernel.saved_s) or chunks != kernel.num_chunks:
            yield (
                f"it saves {saved_s:.6g} s in {chunks} chunks, not {kernel.saved_s:.6g} s in"
                f" {kernel.num_chunks}"
            )
        if saved_s <= self.profile.launch_overhead_s:
            yield "it saves nothing, so the problem does not offer it"

    def _note_shared(self, step: Communication, kernel: InKernel, info: TensorInfo) -> None:
        gathers, c = step.collective.kind == "all_gather", step.collective
        num, layout = self.mesh.shape[c.axis], step.target if gathers else step.source
        before, length, after = _sizes_around(
            local_lengths(info.shape, layout, self.mesh.shape), c.dim
        )
        slot = -(-before * (length // num) * after * info.dtype.itemsize // _LINE) * _LINE
        num_slots, num_flags = 2 if gathers else 2 * num, 1 + num + num * kernel.num_chunks
        form = c.kind, c.axis, before, length, after * info.dtype.itemsize, kernel.num_chunks
        self.shared[form] = num_slots * slot + num_flags * _LINE


def shared_forms(
    trace: Trace, plan: Plan, profile: HardwareProfile
) -> dict[tuple[object, ...], int]:
    """Return the memory that a plan's kernels share with their peers.

    Args:
        trace: the traced model or stage.
        plan: its kernels are read.
        profile: the hardware of the plan.

    Returns:
        (kind of collective, axis and form) → bytes on a device.
    """
    walk = KernelWalk(Facts.of(trace), Claims.of(plan), plan.mesh, profile)
    inner_walk = OwnWalk(walk.facts, walk.claims, plan.mesh, profile)
    for _ in (
        *walk.findings(),
        *inner_walk.findings(),
    ):  # the findings are in the plan's certificate
        pass
    return walk.shared | inner_walk.shared


def _is_like(x: fx.Node, other: fx.Node) -> bool:
    mine, theirs = x.meta["val"], other.meta["val"]
    return mine.shape == theirs.shape and mine.dtype == theirs.dtype


def _sizes_around(lengths: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Return the number of elements before a dim, along it, and after it."""
    return prod(lengths[:dim]), lengths[dim], prod(lengths[dim + 1 :])
