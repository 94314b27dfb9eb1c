"""Every rank's part of a checkpoint, by torch.distributed.checkpoint, which finds out who writes
what.

Saving has two steps. In the first, which is collective, ranks agree on who writes what, and each
takes hold of its part (`collect_parts`), or makes a copy of it. In the second, which is not, each
rank writes its part (`Parts.write`).
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
from autopar.runtime.rank_comm import by_all, rank

Copy = Callable[[str, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What this rank writes.

    Attributes:
        file: the name of this rank's file.
        tensors: boxes of tensors, by their names in the file.
        contents: the text of `contents.json`, of the first rank alone.
    """

    file: str
    tensors: Mapping[str, Tensor]
    contents: str

    def write(self, place: Path) -> dict[str, int]:
        """Write them into a folder; no other rank is asked.

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
) -> Parts:
    """Agree with all ranks on who writes what; every rank calls it.

    Args:
        state: tensors, sharded or not, and other values, by key.
        what: what is saved. kept: what has not changed if it fails. where: the folder that it is
            for, for errors.
        copy: makes a copy of a box of this name; by default parts are the tensors themselves.

    Raises:
        RuntimeStateError: on all ranks, if the state of one cannot be saved.
    """
    writer = _Collector(copy)
    try:
        with no_warning_if_alone():
            dcp.save(state, storage_writer=writer, planner=_SavePlanner())
    except dcp.api.CheckpointException as error:
        reason, remedy = find_reasons(error)
        raise RuntimeStateError(
            f"{what} was not saved: {reason}",
            where=str(where),
            remedy=remedy or f"see the reason. {kept}",
        ) from error
    return Parts(name_file(rank()), writer.tensors, writer.contents)


def save_parts(state: dict[str, Any], place: Path, what: str, kept: str) -> dict[str, int]:
    """Save every rank's part into a folder; every rank calls it.

    Args:
        state, what, kept: as `collect_parts` takes them.
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
    """Torch's planner; values that are not tensors are written as JSON."""

    def create_local_plan(self) -> SavePlan:
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
        return object if isinstance(object, Tensor) else encode(object, (write_item.index.fqn,))


def _check_kind(key: str, tensor: Any) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = (
            f"{key} is a tensor of layout {tensor.layout}, dtype {tensor.dtype}, on {tensor.device}"
        )
        raise RuntimeStateError(what, remedy="save it as dense tensors that have values")


def _is_empty_box(item: WriteItem) -> bool:
    """Whether it is an empty part of a tensor that has elements."""
    data = item.tensor_data
    return data is not None and math.prod(data.chunk.sizes) == 0 < math.prod(data.size)


class _Collector(StorageWriter):
    """What torch asks to write, kept in memory."""

    def __init__(self, copy: Copy | None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.contents = ""
        self._copy = copy

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is nothing of an earlier one."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
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
        return done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files, values = dict[MetadataIndex, str](), dict[str, Any]()
        for result in (result for of_rank in results for result in of_rank):
            if result.index.offset is None:
                values[result.index.fqn] = result.storage_data
            else:
                files[result.index] = result.storage_data
        self.contents = contents_text(metadata, files, values)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


@contextmanager
def no_warning_if_alone() -> Iterator[None]:
    """One process without a process group is no mistake, of which torch would warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def find_reasons(error: dcp.api.CheckpointException) -> tuple[str, str]:
    """What the ranks that failed say, each reason once, and what to do if one says so."""
    failures = [failure[0] for failure in error.failures.values()]
    reasons = dict.fromkeys(
        f"{getattr(each, 'what', '') or f'{type(each).__name__}: {each}'}" for each in failures
    )
    return "; ".join(reasons), next(
        (each.remedy for each in failures if isinstance(each, RuntimeStateError)), ""
    )


def done(value: Any) -> Future[Any]:
    """A future of torch that has its value."""
    future = Future[Any]()
    future.set_result(value)
    return future
