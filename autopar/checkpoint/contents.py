"""The file `contents.json`. It lists the tensors of a checkpoint, the files that contain them, and
the values that are not tensors.

    {"format": "autopar-contents", "version": 1,
     "tensors": {"model.weight": {"dtype": "float32", "shape": [8, 4],
                                  "boxes": [["rank_00000.safetensors", [0, 0], [4, 4]],
                                  ["rank_00001.safetensors", [4, 0], [4, 4]]]}},
     "values": {"optimizer.param_groups.weight.lr": 0.1}}

A box is a part of the full tensor, given by its file, its offsets and its sizes. Its name in the
file consists of the tensor's name and the offsets (`name_box`), so that no entry can refer to
another tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from autopar.checkpoint.safetensors_files import SUFFIX, damage_error
from autopar.checkpoint.values import decode
from autopar.core.json_text import read_json

CONTENTS = "contents.json"
_FORMAT, _VERSION = "autopar-contents", 1


class SavedValues(dict[str, Any]):
    """The values of a checkpoint that are not tensors, by key."""


@dataclass(frozen=True, slots=True)
class SavedBox:
    """The file, dtype and sizes of a part of a tensor."""

    file: str
    dtype: torch.dtype
    sizes: torch.Size


_FILE = re.compile(rf"rank_\d{{5,9}}\{SUFFIX}")
_MOST_DIMS = 64


def name_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank:05d}{SUFFIX}"


def name_box(key: str, offsets: Iterable[int]) -> str:
    """Return the name of a box in its file."""
    return f"{key}[{','.join(map(str, offsets))}]"


def contents_text(
    metadata: Metadata, files: Mapping[MetadataIndex, str], values: Mapping[str, Any]
) -> str:
    """Return the text of `contents.json`.

    Args:
        metadata: the tensors, as torch.distributed.checkpoint describes them.
        files: the name of the file of each box.
        values: the values that are not tensors, by key, as JSON data.
    """
    tensors = {
        key: {
            "dtype": str(of.properties.dtype).removeprefix("torch."),
            "shape": list(of.size),
            "boxes": [
                [files[MetadataIndex(key, box.offsets)], list(box.offsets), list(box.sizes)]
                for box in of.chunks
            ],
        }
        for key, of in metadata.state_dict_metadata.items()
        if isinstance(of, TensorStorageMetadata)
    }
    return (
        json.dumps(
            {"format": _FORMAT, "version": _VERSION, "tensors": tensors, "values": dict(values)},
            allow_nan=False,
        )
        + "\n"
    )


def read_contents(place: Path) -> Metadata:
    """Read `contents.json` of a checkpoint.

    Args:
        place: the checkpoint's folder.

    Returns:
        The tensors, as torch.distributed.checkpoint describes them. `storage_data` has a `SavedBox`
        for each box, and `planner_data` the values by key.

    Raises:
        RuntimeStateError: if the file is damaged, or boxes do not cover a tensor.
        OSError: if the file cannot be read.
    """
    path = place / CONTENTS
    try:
        metadata = _metadata_of(read_json(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise damage_error(f"{CONTENTS} of the checkpoint is damaged: {error}", path) from error
    check_boxes(metadata, path)
    return metadata


def check_boxes(metadata: Metadata, path: Path) -> None:
    """Check that the boxes of each tensor are inside the tensor, do not overlap, and cover it, so
    that loading overwrites every element.

    Args:
        metadata: the tensors of a checkpoint and their boxes.
        path: the file that `metadata` was read from.

    Raises:
        RuntimeStateError: if the boxes of a tensor are invalid. The message names the tensor.
    """
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata) and (fault := _find_fault(tensor)):
            raise damage_error(
                f"{path.name} of the checkpoint is damaged: the parts of {key} {fault}", path
            )


def _metadata_of(data: Any) -> Metadata:
    known = data if isinstance(data, dict) else {}
    if known.get("format") != _FORMAT or known.get("version") != _VERSION:
        raise ValueError(
            f"it is of format {known.get('format')!r:.40}, version {known.get('version')!r:.40}"
        )
    tensors, values = known.get("tensors"), known.get("values")
    if (
        not isinstance(tensors, dict)
        or not isinstance(values, dict)
        or tensors.keys() & values.keys()
    ):
        raise ValueError("it does not list tensors and values under unique names")
    metadata = Metadata(
        {},
        planner_data=SavedValues((key, decode(value, (key,))) for key, value in values.items()),
        storage_data={},
    )
    metadata.state_dict_metadata.update((key, BytesStorageMetadata()) for key in values)
    for key, entry in tensors.items():
        metadata.state_dict_metadata[key], boxes = _read_tensor(key, entry)
        metadata.storage_data.update(boxes)
    return metadata


def _read_tensor(
    key: str, entry: Any
) -> tuple[TensorStorageMetadata, dict[MetadataIndex, SavedBox]]:
    """Read the entry of one tensor. Return its metadata, and its boxes by index."""
    known = entry if isinstance(entry, dict) else {}
    name, boxes = known.get("dtype"), known.get("boxes")
    dtype = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or not isinstance(boxes, list):
        raise ValueError(f"{key} has no dtype or no boxes")
    tensor, found = (
        TensorStorageMetadata(
            TensorProperties(dtype=dtype), _read_sizes(key, known.get("shape")), []
        ),
        {},
    )
    for box in boxes:
        if (
            not isinstance(box, list)
            or len(box) != 3
            or not isinstance(box[0], str)
            or not _FILE.fullmatch(box[0])
        ):
            raise ValueError(f"a box of {key} does not give its file, offset and sizes")
        chunk = ChunkStorageMetadata(_read_sizes(key, box[1]), _read_sizes(key, box[2]))
        if math.prod(chunk.sizes) == 0 < math.prod(tensor.size):
            raise ValueError(f"a box of {key} is empty")
        tensor.chunks.append(chunk)
        found[MetadataIndex(key, chunk.offsets)] = SavedBox(box[0], dtype, chunk.sizes)
    if len(found) != len(boxes):
        raise ValueError(f"two boxes of {key} start at the same element")
    return tensor, found


def _read_sizes(key: str, sizes: Any) -> torch.Size:
    if (
        not isinstance(sizes, list)
        or len(sizes) > _MOST_DIMS
        or not all(type(size) is int and 0 <= size < 2**62 for size in sizes)
    ):
        raise ValueError(f"{key} has a shape or an offset that is not a list of sizes")
    return torch.Size(sizes)


def _find_fault(tensor: TensorStorageMetadata) -> str:
    """Describe the fault in the boxes of a tensor; empty if there is none."""
    shape, boxes = tensor.size, [box for box in tensor.chunks if math.prod(box.sizes)]
    for box in boxes:
        if not len(shape) == len(box.offsets) == len(box.sizes):
            return "have a different number of dims"
        if any(
            start < 0 or size < 0 or start + size > of
            for start, size, of in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            return "exceed its shape"
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        return "do not cover it"
    return "overlap" if _overlap(boxes) else ""


def _overlap(boxes: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether two of the boxes share an element. The boxes must have the same number of dims
    and must not be empty."""
    if len(boxes) < 2 or not boxes[0].sizes:
        return len(boxes) > 1
    # The boxes are sorted along the dim with the most different offsets. Each box is compared with
    # those that begin before its offset and end after it.
    dims = range(len(boxes[0].sizes))
    along = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}))
    still_open: list[ChunkStorageMetadata] = []
    for box in sorted(boxes, key=lambda box: box.offsets[along]):
        still_open = [
            other
            for other in still_open
            if other.offsets[along] + other.sizes[along] > box.offsets[along]
        ]
        for other in still_open:
            if all(
                max(a, b) < min(a + n, b + m)
                for a, n, b, m in zip(
                    box.offsets, box.sizes, other.offsets, other.sizes, strict=True
                )
            ):
                return True
        still_open.append(box)
    return False
