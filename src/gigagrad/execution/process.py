"""What this process holds in memory, as the operating system counts it."""

from __future__ import annotations

import os
import resource
import sys

import torch


def resident_bytes() -> int:
    """Resident memory of this process now."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The highest resident memory of this process since it started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def held_bytes(device: torch.device) -> int:
    """Memory held now on the tier that `memory` bounds: the process on the CPU, the allocator's pool on a GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


def peak_bytes(device: torch.device) -> int:
    """The highest `held_bytes` has been."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident_bytes()
