"""Reading of a checkpoint's tensors and values with torch.distributed.checkpoint. Each rank reads
the shards that it needs, regardless of which rank wrote them.

`contents.json`, the headers of the files and the types of values are checked before any object is
changed. `autopar.checkpoint.earlier_format` reads checkpoints of earlier versions, which have a
pickle instead of `contents.json`.
"""

from __future__ import annotations

import io
import os
from contextlib import nullcontext
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
from autopar.checkpoint.rank_parts import completed_future, find_reasons, no_warning_if_alone
from autopar.checkpoint.safetensors_files import UNSAFE, TensorFile
from autopar.errors import RuntimeStateError
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_comm import by_all


def read_metadata(place: Path) -> Metadata:
    """Read the metadata of a checkpoint of this or an earlier version.

    Args:
        place: the checkpoint's folder.

    Returns:
        The keys, the shapes, and the files that contain them.

    Raises:
        RuntimeStateError: if the metadata file is damaged, or reading it would run code.
        OSError: if the file cannot be read.
    """
    if (place / CONTENTS).is_file() or not (place / OLD_CONTENTS).is_file():
        return read_contents(place)
    return OldReader(place).read_metadata()


def load_parts(state: dict[str, Any], place: Path, *, alone: bool = False) -> None:
    """Read a checkpoint into the tensors of a state in place, and replace its other values.

    Args:
        state: tensors and values to read, by key.
        place: the checkpoint's folder.
        alone: whether only this process reads; otherwise every rank must call this.

    Raises:
        RuntimeStateError: on all ranks that read, if a file is damaged or missing, or reading it
            would run code.
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
        else (TensorsReader(place, found[0]), Planner())
    )
    try:
        together = nullcontext() if alone else announced("loads its part", is_aside=True)
        with no_warning_if_alone(), together:
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=alone)
    except dcp.api.CheckpointException as error:
        reason, remedy = find_reasons(error)
        changed = (
            ". The target objects are partly overwritten"
            if getattr(reader, "has_begun", True)
            else ""
        )
        what = f"the checkpoint was not read: {reason}"
        raise RuntimeStateError(
            what, where=str(place), remedy=(remedy or UNSAFE) + changed
        ) from error


class TensorsReader(StorageReader):
    """A storage reader of the files that `contents.json` lists.

    Args:
        place: the checkpoint's folder.
        metadata: the result of `read_contents`.

    Attributes:
        has_begun: whether tensors may have been overwritten.
    """

    def __init__(self, place: Path, metadata: Metadata) -> None:
        self._place, self._metadata = place, metadata
        self._files: dict[str, TensorFile] = {}
        self.has_begun = False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, which was already read."""
        return self._metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, since a reader serves one load."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing, since the constructor has already set up the reader."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check the headers of all files that this rank reads, before any rank reads a tensor.

        Raises:
            RuntimeStateError: if a tensor in a file differs from its description in
                `contents.json`.
        """
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                file, name, dtype, sizes = self._find(item)
                file.check(name, dtype, sizes)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of a plan into the planner's tensors in place.

        Args:
            plan: the items that this rank reads.
            planner: resolves the tensors, and receives values that are not tensors.

        Raises:
            RuntimeStateError: if a file cannot be read.
        """
        self.has_begun = True
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO())  # the value is in the contents
                continue
            file, name, dtype, sizes = self._find(item)
            box = tuple(
                slice(start, start + length)
                for start, length in zip(item.storage_offsets, item.lengths, strict=True)
            )
            target = planner.resolve_tensor(item).detach()
            target.copy_(file.read(name, dtype, sizes, box))
            planner.commit_tensor(item, target)
        return completed_future(None)

    def _find(self, item: ReadItem) -> tuple[TensorFile, str, torch.dtype, torch.Size]:
        """Return the file of the box of an item, and the name, dtype and sizes of the box."""
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
        """Accept every checkpoint."""
        return True


class Planner(DefaultLoadPlanner):
    """torch's planner, which takes values that are not tensors from `contents.json`. Each value
    must have the same type as the value that it replaces."""

    def create_local_plan(self) -> LoadPlan:
        """Create torch's plan for this rank, and check the types of its values.

        Raises:
            RuntimeStateError: if a saved value has another type than the current value.
        """
        plan = super().create_local_plan()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                key = item.dest_index.fqn
                _check_fits(key, self.state_dict[key], self._saved_values[key])
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set a value of the state to that in `contents.json`.

        Args:
            read_item: the item that the value belongs to.
            value: ignored, since the value was read with the contents.
        """
        *above, last = self.mappings[read_item.dest_index.fqn]
        holder: Any = self.original_state_dict
        for key in above:
            holder = holder[key]
        holder[last] = self._saved_values[read_item.dest_index.fqn]

    @property
    def _saved_values(self) -> SavedValues:
        assert self.metadata is not None
        saved: SavedValues = self.metadata.planner_data
        return saved


def _check_fits(key: str, here: Any, saved: Any) -> None:
    """Raise RuntimeStateError if a saved value has another type than the value that it
    replaces."""
    if not _fits(here, saved):
        what = f"{key} is {saved!r:.40} in the checkpoint, {here!r:.40} here"
        raise RuntimeStateError(
            what,
            remedy=(
                "load it into the model and optimizer that were saved, or use another checkpoint"
            ),
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
