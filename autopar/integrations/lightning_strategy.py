"""`LightningStrategy` runs Lightning's Trainer on all processes, with the LightningModule's model
compiled."""

from __future__ import annotations

import logging
import os
import random
import shutil
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as rank_zero_only_of_utilities
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.api import compile
from autopar.api.arguments import Example, Launched
from autopar.checkpoint.manager import Checkpoints
from autopar.errors import RuntimeStateError
from autopar.integrations.first_call import same_random_numbers
from autopar.integrations.lightning_modules import (
    call_of,
    check_optimizers,
    check_trainer,
    child_to_compile,
    count_once,
    is_compiled,
)
from autopar.runtime.device_mesh import join_launched
from autopar.runtime.full_state import whole_values
from autopar.runtime.launchers import adopt_launch
from autopar.runtime.parameter_module import holder_of
from autopar.runtime.rank_comm import by_first, local_rank, num_ranks, of_all, rank

# --------------------------------------------------------------------------------------------------
# The processes as Lightning sees them. Each rank runs the loop of one process over the same whole
# batches, and only the compiled module uses the others. So Lightning sees one process for
# computation, and the rank of this process for work of a single rank: logging, progress, files.


class WholeBatches(Strategy):
    """A strategy in which every rank processes whole batches.

    Attributes:
        world_size: number of processes as Lightning counts them.
        parallel_devices, num_nodes: as the Trainer sets them from its arguments.
    """

    world_size = 1

    def __init__(self) -> None:
        super().__init__()
        adopt_launch()
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1

    @property
    def global_rank(self) -> int:
        """The global rank of this process. The launcher sets it before the process group exists."""
        return int(os.environ.get("RANK", rank()))

    local_rank = property(lambda _: local_rank())
    node_rank = property(lambda _: int(os.environ.get("GROUP_RANK", 0)))
    is_global_zero = property(lambda self: self.global_rank == 0)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank] if len(devices) > 1 else devices[0]

    def set_world_ranks(self) -> None:
        """Tell Lightning which process logs."""
        rank_zero_only.rank = rank_zero_only_of_utilities.rank = self.global_rank

    def setup_environment(self) -> None:
        """Create the process group, and make all processes draw the same random numbers.

        Raises:
            RuntimeStateError: if there are several devices, and no launcher.
        """
        super().setup_environment()
        join_launched(self.root_device.type)
        asked = len(self.parallel_devices or ()) * self.num_nodes
        if num_ranks() == 1 and asked > 1:
            remedy = f"start the script with `autopar run -n {asked}`, or pass Trainer(devices=1)"
            raise RuntimeStateError(
                f"{asked} devices are requested, but there is only one process", remedy=remedy
            )
        self._draw_alike()

    def _draw_alike(self) -> None:
        """Copy the state of the random generators from the first rank to all ranks, because
        shuffled loaders draw from them.
        """
        device = self.root_device
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        drawn, on_gpu, python, numpy = self.broadcast(
            (torch.get_rng_state(), on_gpu, random.getstate(), np.random.get_state())
        )
        torch.set_rng_state(drawn)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)
        random.setstate(python)
        np.random.set_state(numpy)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make workers draw the same random numbers on every rank instead of seeding by rank."""
        if (
            int(os.environ.get("PL_SEED_WORKERS", 0))
            and getattr(dataloader, "worker_init_fn", True) is None
        ):
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)
        return dataloader

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the argument: every rank computed it from the whole batch."""
        return tensor

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the argument, as in one process."""
        return tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        of_all(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        return of_all(obj)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any rank, decide so."""
        decisions = of_all(decision)
        return min(decisions) if all else max(decisions)


log = logging.getLogger("autopar")
_STATE = ".autopar"  # name of the folder with the optimizer state next to each checkpoint
# state of a LightningModule whose child was compiled for inference: the original child, and the
# modes of its submodules
_PLAIN = "_plain_of_compiled"
_STEPS = {
    TrainerFn.FITTING: ("training_step", "fit_loop"),
    TrainerFn.VALIDATING: ("validation_step", "validate_loop"),
    TrainerFn.TESTING: ("test_step", "test_loop"),
    TrainerFn.PREDICTING: ("predict_step", "predict_loop"),
}


