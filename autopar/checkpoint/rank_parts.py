"""The part of a checkpoint that each rank writes. torch.distributed.checkpoint assigns tensors and
shards to ranks.

Saving has two steps. The first step is collective: ranks agree on the assignment, and each rank
collects its part or a copy of it (`collect_parts`). In the second step, each rank writes its part
without communication (`CheckpointParts.write`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autopar.checkpoint.contents import CONTENTS, contents_text, name_box, name_file
from autopar.checkpoint.safetensors_files import write_tensors
from autopar.checkpoint.values import encode
from autopar.errors import RuntimeStateError, size_text
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_comm import by_all, rank

Copy = Callable[[str, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointParts:
    """The part of a checkpoint that this rank writes.

    Attributes:
        file: the name of this rank's file.
        tensors: boxes of tensors, by their names in the file.
        contents: the text of `contents.json` on the first rank; empty on the others.
    """

    file: str
    tensors: Mapping[str, Tensor]
    contents: str

    def write(self, place: Path) -> dict[str, int]:
        """Write the files of this rank into a folder, without communication.

        Args:
            place: the folder.

        Returns:
            The CRC-32 of each file, by its name.

        Raises:
            OSError: if a file cannot be written.
        """
        sums = {}
        if self.tensors:
            sums[self.file] = write_tensors(place / self.file, self.tensors)
        if self.contents:
            sums[CONTENTS] = write_bytes(place / CONTENTS, self.contents.encode())
        return sums


def write_bytes(path: Path, content: bytes) -> int:
    """Write a file, wait until it is on the disk, and return its CRC-32."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return zlib.crc32(content)


def collect_parts(
    state: dict[str, Any], what: str, kept: str, where: Path, copy: Copy | None = None
) -> CheckpointParts:
    """Agree with all ranks on the part that each rank writes, and collect this rank's part. Every
    rank must call this.

    Args:
        state: tensors, sharded or not, and other values, by key.
        what: the name of the state, for error messages.
        kept: a sentence about what is unchanged if saving fails, for error messages.
        where: the folder to write into, for error messages.
        copy: copies a box, given its name and tensor; by default, tensors are not copied.

    Raises:
        RuntimeStateError: on all ranks, if the state of any rank cannot be saved.
    """
    writer = _Collector(copy)
    try:
        with no_warning_if_alone(), announced("saves its part", is_aside=True):
            dcp.save(state, storage_writer=writer, planner=_SavePlanner())
    except dcp.api.CheckpointException as error:
        reason, remedy = find_reasons(error)
        raise RuntimeStateError(
            f"{what} was not saved: {reason}",
            where=str(where),
            remedy=remedy or f"see the reason. {kept}",
        ) from error
    return CheckpointParts(name_file(rank()), writer.tensors, writer.contents)


def save_parts(state: dict[str, Any], place: Path, what: str, kept: str) -> dict[str, int]:
    """Save every rank's part into a folder. Every rank must call this.

    Args:
        state, what, kept: see `collect_parts`.
        place: the folder, which all ranks see.

    Returns:
        The CRC-32 of each file, by its name.

    Raises:
        RuntimeStateError: on all ranks, if a part cannot be saved.
    """
    parts = collect_parts(state, what, kept, place)
    free = size_text(shutil.disk_usage(place).free)
    remedy = f"{what} was not saved, see the reason; {free} are free there. {kept}"
    return {
        name: checksum
        for each in by_all(lambda: parts.write(place), str(place), remedy)
        for name, checksum in each.items()
    }


class _SavePlanner(DefaultSavePlanner):
    """torch's planner, which encodes values that are not tensors as JSON data."""

    def create_local_plan(self) -> SavePlan:
        """Create torch's plan for this rank without empty boxes, and check its items.

        Raises:
            RuntimeStateError: if a tensor is not dense or has no values, or a value cannot be
                encoded.
        """
        plan = super().create_local_plan()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                self.resolve_data(item)
            else:
                _check_kind(item.index.fqn, self.state_dict[item.index.fqn])
        return dataclasses.replace(
            plan, items=[item for item in plan.items if not _is_empty_box(item)]
        )

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Encode a value as JSON data. Tensors are unchanged.

        Args:
            write_item: the item of the value. Error messages contain its key.
            object: the value.
        """
        return object if isinstance(object, Tensor) else encode(object, (write_item.index.fqn,))


def _check_kind(key: str, tensor: Any) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = (
            f"{key} is a tensor of layout {tensor.layout}, dtype {tensor.dtype}, on {tensor.device}"
        )
        raise RuntimeStateError(what, remedy="save dense tensors that have values")


def _is_empty_box(item: WriteItem) -> bool:
    """Return whether an item is an empty box of a tensor that has elements."""
    data = item.tensor_data
    return data is not None and math.prod(data.chunk.sizes) == 0 < math.prod(data.size)


class _Collector(StorageWriter):
    """A storage writer that collects the tensors and the contents in memory."""

    def __init__(self, copy: Copy | None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.contents = ""
        self._copy = copy

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, since a collector serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing, since the constructor has already set up the writer."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Collect the tensors of a plan or copies of them, by their names in the file.

        Args:
            plan: the items that this rank writes.
            planner: resolves the data of an item.

        Returns:
            The results: the file name of each tensor, and the JSON data of each other value.
        """
        results = []
        for item in plan.items:
            found = planner.resolve_data(item)
            if isinstance(found, Tensor):
                name = name_box(item.index.fqn, item.index.offset or ())
                self.tensors[name] = (
                    found.detach() if self._copy is None else self._copy(name, found.detach())
                )
                results.append(
                    WriteResult(item.index, found.numel() * found.itemsize, name_file(rank()))
                )
            else:
                results.append(WriteResult(item.index, 0, found))
        return completed_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Create the text of `contents.json`. torch calls this on the first rank.

        Args:
            metadata: the tensors of all ranks.
            results: the results of `write_data`, by rank.
        """
        files, values = dict[MetadataIndex, str](), dict[str, Any]()
        for result in (result for of_rank in results for result in of_rank):
            if result.index.offset is None:
                values[result.index.fqn] = result.storage_data
            else:
                files[result.index] = result.storage_data
        self.contents = contents_text(metadata, files, values)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept every checkpoint."""
        return True


@contextmanager
def no_warning_if_alone() -> Iterator[None]:
    """Suppress torch's warning about a missing process group, since a single process needs no
    group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def find_reasons(error: dcp.api.CheckpointException) -> tuple[str, str]:
    """Return the distinct reasons of the ranks that failed, and the first remedy among them. The
    remedy is empty if there is none."""
    failures = [failure[0] for failure in error.failures.values()]
    reasons = dict.fromkeys(
        f"{getattr(each, 'what', '') or f'{type(each).__name__}: {each}'}" for each in failures
    )
    return "; ".join(reasons), next(
        (each.remedy for each in failures if isinstance(each, RuntimeStateError)), ""
    )


def completed_future(value: Any) -> Future[Any]:
    """Return a torch future that is completed with a value."""
    future = Future[Any]()
    future.set_result(value)
    return future
