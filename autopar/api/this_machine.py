"""What is planned for where nobody says it: this machine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from autopar.hardware import HardwareProfile
from autopar.private_folder import find_foreign, find_sharing
from autopar.request import RESERVED_SHARE, PlanOptions
from autopar.units import size

log = logging.getLogger("autopar")
_told: set[str] = set()


def default_hardware(device_type: str | None = None) -> str:
    """``local`` where this machine was measured for that kind of device, else the GPU that is there, else ``cpu-gloo``.

    Without `device_type` a machine that has a GPU is that GPU, and any other whatever was measured. A ``local`` that does not say what
    it is of was put there by hand, and is taken. Where no profile is of the GPU that is there, the log says whose figures are taken.
    """
    wanted = device_type or ("cuda" if torch.cuda.is_available() else None)
    if _is_own(HardwareProfile.local_path()):
        measured = HardwareProfile.load("local").device_type
        if wanted is None or measured in ("", wanted):
            return "local"
    if not torch.cuda.is_available() or device_type == "cpu":
        return "cpu-gloo"
    device_name = torch.cuda.get_device_name()
    profile, is_its_own = HardwareProfile.of_gpu(device_name)
    if not is_its_own:
        what = "there is no profile of %s: planned with the times of %s; `autopar profile --device cuda` measures it in half a minute"
        _tell_once(what, device_name, profile)
    return profile


def _is_own(path: Path) -> bool:
    """Whether there is a profile, which nobody but this user can have written; the log says if another user can have."""
    if not path.exists():
        return False
    path = path.resolve()
    if reason := find_sharing(path.parent) or find_foreign(path):
        _tell_once("the profile of this machine is not taken by default: %s; pass hardware='local' to take it anyway", reason)
    return not reason


def within_this_gpu(options: PlanOptions, profile: HardwareProfile) -> PlanOptions:
    """With a budget that the GPU of this machine has, where its profile has more memory and no budget was asked for."""
    if options.memory_bytes is not None or profile.device_type == "cpu" or not torch.cuda.is_available():
        return options
    here = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if here >= profile.device_memory_bytes:
        return options
    budget = int(here * (1 - RESERVED_SHARE))
    sizes = (size(num_bytes) for num_bytes in (profile.device_memory_bytes, here, budget))
    _tell_once("%s has %s of memory, this GPU %s: planned within %s", profile.name, *sizes)
    return replace(options, memory_bytes=budget)


def _tell_once(what: str, *words: str) -> None:
    if (said := what % words) not in _told:
        _told.add(said)
        log.warning(said)
