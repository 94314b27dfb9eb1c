"""An `Accelerator` for compiled modules: every rank iterates over whole batches, as a single
process does, and the module shards the work.

By default, accelerate gives each process different samples, wraps models in
DistributedDataParallel, averages over processes and steps schedulers once per process. The compiled
module does this itself, or it is wrong because each rank passes the same batch. Therefore
accelerate sees a single process for computation, and the rank of this process for work of a single
rank (logging, files).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, cast

import accelerate
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.utils import DistributedType, convert_to_fp32, recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autopar.errors import AutoparError, RuntimeStateError
from autopar.runtime.guarded_module import Compiled
from autopar.runtime.launchers import adopt_launch
from autopar.runtime.parameter_module import Holder, holder_of
from autopar.runtime.rank_comm import local_rank, num_ranks, of_all, rank

_UNKNOWN = (
    "deepspeed_plugin",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
    "dynamo_backend",
    "dynamo_plugin",
)


class Accelerator(accelerate.Accelerator):
    """accelerate's `Accelerator` for modules that `autopar.compile` returned:

        accelerator = autopar.Accelerator(gradient_accumulation_steps=2)
        pm = autopar.compile(model, example_inputs=batch)
        pm, optimizer, loader, scheduler = accelerator.prepare(
            pm, torch.optim.AdamW(pm.parameters()), loader, scheduler
        )

    A batch of a loader is the batch of all processes. `gather` returns its argument, since every
    rank has the full value.

    Raises:
        AutoparError: if an argument asks accelerate for something that the compiled module does
            itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if asked := [name for name in _UNKNOWN if kwargs.get(name) is not None]:
            message = f"autopar.Accelerator does not support {asked[0]}"
            raise AutoparError(
                message,
                remedy=(
                    "omit it: autopar.compile chooses how a model is split; use its constraints "
                    "to influence it"
                ),
            )
        _check_precision(
            kwargs.get("mixed_precision")
        )  # before accelerate keeps it for the whole process
        adopt_launch()  # accelerate reads torch's variables
        super().__init__(*args, **kwargs)
        _check_precision(self.mixed_precision)  # which may come from where accelerate was started

    observed: int | None = None
    """Number of samples of the last evaluated batch, if counted; needed for data without a length.
    """

    distributed_type = property(lambda _: DistributedType.NO)
    num_processes = property(lambda _: 1)
    use_distributed = property(lambda _: False)
    process_index = property(lambda _: rank())
    local_process_index = property(lambda _: local_rank())
    is_main_process = property(lambda _: rank() == 0)
    is_local_main_process = property(lambda _: local_rank() == 0)
    is_last_process = property(lambda _: rank() == num_ranks() - 1)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the module unchanged. If it was compiled under this accelerator's autocast, calls
        run under it and return outputs in fp32.

        Args:
            model: a compiled module.
            device_placement, evaluation_mode: accepted for compatibility with accelerate, and
                ignored.

        Raises:
            RuntimeStateError: if the module is not compiled, or not for this accelerator's mixed
                precision.
        """
        holder = holder_of(model)
        if model not in self._models:
            precision = cast(Any, holder).plan.options.get("precision")
            check_scaled(
                self.scaler, precision, isinstance(holder, Compiled) and not holder.is_for_inference
            )
            is_compiled = model not in self.__dict__.get(
                "plain", {}
            )  # a `Trainer` enters autocast itself
            if is_compiled and self.native_amp and precision != self.mixed_precision:
                self._prepare_autocast(model, holder)
            self._models.append(model)
        return model

    def _prepare_autocast(self, model: nn.Module, holder: Holder) -> None:
        with self.autocast():
            is_made_so = isinstance(holder, Compiled) and holder.matches_autocast()
        if not is_made_so:
            message = (
                "the module was compiled without the accelerator's mixed precision "
                f"{self.mixed_precision}"
            )
            remedy = (
                "compile it under `with accelerator.autocast():`, or with"
                f' precision="{self.mixed_precision}"'
            )
            raise RuntimeStateError(message, remedy=remedy)
        call = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            """Run the model under autocast, and return floating-point results in float32."""
            with self.autocast():
                return convert_to_fp32(call(*args, **kwargs))

        object.__setattr__(model, "forward", forward)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the module unchanged; for a `Trainer`, the plain model, whose class is read."""
        plain: nn.Module = self.__dict__.get("plain", {}).get(model, model)
        return plain

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Return a loader that yields all samples on every rank, in the same order."""
        self.dataloader_config.dispatch_batches = False
        _seed_alike(data_loader)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that advances once per step, not once per process."""
        prepared: AcceleratedScheduler = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip all gradients of the compiled module by their norm over all ranks. Scaled losses are
        supported.

        Args:
            parameters: all parameters of one prepared module.
            max_norm: largest norm allowed.
            norm_type: p of the p-norm.

        Returns:
            The norm before clipping.

        Raises:
            RuntimeStateError: if these are not the parameters of one prepared module.
        """
        clipped_ids = {
            id(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)
        }
        for model in self._models:
            if clipped_ids == {id(p) for p in model.parameters()}:
                self.unscale_gradients()
                norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
                return norm
        message = "the parameters to clip are not those of a prepared compiled module"
        raise RuntimeStateError(
            message, remedy="prepare the module, and pass all of pm.parameters()"
        )

    def gather(self, tensor: Any) -> Any:
        """Return the argument: every rank has computed it from the whole batch."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the argument; for the last batch, only its actual samples, as accelerate does in
        one process.
        """
        state = self.gradient_state
        last = max(state.remainder, 0) or self.observed or 0 if state.end_of_dataloader else 0
        if last <= 0:
            return input_data
        return (
            input_data[:last]
            if use_gather_object
            else recursively_apply(lambda x: x[:last] if x.ndim else x, input_data)
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the argument, as accelerate does in one process.

        Args:
            tensor: computed on every rank from the whole batch.
            reduction, scale: accepted for compatibility with accelerate, and ignored.
        """
        return tensor

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the argument: it has the same shape on all ranks."""
        return tensor

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on one rank."""
        if self.is_main_process:
            print(*args, **kwargs)

    def on_main_process(self, function: Any = None) -> Any:
        """Return the function on the first rank, and a no-op on other ranks."""
        return function if self.is_main_process else _do_nothing

    def on_local_main_process(self, function: Any = None) -> Any:
        """Return the function on one rank per machine, and a no-op on other ranks."""
        return function if self.is_local_main_process else _do_nothing

    def on_last_process(self, function: Any = None) -> Any:
        """Return the function on the last rank, and a no-op on other ranks."""
        return function if self.is_last_process else _do_nothing

    def wait_for_everyone(self) -> None:
        """Wait for all ranks."""
        of_all(None)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: accelerate would save the shard of a rank as if it were the whole. The
        same holds for `load_state`.

        Raises:
            RuntimeStateError: always.
        """
        remedy = (
            "save and load with autopar.Checkpoints(folder); export weights with "
            "autopar.save_pretrained or autopar.save_weights"
        )
        raise RuntimeStateError("accelerate does not save compiled modules", remedy=remedy)

    load_state = save_state
    save_model = save_state


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """A no-op in place of a function that runs on other ranks."""


def check_scaled(scaler: object, precision: object, trains: bool) -> None:
    """Check that losses are scaled if training is planned in fp16.

    Args:
        scaler: accelerate's gradient scaler; None if there is none.
        precision: of the plan.
        trains: whether the module is trained.

    Raises:
        RuntimeStateError: if they are not scaled.
    """
    if trains and precision == "fp16" and scaler is None:
        message = (
            'the model is planned with precision="fp16", but its loss is not scaled: gradients '
            "would underflow"
        )
        remedy = (
            'request mixed precision in fp16 (fp16=True, mixed_precision="fp16") on a GPU, where '
            "accelerate scales losses; or pass "
        )
        raise RuntimeStateError(message, remedy=f'{remedy}precision="bf16" to autopar.compile')


def _check_precision(mixed_precision: object) -> None:
    if mixed_precision not in (None, "no", "bf16", "fp16"):
        message = f"autopar.Accelerator does not support mixed_precision={str(mixed_precision)!r}"
        raise AutoparError(message, remedy='pass "bf16", "fp16" or "no"')


def as_one_process(state: PartialState) -> PartialState:
    """Return accelerate's state with a single process that has the rank of this process."""
    one_process = object.__new__(PartialState)  # all instances share one dict
    attributes = {
        "distributed_type": DistributedType.NO,
        "num_processes": 1,
        "process_index": rank(),
        "local_process_index": local_rank(),
    }
    one_process.__dict__ = {**state.__dict__, **attributes}
    return one_process


def _seed_alike(loader: DataLoader[Any]) -> None:
    """Make the workers of loaders draw the same random numbers on every rank; transformers seeds
    them by rank.
    """
    begin = getattr(loader, "worker_init_fn", None)
    if isinstance(begin, functools.partial) and "rank" in begin.keywords:
        loader.worker_init_fn = functools.partial(
            begin.func, *begin.args, **{**begin.keywords, "rank": 0}
        )
