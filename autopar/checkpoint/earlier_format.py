"""Safe reading of checkpoints of earlier versions, which torch.distributed.checkpoint wrote with
pickles.

torch unpickles `.metadata` and every saved value that is not a tensor, and a pickle may call any
function. The unpickler in this file creates only the classes that `.metadata` files of earlier
versions contain. Other values are read with `torch.load(weights_only=True)`, which torch uses for
tensors. This format is no longer written.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from autopar.checkpoint.contents import check_boxes
from autopar.checkpoint.safetensors_files import unsafe
from autopar.errors import RuntimeStateError

FILE = ".metadata"
_PARTS = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        (_PARTS, "BytesStorageMetadata"),
        (_PARTS, "ChunkStorageMetadata"),
        (_PARTS, "Metadata"),
        (_PARTS, "MetadataIndex"),
        (_PARTS, "StorageMeta"),
        (_PARTS, "TensorProperties"),
        (_PARTS, "TensorStorageMetadata"),
        (_PARTS, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
    }
)
_KINDS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_PATHS = frozenset((module, kind) for module in ("pathlib", "pathlib._local") for kind in _KINDS)


class OldReader(FileSystemReader):
    """torch's reader of a folder. In `.metadata`, it accepts only classes that describe tensors.

    Args:
        place: the checkpoint's folder.
        metadata: the content of `.metadata`, if it was already read.
    """

    def __init__(self, place: Path, metadata: Metadata | None = None) -> None:
        super().__init__(place)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the keys of the checkpoint and the files that contain them. Arguments are ignored.

        Raises:
            RuntimeStateError: if the file refers to any other class, or cannot be read.
            OSError: if the file cannot be opened.
        """
        place = Path(self.path) / FILE
        if self._known is not None:
            return self._known
        with place.open("rb") as file:
            metadata = _read_metadata(file, place)
        _check_form(metadata, place)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, like torch's reader.

        Args:
            plan: the items to read.
            planner: receives the values that were read.

        Raises:
            RuntimeStateError: if a file is damaged.
        """
        try:
            return super().read_data(plan, planner)
        except RuntimeStateError:
            raise
        except Exception as error:  # torch raises many classes for unreadable files
            names = sorted(
                {self.storage_data[item.storage_index].relative_path for item in plan.items}
            )
            what = (
                f"{', '.join(names[:3])} cannot be read ({type(error).__name__}:"
                f" {_first_line(error)})"
            )
            raise unsafe(what, Path(self.path)) from error


class OldPlanner(DefaultLoadPlanner):
    """torch's planner, which reads values that are not tensors with `weights_only=True`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one saved value into the state.

        Args:
            read_item: the item that the value belongs to.
            value: the bytes of the value, as `torch.save` wrote them.

        Raises:
            RuntimeStateError: if the value does not consist of tensors, numbers, texts, lists and
                dicts.
        """
        try:
            found = torch.load(value, weights_only=True)
        except Exception as error:  # pickle and torch raise many classes for invalid values
            what = f"{read_item.dest_index.fqn} of the checkpoint is refused: {_first_line(error)}"
            raise unsafe(what, None) from error
        safe = io.BytesIO()  # serialized again, since torch unpickles it without restrictions
        torch.save(found, safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], place: Path) -> None:
        super().__init__(file)
        self._place = place

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or function.

        Raises:
            RuntimeStateError: if the pickle refers to anything that is not allowed.
        """
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) in _PATHS:  # the folder at the time of saving; it is never opened
            return PurePath
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
        what = f"{FILE} of the checkpoint is refused: it would create or call {module}.{name}"
        raise unsafe(what, self._place)


def _check_form(metadata: Metadata, place: Path) -> None:
    """Check that the metadata describes tensors whose boxes are in files of the checkpoint's folder
    and cover the tensors; otherwise raise RuntimeStateError."""
    try:
        kinds = {type(each) for each in metadata.state_dict_metadata.values()}
        names = [info.relative_path for info in (metadata.storage_data or {}).values()]
        outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        if outside or not kinds <= {TensorStorageMetadata, BytesStorageMetadata}:
            raise TypeError(f"it names {outside[:1] or kinds}")
        check_boxes(metadata, place)
    except (AttributeError, TypeError, ValueError) as error:
        raise unsafe(f"{FILE} of the checkpoint is damaged: {error}", place) from error


def _read_metadata(file: IO[bytes], place: Path) -> Metadata:
    try:
        found = _Unpickler(file, place).load()
    except RuntimeStateError:
        raise
    except Exception as error:  # a broken pickle raises many classes
        what = f"{FILE} of the checkpoint cannot be read: {_first_line(error)}"
        raise unsafe(what, place) from error
    if not isinstance(found, Metadata):
        what = f"{FILE} of the checkpoint is refused: it is a {type(found).__name__}"
        raise unsafe(what, place)
    return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
