"""`Trainer` of transformers, with a compiled module instead of the model.

Each rank runs the loop of one process over the same whole batches; only the compiled module uses
the other ranks. Losses, item counts, accumulation, schedules and metrics are therefore those of one
process. The differences are: the module is compiled before the optimizer is created, clipping and
checkpoints are collective, and one rank writes.

`self.model` remains the plain model, whose class, configuration and signature are read. Its weights
move to meta once there is a compiled module, so that nothing reads them by mistake.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import convert_to_fp32, find_batch_size
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from autopar.api import compile
from autopar.api.arguments import Example, Launched
from autopar.checkpoint.manager import Checkpoints
from autopar.checkpoint.weights import load_weights
from autopar.errors import RuntimeStateError
from autopar.integrations.accelerator import Accelerator, as_one_process
from autopar.integrations.first_call import first_call, may_be_read_once, same_random_numbers
from autopar.integrations.pretrained import is_peft, load_adapter, names_saved
from autopar.integrations.trainer_arguments import (
    OPTIMIZERS,
    check_arguments,
    check_inputs,
    check_optimizer,
)
from autopar.runtime.device_mesh import join_launched
from autopar.runtime.full_state import whole_values
from autopar.runtime.parameter_module import holder_of
from autopar.runtime.plain_model import NotedTensor, note_tensors
from autopar.runtime.rank_comm import by_first, num_ranks, rank

# --------------------------------------------------------------------------------------------------
# The plain model after a compiled module has taken its weights. It is asked for its class,
# configuration and signature. Changes of its parameters would have no effect, so they are rejected.


@dataclass(frozen=True, slots=True)
class TrainerPlainModel:
    """The plain model in its state after compiling.

    Attributes:
        parameters: the parameters that are on meta now.
    """

    model: nn.Module
    parameters: tuple[NotedTensor, ...]

    @staticmethod
    def release_weights(model: nn.Module) -> TrainerPlainModel:
        """Move the weights of a model to meta, and record them. Weights that modules share stay
        shared.
        """
        on_meta: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if parameter not in on_meta:
                        on_meta[parameter] = nn.Parameter(
                            parameter.detach().to("meta"), requires_grad=parameter.requires_grad
                        )
                    module._parameters[name] = on_meta[parameter]
        return TrainerPlainModel(
            model, tuple(each for each in note_tensors(model) if each.is_parameter)
        )

    def check(self, model: nn.Module) -> None:
        """Check that the trainer's model is still this one, and that its parameters were not
        changed.

        Raises:
            RuntimeStateError: if it is another model, or a parameter was changed.
        """
        if model is not self.model:
            message = "trainer.model is not the model that was compiled"
            raise RuntimeStateError(message, remedy="create a new Trainer for it")
        for parameter in self.parameters:
            now = parameter.now()
            if now is None or parameter.is_written(now):
                message = (
                    f"trainer.model's parameter {parameter.name!r} was written, but training uses "
                    "the compiled module"
                )
                remedy = (
                    "write the parameter of the same name of trainer.compiled(), or load weights "
                    "before the first train() or evaluate()"
                )
                raise RuntimeStateError(message, remedy=remedy)
            if now.requires_grad != parameter.trains:
                message = (
                    f"trainer.model's parameter {parameter.name!r} was"
                    f" {'frozen' if parameter.trains else 'unfrozen'} after it was compiled"
                )
                remedy = (
                    "freeze before the first train() or evaluate(), and create a new Trainer for "
                    "each phase of training"
                )
                raise RuntimeStateError(message, remedy=remedy)


log = logging.getLogger("autopar")
_STATE = "autopar"  # name of the folder with the optimizer state in each checkpoint


class Trainer(transformers.Trainer):
    """transformers' `Trainer` on all processes of the job, or on one:

        trainer = autopar.Trainer(
            model=model, args=TrainingArguments(...), train_dataset=..., eval_dataset=...
        )
        trainer.train()

    ``per_device_train_batch_size`` is the size of the batch of all processes together, as for the
    same script in one process. Checkpoints and `save_model` write the files that transformers would
    write, and next to them the optimizer state, which loads on any number of processes.

    Args:
        model: the plain model, of transformers or peft, or a module that returns its loss;
            identical on every rank. Its weights move into the compiled module at the first call of
            `train` or `evaluate`.
        args, others: see transformers' Trainer.
        mesh, compile_options: see `autopar.compile`, which gets the batch, the optimizer and the
            precision from the trainer.
        example_inputs: a batch as passed to the model; by default the first batch of the training
            set, which is read for its shapes.

    Raises:
        AutoparError: for settings that a compiled module does not support (deepspeed, hooks, ...),
            with what to do.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *rest: Any,
        mesh: Launched = None,
        compile_options: Mapping[str, Any] | None = None,
        example_inputs: Example | None = None,
        **others: Any,
    ) -> None:
        args = args or transformers.TrainingArguments(output_dir="tmp_trainer")
        bound_arguments = (
            inspect.signature(transformers.Trainer.__init__)
            .bind_partial(self, model, args, *rest, **others)
            .arguments
        )
        check_inputs(model, bound_arguments)
        check_arguments(args)
        check_optimizer(args, bound_arguments)
        join_launched(args.device.type)  # accelerate has joined only what torchrun started
        args.distributed_state = as_one_process(args.distributed_state)
        self._mesh, self._compile_options, self._example = (
            mesh,
            dict(compile_options or {}),
            example_inputs,
        )
        self._compiled: Any = None
        self._left: TrainerPlainModel | None = None
        super().__init__(model, args, *rest, **others)

    def create_accelerator_and_postprocess(self) -> None:
        """Create an `Accelerator` that gives every rank whole batches; otherwise as in
        transformers."""
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            message = "accelerate was started with DeepSpeed or FSDP"
            raise RuntimeStateError(
                message, remedy="start the script with `autopar run -n COUNT`, or with torchrun"
            )
        self.accelerator.__class__ = Accelerator
        self.gather_function = self.accelerator.gather_for_metrics

    # What is computed

    def compiled(self, examples: Callable[[], Any] | None = None) -> Any:
        """Return the compiled module, which is created at the first call. Call it on every rank.

        Args:
            examples: returns the loader of the batches to plan for; by default that for training.
        """
        if self._compiled is None:
            trains = self.train_dataset is not None
            loader = self.get_train_dataloader if trains or examples is None else examples
            self.model.train(trains)
            example = self._example if self._example is not None else self._first_call(loader)
            name = getattr(self.args.optim, "value", self.args.optim)
            options = {"optimizer": OPTIMIZERS.get(name, "adamw")} | (
                {} if trains else {"inference": True}
            )
            options = {} if "plan" in self._compile_options else options
            with self.compute_loss_context_manager():
                self._compiled = compile(
                    self.model,
                    self._mesh,
                    example_inputs=example,
                    **{**options, **self._compile_options},
                )
            self.accelerator.plain = {self._compiled: self.model}
            self._left = TrainerPlainModel.release_weights(self.model)
            if rank() == 0 and num_ranks() > 1:
                size = self._train_batch_size if trains else self.args.eval_batch_size
                log.warning(
                    "a batch of %d samples is the batch of all %d processes; each processes a "
                    "part of it",
                    size,
                    num_ranks(),
                )
        if self._compiled not in self.accelerator._models:
            self.accelerator.prepare_model(self._compiled)
        return self._compiled

    def _first_call(self, loader: Callable[[], Any]) -> Any:
        """Return the arguments with which the model is called on the first batch. No random number
        is drawn for it."""
        self._check_read_twice()
        with same_random_numbers(self.args.device):
            data = loader()
            data = getattr(data, "base_dataloader", data)  # accelerate's counts what is read of it
            batches, num_items = self.get_batch_samples(iter(data), 1, self.args.device)
            if not batches:
                remedy = "pass a dataset with at least one batch, or omit dataloader_drop_last"
                raise RuntimeStateError("the data has no batch", remedy=remedy)
            inputs = self._prepare_inputs(batches[0])
            model_call = first_call(
                self.model,
                lambda model: self.compute_loss(model, inputs, num_items_in_batch=num_items),
            )
        if model_call is not None:
            return model_call
        message = "compute_loss did not call the model that was passed to it"
        remedy = (
            "call its argument `model`, not self.model; or pass example_inputs=, a batch as "
            "passed to the model"
        )
        raise RuntimeStateError(message, remedy=remedy)

    def _check_read_twice(self) -> None:
        """Check that the first batch can be read again after it has been read for its shapes.

        Raises:
            RuntimeStateError: if it cannot.
        """
        data = self.train_dataset
        if may_be_read_once(data, self.args.dataloader_num_workers):
            message = (
                f"the training set, a {type(data).__name__}, yields samples one after another, "
                "perhaps only once, so no batch is read before training"
            )
            raise RuntimeStateError(
                message,
                remedy=(
                    "pass example_inputs=, a batch as passed to the model; its values are not read"
                ),
            )

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **others: Any
    ) -> Any:
        """Compute the loss as transformers does; in fp32, as accelerate does, if it is computed
        under autocast.

        Args:
            model: the compiled module.
            inputs: the batch.
            return_outputs: whether to return (loss, outputs).
            others: see transformers' Trainer.

        Raises:
            RuntimeStateError: if `self.model` was changed, which would have no effect.
        """
        if self._left is not None:
            self._left.check(self.model)
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, **others)
        return result if self._narrow() is None else convert_to_fp32(result)

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the context of every call, and of compiling: autocast if the arguments ask for
        bf16 or fp16."""
        dtype = self._narrow()
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.args.device.type, dtype, cache_enabled=bool(cache_enabled))

    def _narrow(self) -> torch.dtype | None:
        """Return the autocast dtype of calls. On devices without fp16, accelerate trains without
        autocast.
        """
        if self.args.fp16:
            return torch.float16 if self.accelerator.native_amp else None
        return torch.bfloat16 if self.args.bf16 else None

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return self.compiled()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of the compiled module's parameters.

        Its groups do not depend on how parameters are split, so that its state loads on any mesh.
        """
        optimizer = super().create_optimizer(self.compiled())
        _join_groups(_plain(optimizer))
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the parameters with weight decay, selected by the classes of the plain model's
        submodules. Names are the same in the compiled module.
        """
        return super().get_decay_parameter_names(self.model)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self._clip(float("inf")) if grad_norm is None else grad_norm

    def _clip(self, max_norm: float) -> Tensor:
        """Clip by the norm of the unscaled gradients, also if losses are scaled. Return the norm
        before clipping.
        """
        self.accelerator.unscale_gradients()
        norm: Tensor = self.compiled().clip_grad_norm_(max_norm)
        return norm

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as transformers does. If nothing is trained, the module is planned for these
        batches."""
        self.compiled(lambda: dataloader)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Predict as transformers does, with full logits on every rank.

        The arguments are those of transformers' Trainer.
        """
        self.accelerator.observed = find_batch_size(inputs)
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, *args, **kwargs
        )
        returned = logits if isinstance(logits, tuple) else (logits,)
        if (
            not prediction_loss_only
            and all(x is None for x in returned)
            and self._compile_options.get("outputs") != "full"
        ):
            message = (
                'the compiled model returns only its loss, because of outputs="loss" or of '
                "several microbatches"
            )
            raise RuntimeStateError(
                message,
                remedy='pass compile_options={"outputs": "full"}, or set prediction_loss_only=True',
            )
        full_logits = tree_map_only(DTensor, lambda x: x.full_tensor(), logits)
        return loss, full_logits, labels

    # What is saved

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        folder, save = output_dir or self.args.output_dir, super()._save
        if self._compiled is not None and state_dict is None:
            state_dict = whole_values(holder_of(self._compiled), names_saved(self.model))
        by_first(
            lambda: save(folder, state_dict),
            str(folder),
            "check the reason; pass a writable folder",
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = Checkpoints(Path(output_dir) / _STATE, keep=1, weights=False)
        state.save(
            self.state.global_step,
            self.compiled(),
            _plain(self.optimizer),
            scheduler=self.lr_scheduler,
        )

    def _save_rng_state(self, output_dir: str) -> None:
        save = super()._save_rng_state  # all ranks draw the same numbers
        by_first(lambda: save(output_dir), str(output_dir))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = Checkpoints(Path(checkpoint) / _STATE, keep=1, weights=False)
        if not state.steps():
            files = [
                name
                for name in ("optimizer.pt", "optimizer.bin")
                if os.path.exists(os.path.join(checkpoint, name))
            ]
            message = (
                "the checkpoint was saved by transformers' own Trainer"
                if files
                else "the checkpoint has no optimizer state"
            )
            remedy = (
                "start from the weights only: from_pretrained(folder), and train() without "
                "resume_from_checkpoint"
            )
            raise RuntimeStateError(message, where=str(checkpoint), remedy=remedy)
        state.load(self.compiled(), _plain(self.optimizer), scheduler=self.lr_scheduler)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if self._compiled is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._read_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._read_weights(self.state.best_model_checkpoint)

    def _read_weights(self, folder: str) -> None:
        if is_peft(self.model):
            load_adapter(self.compiled(), self.model, folder)
        else:
            load_weights(self.compiled(), folder)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _join_groups(optimizer: torch.optim.Optimizer) -> None:
    """Merge adjacent groups with equal settings, and remove groups without parameters.

    transformers creates one group per mesh, and a parameter that is split over several axes has its
    own mesh.
    """
    joined: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        if joined and {**joined[-1], "params": None} == {**group, "params": None}:
            joined[-1]["params"] += group["params"]
        elif group["params"]:
            joined.append(group)
    optimizer.param_groups[:] = joined
