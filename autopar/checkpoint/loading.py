"""Reading a checkpoint's tensors and values: each rank reads its part of what others wrote, by
torch.distributed.checkpoint.

Everything is looked at before anything is changed: `contents.json`, the headers of the files, and
whether values fit. Checkpoints of earlier versions, which have a pickle in its place, are read by
`saved_reader`.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from autopar.checkpoint.contents import CONTENTS, SavedBox, SavedValues, name_box, read_contents
from autopar.checkpoint.earlier_format import FILE as OLD_CONTENTS
from autopar.checkpoint.earlier_format import OldPlanner, OldReader
from autopar.checkpoint.parts import done, find_reasons, no_warning_if_alone
from autopar.checkpoint.safetensors_files import UNSAFE, TensorFile
from autopar.errors import RuntimeStateError
from autopar.runtime.rank_comm import by_all


def read_metadata(place: Path) -> Metadata:
    """Read what a checkpoint holds.

    Args:
        place: the checkpoint's folder.

    Returns:
        The keys, the shapes, and in which files they are.

    Raises:
        RuntimeStateError: if the file that says so is damaged, or would run code.
        OSError: if it cannot be read.
    """
    if (place / CONTENTS).is_file() or not (place / OLD_CONTENTS).is_file():
        return read_contents(place)
    return OldReader(place).read_metadata()


def load_parts(state: dict[str, Any], place: Path, *, alone: bool = False) -> None:
    """Read a checkpoint into tensors where they lie, and into other values by key.

    Args:
        state: what is read, by key.
        place: the checkpoint's folder.
        alone: by this process only; else every rank calls it.

    Raises:
        RuntimeStateError: on all that read, if a file is damaged, would run code, or is not there.
    """
    found: list[Metadata] = []
    if alone:
        found.append(read_metadata(place))
    else:
        by_all(lambda: found.append(read_metadata(place)), str(place), UNSAFE)
    is_old = not isinstance(found[0].planner_data, SavedValues)
    reader, planner = (
        (OldReader(place, found[0]), OldPlanner())
        if is_old
        else (Reader(place, found[0]), Planner())
    )
    try:
        with no_warning_if_alone():
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=alone)
    except dcp.api.CheckpointException as error:
        reason, remedy = find_reasons(error)
        changed = (
            ". What it was read into is in part overwritten"
            if getattr(reader, "has_begun", True)
            else ""
        )
        what = f"the checkpoint was not read: {reason}"
        raise RuntimeStateError(
            what, where=str(place), remedy=(remedy or UNSAFE) + changed
        ) from error


class Reader(StorageReader):
    """Reads the files that `contents.json` names.

    Args:
        place: the checkpoint's folder.
        metadata: what `read_contents` returned.
    """

    def __init__(self, place: Path, metadata: Metadata) -> None:
        self._place, self._metadata = place, metadata
        self._files: dict[str, TensorFile] = {}
        self.has_begun = False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is nothing of an earlier one."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Look at the headers of all files that this rank reads, before any rank reads one."""
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                file, name, dtype, sizes = self._find(item)
                file.check(name, dtype, sizes)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.has_begun = True
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO())  # its value was read with the contents
                continue
            file, name, dtype, sizes = self._find(item)
            box = tuple(
                slice(start, start + length)
                for start, length in zip(item.storage_offsets, item.lengths, strict=True)
            )
            target = planner.resolve_tensor(item).detach()
            target.copy_(file.read(name, dtype, sizes, box))
            planner.commit_tensor(item, target)
        return done(None)

    def _find(self, item: ReadItem) -> tuple[TensorFile, str, torch.dtype, torch.Size]:
        """The file of the box that is read, its name there, its dtype and its sizes."""
        index = item.storage_index
        of_box: SavedBox = self._metadata.storage_data[index]
        if of_box.file not in self._files:
            self._files[of_box.file] = TensorFile(self._place / of_box.file)
        return (
            self._files[of_box.file],
            name_box(index.fqn, index.offset or ()),
            of_box.dtype,
            of_box.sizes,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Planner(DefaultLoadPlanner):
    """Torch's planner; values that are not tensors come from `contents.json`, and have to be of
    the kind that is there now."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                key = item.dest_index.fqn
                _check_fits(key, self.state_dict[key], self._saved[key])
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        *above, last = self.mappings[read_item.dest_index.fqn]
        holder: Any = self.original_state_dict
        for key in above:
            holder = holder[key]
        holder[last] = self._saved[read_item.dest_index.fqn]

    @property
    def _saved(self) -> SavedValues:
        assert self.metadata is not None
        saved: SavedValues = self.metadata.planner_data
        return saved


def _check_fits(key: str, here: Any, saved: Any) -> None:
    """Raises RuntimeStateError if a saved value is of another kind than the one that it
    replaces."""
    if not _fits(here, saved):
        what = f"{key} is {saved!r:.40} in the checkpoint, {here!r:.40} here"
        raise RuntimeStateError(
            what, remedy="load it into what it was saved of, or take another checkpoint"
        )


def _fits(here: Any, saved: Any) -> bool:
    if here is None or saved is None:
        return True
    if isinstance(here, list | tuple):
        return (
            isinstance(saved, list | tuple)
            and len(here) == len(saved)
            and all(map(_fits, here, saved))
        )
    kinds: tuple[type, ...] = (
        (bool, int, float) if isinstance(here, bool | int | float) else (type(here),)
    )
    return isinstance(saved, kinds) or type(here).__module__ == "numpy"