class LightningStrategy(WholeBatches):
    """A strategy with which Lightning's Trainer trains a compiled module on all processes of the
    job, or on one:

        trainer = lightning.Trainer(
            strategy=autopar.LightningStrategy(), max_epochs=3, gradient_clip_val=1.0
        )
        trainer.fit(module, loader)

    When a run begins, the only child of the LightningModule that has trained parameters is replaced
    by its compiled module. The rest of a step, such as losses, logging and metrics, runs on every
    rank with whole outputs. A batch of the loader is the batch of all processes together. A
    checkpoint is the file that Lightning writes on one process. It has whole weights, and
    ``load_from_checkpoint`` reads it. A folder next to it has the optimizer's state, which loads on
    any number of processes.

    Args:
        mesh, compile_options: as for `autopar.compile`.
        example_inputs: the arguments of a call of the model. By default the first batch of the
            loader is read, and its step is run to find them.

    Raises:
        AutoparError: if the LightningModule needs something that a compiled module does not
            support, such as several optimizers, or trained parameters in several children.
    """

    def __init__(
        self,
        *,
        mesh: Launched = None,
        compile_options: Mapping[str, Any] | None = None,
        example_inputs: Example | None = None,
    ) -> None:
        super().__init__()
        self._mesh, self._compile_options, self._example = (
            mesh,
            dict(compile_options or {}),
            example_inputs,
        )
        self._name = ""  # of the child that is compiled
        self._loaded: Path | None = None

    # What is computed

    def setup_environment(self) -> None:
        """Reject unsupported settings before callbacks are set up; see `WholeBatches`."""
        check_trainer(self.lightning_module.trainer, self.lightning_module)
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Compile the model, and build the optimizer of its parameters."""
        self.accelerator.setup(trainer)
        trains = trainer.state.fn == TrainerFn.FITTING
        module = self.precision_plugin.convert_module(self.lightning_module)
        self._name = child_to_compile(module)
        if trains and _PLAIN in vars(module):
            self._take_back(module)
        self.model_to_device()
        if not is_compiled(getattr(module, self._name)):
            setattr(module, self._name, self._compile_model(trainer, module, trains))
        count_once()
        # Lightning treats a process group as one of DistributedDataParallel, and would average all
        # logged values over it.
        warnings.filterwarnings(
            "ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True"
        )
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        self.precision_plugin.clip_grad_by_value = self._clip_by_value
        if trains:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self.setup_precision_plugin()

    def _compile_model(self, trainer: Any, module: Any, trains: bool) -> nn.Module:
        """Compile the child that is trained.

        Its parts keep their modes, as Lightning trains it. For inference it is compiled in eval
        mode, and the plain child is kept in case it is trained later.
        """
        step, loop = _STEPS[trainer.state.fn]
        plain = getattr(module, self._name)
        with self.precision_plugin.forward_context():
            with same_random_numbers(self.root_device):
                example = (
                    self._example
                    if self._example is not None
                    else self._first_call(module, step, getattr(trainer, loop))
                )
            if not trains:
                vars(module)[_PLAIN] = plain, {part: part.training for part in plain.modules()}
                plain.eval()
            options = {} if trains or "plan" in self._compile_options else {"inference": True}
            compiled: nn.Module = compile(
                plain, self._mesh, example_inputs=example, **{**options, **self._compile_options}
            )
        if rank() == 0 and num_ranks() > 1:
            log.warning(
                "a batch of the loader is the batch of all %d processes; each processes a part "
                "of it",
                num_ranks(),
            )
        return compiled

    def _first_call(self, module: Any, step: str, loop: Any) -> Any:
        def prepare_batch(batch: Any) -> Any:
            """Return a batch of the loader as Lightning passes it to a step."""
            return self.batch_to_device(self.precision_plugin.convert_input(batch))

        return call_of(module, self._name, step, loop._data_source.dataloader(), prepare_batch)

    def _take_back(self, module: Any) -> None:
        """Replace the module that was compiled for inference by the plain child."""
        plain, modes = vars(module).pop(_PLAIN)
        state = whole_values(holder_of(getattr(module, self._name)))
        if rank() == 0:  # whose are taken when it is compiled
            plain.load_state_dict(state)
        for part, mode in modes.items():
            part.training = mode
        setattr(module, self._name, plain)

    def model_to_device(self) -> None:
        """Move everything except the child to compile. It is on its devices once it is compiled;
        before that it need not fit on one device."""
        modules = self.lightning_module._modules
        compiled = modules.pop(self._name)
        self.lightning_module.to(self.root_device)
        modules[self._name] = compiled

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm of the gradients of this optimizer's parameters, over all ranks."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        module = getattr(self.lightning_module, self._name)
        others = {p: p.grad for p in module.parameters() if id(p) not in stepped}
        for parameter in others:
            parameter.grad = None
        module.clip_grad_norm_(clip_val)
        for parameter, gradient in others.items():
            parameter.grad = gradient

    def _clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients that this rank holds."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                gradient = parameter.grad
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clamp_(
                    -clip_val, clip_val
                )

    # What is saved

    restore_checkpoint_after_setup = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole values on the first rank; on others zeros under the same names, which take
        no memory."""
        prefix, module = f"{self._name}.", self.lightning_module
        full_values = whole_values(holder_of(getattr(module, self._name)))
        placeholders = {
            name: value
            for name, value in module.state_dict().items()
            if not name.startswith(prefix)
        }
        state = {f"{prefix}{name}": value for name, value in full_values.items()} | placeholders
        known = self.broadcast(
            {name: (x.shape, x.dtype) for name, x in state.items() if isinstance(x, Tensor)}
        )
        return (
            state
            if rank() == 0
            else {
                name: torch.zeros((), dtype=dtype).expand(shape)
                for name, (shape, dtype) in known.items()
            }
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an empty state: it is saved in a folder next to the checkpoint."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write Lightning's file on one rank and, before it, the optimizer state on all ranks,
        unless only weights are requested.

        Args:
            checkpoint: the content of Lightning's file.
            filepath: path of Lightning's file; the folder of the optimizer state is named after it.
            storage_options: see Lightning's own strategies.
        """
        path = Path(self.broadcast(filepath))
        if "optimizer_states" in checkpoint:
            self._save_beside(path, checkpoint["global_step"])
        save = super().save_checkpoint
        by_first(
            lambda: save(checkpoint, path, storage_options),
            str(path),
            "check the reason; pass a writable folder",
        )

    def _save_beside(self, path: Path, step: int) -> None:
        side_store = self._side_store(path)
        if any(later > step for later in side_store.steps()):  # of the file to be replaced
            by_first(lambda: shutil.rmtree(side_store.folder), str(side_store.folder))
            side_store = self._side_store(path)
        for optimizer in self.optimizers:
            side_store.save(step, getattr(self.lightning_module, self._name), _plain(optimizer))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the file, and the folder next to it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(self._side_store(Path(filepath)).folder, ignore_errors=True)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read Lightning's file on every rank."""
        self._loaded = Path(os.path.realpath(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each rank's part of the optimizer's state from the folder next to the checkpoint.

        Raises:
            RuntimeStateError: on all ranks, if the folder does not exist, or belongs to another
                step.
        """
        state = self._side_store(self._loaded or Path())
        if not state.steps():
            message = (
                "the checkpoint has no folder with the optimizer state: it was saved by another "
                "strategy, or moved without it"
            )
            remedy = (
                f"move {state.folder.name} too, or start from the weights only: "
                "load_from_checkpoint, and fit() without ckpt_path"
            )
            raise RuntimeStateError(message, where=str(self._loaded), remedy=remedy)
        if state.steps()[-1] != checkpoint["global_step"]:  # its run ended between the two writes
            message = (
                f"the checkpoint file is of step {checkpoint['global_step']}, but its optimizer "
                f"state is of step {state.steps()[-1]}"
            )
            remedy = (
                "resume from another checkpoint, or start from the weights only: "
                "load_from_checkpoint, and fit() without ckpt_path"
            )
            raise RuntimeStateError(message, where=str(self._loaded), remedy=remedy)
        for optimizer in self.optimizers:
            state.load(getattr(self.lightning_module, self._name), _plain(optimizer))

    def _side_store(self, path: Path) -> Checkpoints:
        return Checkpoints(path.with_name(path.name + _STATE), keep=1, weights=False)

    def teardown(self) -> None:
        """Leave the compiled module in its place, for further runs."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _plain(optimizer: Any) -> Optimizer:
    """Return the optimizer that Lightning has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
