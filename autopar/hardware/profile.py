"""Hardware profiles: what a device and its links can do, each figure with its unit, source and date.

Terms. A *figure* is one number of a profile. A *curve* is a set of measured (size, time) points. An *efficiency* is the
share of a peak that is reached: of `peak_flops_per_s` for matmul and attention, of `memory_bandwidth_bytes_per_s` for the
kinds of work that memory bounds. A *link* joins the devices of a mesh axis, ``"intra"`` within a node, ``"inter"`` between
nodes; its bandwidth is per device and direction, as a ring over it reaches.

The named profiles are the files of ``cost_models/``. That folder lies at the top of the repository, where people look for
it; ``autopar/cost_models`` is a link to it, so checkout, editable install and wheel find it at one place, beside this file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import CONTROL, HardwareError
from autopar.hardware.figures import FLOP_KINDS, MEMORY_KINDS, Curve, Figure, Host, Link
from autopar.hardware.reading import Reader, compute_curves, host, kernels, links
from autopar.json_text import read_json

FORMAT = "autopar-hardware"
VERSION = 1
DEVICE_TYPES = ("cpu", "cuda")
_CHIPS = {"a100-sxm4-40gb": "a100-sxm-40gb", "a100-sxm": "a100-sxm-80gb", "h100 80gb hbm3": "h100-sxm", "nvidia h200": "h200-sxm"}
_NEAR = {"h100": "h100-sxm", "h200": "h200-sxm", "a100": "a100-sxm-80gb"}  # of the same chip, on another board
_FOLDER = Path(__file__).parents[1] / "cost_models"
_FIELDS = {"format", "version", "name", "description", "device_type", "device_memory_bytes", "memory_bandwidth_bytes_per_s"}
_FIELDS |= {"launch_overhead_s", "kernels", "overlap_slowdown", "matmul_half_flops", "peak_flops_per_s", "efficiency", "measured", "links"}
_FIELDS |= {"host"}


@dataclass(frozen=True, slots=True, eq=False)
class HardwareProfile:
    """One kind of device with its links. Profiles are equal where all their figures are.

    Attributes:
        peak_flops_per_s: dtype name (``"bfloat16"``) → peak of dense matmul.
        efficiency: kind of `FLOP_KINDS` → dtype name → share of the peak that large sizes reach.
        memory_efficiency: kind of `MEMORY_KINDS` → share of the memory bandwidth.
        overlap_slowdown: what a second of communication beside compute costs compute, in seconds: 0 where it costs nothing, 1 where
            nothing can be hidden, which holds where the file does not say.
        kernels: kind of `KERNELS` → the share that a collective-overlap kernel hides of what its chunks could (`autopar.cost.kernels`),
            of ``reduce_add_rmsnorm`` that of a copy's bandwidth, of ``moe_route`` that of an all-to-all's; a kernel that the file does not
            name is not used.
        matmul_half_flops: a matmul of this many flops reaches half of the efficiency of a large one.
        curves: (kind, dtype name) → measured curve; over flops for `FLOP_KINDS`, over bytes, with dtype ``""``, else.
        figures: every figure by its dotted path, for reports.
        hash: fingerprint of the whole profile.
        device_type: kind of device, of `DEVICE_TYPES`; empty where the file does not say.
        host: what each device has of its host, for offload; None where the file does not say.
        parts: the profiles of which it is the slowest at each op (`slowest_of`); a profile of one kind of device has none.
    """

    name: str
    description: str
    device_memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    launch_overhead_s: float
    overlap_slowdown: float
    kernels: Mapping[str, float]
    matmul_half_flops: float
    peak_flops_per_s: Mapping[str, float]
    efficiency: Mapping[str, Mapping[str, float]]
    memory_efficiency: Mapping[str, float]
    links: Mapping[str, Link]
    curves: Mapping[tuple[str, str], Curve]
    figures: Mapping[str, Figure] = field(repr=False)
    hash: str
    device_type: str = ""
    host: Host | None = None
    parts: tuple[HardwareProfile, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HardwareProfile) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def is_gpu(self) -> bool:
        """Whether the file says that it is one."""
        return self.device_type == "cuda"

    @property
    def has_row_kernels(self) -> bool:
        """Whether norms run by kernels (`autopar.kernels.rows`)."""
        return self.is_gpu

    @staticmethod
    def names() -> tuple[str, ...]:
        """The profiles that come with autopar."""
        return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))

    @staticmethod
    def of_gpu(device_name: str) -> tuple[str, bool]:
        """The profile of a GPU that torch calls `device_name`, and whether it is of that GPU: else it is of the same chip on another board,
        or, where there is none of its kind, of an H100."""
        name = device_name.lower()
        own = next((profile for gpu, profile in _CHIPS.items() if gpu in name), None)
        if own is not None and "nvl" not in name:
            return own, True
        return next((profile for chip, profile in _NEAR.items() if chip in name), "h100-sxm"), False

    @staticmethod
    def local_path() -> Path:
        """Where the profile of this machine is kept: ``$AUTOPAR_HOME`` or ``~/.cache/autopar``."""
        return Path(os.environ.get("AUTOPAR_HOME", Path.home() / ".cache" / "autopar")) / "local.json"

    @staticmethod
    def load(profile: str | os.PathLike[str]) -> HardwareProfile:
        """Load a profile: one of `names`, ``"local"``, or the path of a JSON file.

        Raises:
            HardwareError: where there is none of that name or at that path, or it is malformed; the field is named.
        """
        return HardwareProfile.from_json(HardwareProfile.read(profile), where=str(_path(profile)))

    @staticmethod
    def read(profile: str | os.PathLike[str]) -> Any:
        """The JSON of a profile that `load` would load, its fields not yet checked. Raises `HardwareError` where there is none."""
        path = _path(profile)
        try:
            return read_json(path.read_text(encoding="utf-8"), without=CONTROL)
        except OSError as error:
            raise HardwareError(f"cannot read hardware profile: {error.strerror}", where=str(path), remedy="check the path") from error
        except ValueError as error:
            what = f"hardware profile is no JSON that autopar reads: {error}"
            raise HardwareError(what, where=str(path), remedy="mend the file") from error

    @staticmethod
    def from_json(data: Any, where: str = "") -> HardwareProfile:
        """Make a profile of parsed JSON; `where` names it in errors. Raises `HardwareError` naming the bad field."""
        reader = Reader(where)
        data = reader.mapping(data, "profile")
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise reader.error("format", f"must be {FORMAT!r}, version {VERSION}")
        efficiency = reader.mapping(data.get("efficiency"), "efficiency")
        peaks = reader.figures_of(data, "peak_flops_per_s", "flops/s")
        profile = HardwareProfile(
            name=reader.text(data, "name"),
            description=reader.text(data, "description"),
            device_memory_bytes=int(reader.figure(data, "device_memory_bytes", "bytes")),
            memory_bandwidth_bytes_per_s=reader.figure(data, "memory_bandwidth_bytes_per_s", "bytes/s"),
            launch_overhead_s=reader.figure(data, "launch_overhead_s", "s", zero=True),
            overlap_slowdown=reader.figure(data, "overlap_slowdown", "1", zero=True) if "overlap_slowdown" in data else 1.0,
            kernels=kernels(reader, data),
            matmul_half_flops=reader.figure(data, "matmul_half_flops", "flops", zero=True),
            peak_flops_per_s=peaks,
            efficiency={kind: reader.figures_of(efficiency, kind, "1", "efficiency.", tuple(peaks)) for kind in FLOP_KINDS},
            memory_efficiency={kind: reader.figure(efficiency, kind, "1", "efficiency.") for kind in MEMORY_KINDS},
            links=links(reader, data),
            curves=compute_curves(reader, data),
            figures=reader.figures,
            hash=hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16],
            device_type=reader.one_of(data, "device_type", DEVICE_TYPES) if "device_type" in data else "",
            host=host(reader, data),
        )
        reader.no_more(data, _FIELDS, "")
        return profile


def _path(profile: str | os.PathLike[str]) -> Path:
    """Of a name, ``"local"`` or a path."""
    text = os.fspath(profile)
    if text in HardwareProfile.names():
        return _FOLDER / f"{text}.json"
    if text == "local":
        path = HardwareProfile.local_path()
        if not path.is_file():
            raise HardwareError("this machine has not been measured", where=str(path), remedy="run `autopar profile` first")
        return path
    if os.sep in text or text.endswith(".json") or os.path.exists(text):
        return Path(text)
    known = ", ".join((*HardwareProfile.names(), "local"))
    remedy = f"name one of {known}, or the path of a JSON file; or pass a profile itself as hardware="
    raise HardwareError(f"there is no hardware profile {text!r}", remedy=remedy)
