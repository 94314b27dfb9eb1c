"""`Holder`: a module that holds a program's parameters and buffers under the model's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.core.layout import Layout
from autopar.errors import MeshError, RuntimeStateError
from autopar.ops import random
from autopar.program.program import ProgramTensor
from autopar.runtime.closures import Rebound
from autopar.runtime.device_mesh import first_rank_says
from autopar.runtime.dtensor import hold_value
from autopar.runtime.dtensor_checkpoints import checkpointable, of_one_stage
from autopar.runtime.full_state import extra_states, is_same, whole_values
from autopar.runtime.guards import Unset, Variants
from autopar.runtime.module_modes import FollowedModes
from autopar.runtime.module_shell import UNTIE, Part, Standing
from autopar.runtime.optimizers import Steps, watch_optimizers, watch_replaced
from autopar.runtime.parameters import Storage
from autopar.runtime.part_classes import part_class
from autopar.runtime.rank_comm import by_all, of_all, rank, share_cores, tell_of_hosts
from autopar.runtime.rank_consistency import check_random_state, share_weights
from autopar.runtime.state_dict_hooks import StateDictHooks

# --------------------------------------------------------------------------------------------------
# The random state of a compiled module.


class Drawing(Standing):
    """A module with one random state for all its programs. Each call continues from the state that
    the previous call left.

    Attributes:
        device_mesh: the mesh.
        variants: the programs for other modes and shapes; None if there cannot be any.
    """

    device_mesh: DeviceMesh
    variants: Variants | None
    _world: DeviceMesh
    _pending: int | None = None
    _is_compared: bool = False

    def manual_seed(self, seed: int) -> None:
        """Set the seed of random numbers. It must be equal on every rank.

        Dropout and all other random numbers of the model depend on this seed, the number of later
        calls, and the position of an element in the full tensor. They do not depend on layouts or
        on the number of ranks.

        Args:
            seed: the seed.
        """
        self._set(random.initial_state(seed))

    @property
    def random_state(self) -> int | None:
        """The random state before the next call; None if the model draws no random numbers. Save it
        with a checkpoint to resume with the same numbers.

        ``pm.random_state = value`` sets it. The value must be equal on every rank.
        """
        state = self._find_random_state()
        return self._pending if state is None else int(state)

    @random_state.setter
    def random_state(self, state: int) -> None:
        """Set the random state.

        Raises:
            RuntimeStateError: if the model draws no random numbers.
        """
        if self._find_random_state() is None and self.variants is None:
            raise RuntimeStateError("the model draws no random numbers, so it has no random state")
        self._set(state)

    def _set(self, state: int | Tensor) -> None:
        """Set the state. If no program draws random numbers yet, the first program that draws uses
        this state."""
        self.__dict__["_is_compared"] = False
        drawn_from = self._find_random_state()
        if drawn_from is None:
            self.__dict__["_pending"] = int(state)
        else:
            drawn_from.fill_(int(state))

    def _compare_state(self) -> None:
        """Compare the state with those of the other ranks in the first call after it was created or
        set.

        Raises:
            RuntimeStateError: on every rank, if the states differ.
        """
        state = None if self._is_compared else self._find_random_state()
        if state is not None:
            check_random_state(int(state), self._world)
            self.__dict__["_is_compared"] = True

    def _state_to_draw_from(self) -> Tensor | None:
        """Return the state of all programs, or a new state with the value that was set; None if no
        program draws random numbers and no state was set."""
        known = self._find_random_state()
        if known is None and self._pending is not None:
            return random.initial_state(0).fill_(self._pending).to(self.device_mesh.device_type)
        return known

    def _find_random_state(self) -> Tensor | None:
        """Return the state tensor that all programs of the module share; None if no program draws
        random numbers yet."""
        variants = () if self.variants is None else self.variants.known
        states = (
            module._buffers.get(random.STATE)
            for module in (self, *variants)
            if isinstance(module, Drawing)
        )
        return next((state for state in states if state is not None), None)

    def _first_state(self) -> Tensor:
        """Return the state for torch's initial seed on the mesh's first rank."""
        seed = first_rank_says(torch.initial_seed(), self._world)
        return random.initial_state(seed).to(self.device_mesh.device_type)


# --------------------------------------------------------------------------------------------------


class Holder(Drawing):
    """A module that holds parameters as DTensors, buffers, and their state dict, under the model's
    names.

    Args:
        tensors: the parameters and buffers that the program reads.
        devices: the mesh of the tensors.
        model: the source of values, names and the train/eval flag. It may be on the meta device,
            and is not kept.
        elsewhere: the names of tensors that only programs of other ranks read. This rank does not
            hold them. Tensors that no program reads are replicated.
        world: the whole mesh, if `devices` is a part of it.
        shared: a module of the same model whose parameters and buffers this module shares.

    Raises:
        MeshError: if a parameter is on a device of another type.
        RuntimeStateError: if the program was compiled for another model.
    """

    _unset: Unset
    _steps: Steps

    def __init__(
        self,
        tensors: Sequence[ProgramTensor],
        devices: DeviceMesh,
        model: nn.Module,
        elsewhere: Collection[str] = (),
        world: DeviceMesh | None = None,
        *,
        shared: Holder | None = None,
    ) -> None:
        super().__init__()
        self.variants: Variants | None = None
        self.modes = FollowedModes()
        self.device_mesh, self._world = devices, world or devices
        self._num_axes = len(devices.shape)
        self._storages = {t.name: Storage.of(t, devices) for t in tensors}
        self._names: dict[str, str] = {}
        self._extra_states, self._model_hooks = extra_states(model), StateDictHooks.of(model)
        if shared is None:
            share_weights(model, self._world)
        self._make_parts(model)
        self._register(
            model, {name: t for t in tensors for name in (t.name, *t.aliases)}, elsewhere, shared
        )
        self._ties = self._note_ties()
        self._of_other_stages = frozenset(elsewhere)
        for module in self.modules():
            module.__dict__["_lacks_some"] = bool(elsewhere)
        if any(t.name == random.STATE for t in tensors):
            self._hold_random_state(shared)
        on_meta = [] if shared is not None else self._names_on_meta(model)
        self._unset = Unset({name: self.stored(name) for name in on_meta})
        self._awaits_values = bool(on_meta)
        if shared is None and self._world.size() > 1:  # equal on all ranks: the check is collective
            self._awaits_values = any(of_all(bool(on_meta)))
        self.training = model.training
        self.register_state_dict_post_hook(_state_dict_hook)
        self.register_load_state_dict_pre_hook(_load_state_dict_hook)
        self._steps = Steps() if shared is None else shared._steps
        watch_optimizers(self.parameters(), self._steps)
        if shared is None:
            watch_replaced(model.parameters())
        if devices.device_type != "cpu" and any(t.layout.host for t in tensors):
            share_cores()
            tell_of_hosts()

    def _hold_random_state(self, shared: Holder | None) -> None:
        """Hold the state of random draws: that of `shared`, if it has one, or a new one."""
        state = None if shared is None else shared._state_to_draw_from()
        if state is None:
            state = self._first_state()
        self.hold_buffer(random.STATE, state, persistent=False)

    def train(self, mode: bool = True) -> Holder:
        """Set the mode of the whole module, and return it. If the model overrides `train` or
        `eval`, every submodule gets the mode that the override gives it, and parameters that it
        freezes are frozen."""
        if self.modes.own is None:
            for module in self.modules():
                module.hold_mode(mode) if isinstance(module, Standing) else module.train(mode)
            return self
        trained = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        new_modes = self.modes.own.set_mode(mode, trained)
        for path, training in new_modes.modes.items():
            self._container(path).hold_mode(training)
        for name, parameter in self.named_parameters():
            if new_modes.trained.get(name, parameter.requires_grad) != parameter.requires_grad:
                parameter.requires_grad_(new_modes.trained[name])
        self.modes.now = new_modes.state
        return self

    def check_values(self) -> None:
        """Check that all parameters and buffers have values. This is a collective until they have.

        Raises:
            RuntimeStateError: if a tensor of any rank was on the meta device and has no values yet.
        """
        if not self._awaits_values:
            return
        if self._world.size() == 1:
            self._unset.check(self.stored)
        else:
            by_all(lambda: self._unset.check(self.stored), "the compiled module")
        self._awaits_values = False

    def _register(
        self,
        model: nn.Module,
        known: Mapping[str, ProgramTensor],
        elsewhere: Collection[str],
        shared: Holder | None,
    ) -> None:
        """Register parameters and buffers under the model's names, in its order. Tied tensors are
        one object. The tensors of `shared` are reused."""
        registered: dict[int, tuple[Any, str]] = {}
        if shared is not None:  # skip tensors that no program reads and `shared` does not hold
            named = {
                name
                for of in (model.named_parameters, model.named_buffers)
                for name, _ in of(remove_duplicate=False)
            }
            elsewhere = {
                *elsewhere,
                *(name for name in named if name not in shared._names and name not in known),
            }
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if prefix + name in elsewhere:
                    continue
                if id(parameter) not in registered:
                    registered[id(parameter)] = self._parameter(
                        prefix + name, parameter, known, shared
                    )
                stored, self._names[prefix + name] = registered[id(parameter)]
                self._container(path).hold_parameter(name, stored)
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if prefix + name in elsewhere:
                    continue
                if id(buffer) not in registered:
                    registered[id(buffer)] = self._buffer(prefix + name, buffer, known, shared)
                stored, self._names[prefix + name] = registered[id(buffer)]
                self._container(path).hold_buffer(
                    name, stored, persistent=name not in module._non_persistent_buffers_set
                )

    def _note_ties(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of two names of one tensor, and record them in the modules."""
        first: dict[int, str] = {}
        pairs = tuple(
            (name, known)
            for name in self._names
            if (known := first.setdefault(id(self.stored(name)), name)) != name
        )
        for pair in pairs:
            for name, other in (pair, pair[::-1]):
                path, _, leaf = name.rpartition(".")
                self._container(path).note_tie(leaf, other)
        return pairs

    def check_ties(self) -> None:
        """Check that all names of a tensor still refer to one tensor.

        Raises:
            RuntimeStateError: if a tensor was replaced under one of its names.
        """
        for name, other in self._ties:
            if self.stored(name) is not self.stored(other):
                message = (
                    f"{name!r} was replaced, but {other!r} was not: they were the same tensor when"
                    " the model was compiled, and the program reads both as one"
                )
                raise RuntimeStateError(message, remedy=UNTIE)

    def _names_on_meta(self, model: nn.Module) -> list[str]:
        """Return the names of held tensors that are on the meta device in the model. Persistent
        booleans are left out, since missing values of booleans cannot be detected
        (`autopar.runtime.guards`)."""
        on_meta = {
            name: x
            for name, x in (*model.named_parameters(), *model.named_buffers())
            if x.is_meta and name in self._names
        }
        saved = self.state_dict()
        return [name for name, x in on_meta.items() if x.dtype != torch.bool or name not in saved]

    def _container(self, path: str) -> Standing:
        return cast(Standing, self.get_submodule(path))

    def _make_parts(self, model: nn.Module) -> None:
        """Create a part for each name of a module. Entries of the module that are None are
        copied."""
        classes: dict[type[nn.Module], type[Part]] = {}
        rebound, parts = Rebound(model), dict[int, Standing]()
        for path, module in model.named_modules(remove_duplicate=False):
            here: Standing = self
            cls = rebound.class_of(module)
            if path:
                above, _, name = path.rpartition(".")
                shared_class = classes.get(cls) or classes.setdefault(cls, part_class(cls))
                here = object.__new__(shared_class)
                Part.__init__(here)
                self._container(above).hold_module(name, here)
            for kind in ("_modules", "_parameters", "_buffers"):
                getattr(here, kind).update(
                    {name: None for name, x in getattr(module, kind).items() if x is None}
                )
            here.__dict__["_model_class"] = cls
            parts.setdefault(id(module), here)
        rebound.fill(lambda module: parts[id(module)])

    def _parameter(
        self,
        name: str,
        full: nn.Parameter,
        known: Mapping[str, ProgramTensor],
        shared: Holder | None,
    ) -> tuple[nn.Parameter, str]:
        storage = self._storage(name, full, known)
        if shared is not None:
            shared.check_same(name, storage)
            return shared.get_parameter(name), storage.tensor.name
        trains = full.requires_grad and (name not in known or known[name].requires_grad)
        parameter = hold_value(
            nn.Parameter(storage.distribute(full.detach()), requires_grad=trains)
        )
        if self._world.size() > self.device_mesh.size():
            of_one_stage(parameter.device_mesh)
        return parameter, storage.tensor.name

    def _buffer(
        self, name: str, full: Tensor, known: Mapping[str, ProgramTensor], shared: Holder | None
    ) -> tuple[Tensor, str]:
        """Return a buffer and its name in the program. The buffer is a plain tensor if it is
        replicated and a DTensor if it is sharded."""
        storage = self._storage(name, full, known)
        if shared is not None:
            shared.check_same(name, storage)
            return shared.get_buffer(name), storage.tensor.name
        stored = storage.distribute(full.detach())
        return (
            stored.to_local() if storage.tensor.layout.is_replicated else stored
        ), storage.tensor.name

    def check_same(self, name: str, other: Storage) -> None:
        """Check that a tensor of this module has a given storage.

        Raises:
            RuntimeStateError: if the tensor is not on this rank or has another storage.
        """
        storage = self._storages.get(self._names.get(name, ""))
        if storage is None or (
            storage.placements,
            storage.stored_shape,
            storage.tensor.layout.host,
        ) != (
            other.placements,
            other.stored_shape,
            other.tensor.layout.host,
        ):
            here = "on another stage" if storage is None else f"as {storage.tensor.layout}"
            message = (
                f"{name!r} is stored {here}, but a program for another mode or batch stores it as"
                f" {other.tensor.layout}"
            )
            raise RuntimeStateError(
                message,
                remedy=(
                    "compile the model for that call, and load the state dict into the new module"
                ),
            )

    def _storage(self, name: str, full: Tensor, known: Mapping[str, ProgramTensor]) -> Storage:
        """Return the storage of a tensor. Tensors that the program does not read are replicated."""
        shape = tuple(full.shape)
        tensor = known.get(name) or ProgramTensor(
            name, shape, shape, full.dtype, Layout.replicated(self._num_axes)
        )
        if tensor.shape != shape or tensor.dtype != full.dtype:
            raise RuntimeStateError(
                f"{name!r} is {full.dtype} {shape}, but the program expects {tensor.dtype}"
                f" {tensor.shape}",
                remedy="plan again for this model, or build the model as it was when planned",
            )
        if full.device.type not in ("meta", "cpu", self.device_mesh.device_type):
            raise MeshError(
                f"{name!r} is on {full.device}, but the mesh is on {self.device_mesh.device_type}",
                remedy=(
                    f"move the model to cpu or {self.device_mesh.device_type}, or leave it on meta"
                ),
            )
        return self._storages.setdefault(tensor.name, Storage.of(tensor, self.device_mesh))

    def same_names(self) -> dict[str, list[str]]:
        """Return the names of each parameter and buffer of the state dict.

        Returns:
            The program's name → all names of the model, with the program's name first.
        """
        names_by_owner: dict[str, list[str]] = {}
        for name in self.state_dict():
            if name in self._names:
                names_by_owner.setdefault(self._names[name], []).append(name)
        return {
            owner: sorted(names, key=lambda name: name != owner)
            for owner, names in names_by_owner.items()
        }

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Gather the full state on the host. Every rank must call this.

        Args:
            rank0_only: if True, ranks other than 0 get an empty dict, which saves host memory.

        Returns:
            Copies as plain tensors on the CPU, under all names that the model has for them,
            including tied names, after the model's state dict hooks. The plain model's
            ``load_state_dict`` accepts them.

        Raises:
            RuntimeStateError: on all ranks, if values are missing, or torch 2.11 cannot gather a
                tensor that is sharded inside a dim.
        """
        state: dict[str, Any] = whole_values(self, rank0_only=rank0_only)
        if rank0_only and rank():
            return state
        return self._model_hooks.after_saving(self, state | self._extra_states)

    def extra_state_names(self) -> Collection[str]:
        """Return the state dict names of the results of ``get_extra_state``. The results are those
        from the time when the model was compiled."""
        return self._extra_states.keys()

    def resting(self, name: str) -> Layout:
        """Return the storage layout of the model's tensor `name`, in terms of the dims of the
        graphs."""
        return self._storages[self._names[name]].tensor.layout

    def stored(self, name: str) -> Tensor:
        """Return the parameter or buffer that the model calls `name`."""
        path, _, leaf = name.rpartition(".")
        module = self.get_submodule(path)
        return module.get_parameter(leaf) if leaf in module._parameters else module.get_buffer(leaf)


def holder_of(module: nn.Module) -> Holder:
    """Return the compiled module. For a module that is planned at its first call, return the module
    that this call created.

    Raises:
        RuntimeStateError: if the module is not compiled, or was not called yet.
    """
    holder = module if isinstance(module, Holder) else module._modules.get("module")
    if not isinstance(holder, Holder):
        message = f"{type(module).__name__} is not compiled, or has not been called yet"
        raise RuntimeStateError(
            message, remedy="pass the result of autopar.compile(model, example_inputs=batch)"
        )
    return holder


def _state_dict_hook(
    module: Holder, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    for name in module._names:
        if prefix + name in state:
            state[prefix + name] = hold_value(checkpointable(state[prefix + name]))
    state.update((prefix + name, value) for name, value in module._extra_states.items())


def _load_state_dict_hook(module: Holder, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Replace full tensors of a state dict by DTensors, and remove tensors of other stages. Tensors
    with a wrong shape are left for torch to report. The model's hooks run first, unless the state
    dict is the compiled module's own, with DTensors."""
    if not any(isinstance(x, DTensor) for name, x in state.items() if name.startswith(prefix)):
        module._model_hooks.before_loading(module, state, prefix, rest)
    for name, stored in module._names.items():
        value, storage = state.get(prefix + name), module._storages[stored]
        if (
            isinstance(value, DTensor)
            or not isinstance(value, Tensor)
            or tuple(value.shape) != storage.tensor.shape
        ):
            continue
        if isinstance(module.stored(name), DTensor):
            state[prefix + name] = storage.distribute(value.to(storage.tensor.dtype))
    for name in module._of_other_stages:
        state.pop(prefix + name, None)
    for name, value in module._extra_states.items():
        if prefix + name in state and not is_same(state.pop(prefix + name), value):
            message = (
                f"{name!r} changed after the model was compiled, and the program has the old value"
            )
            raise RuntimeStateError(
                message, remedy=("load it into the plain model, and compile the model again")
            )
