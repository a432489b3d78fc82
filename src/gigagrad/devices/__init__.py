"""Compute tiles somewhere: what a device holds, how its memory is taken and given back, and how fast it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gigagrad.devices.device import Device as Device
    from gigagrad.devices.device import MemoryGuard as MemoryGuard
    from gigagrad.devices.device import device_for as device_for
    from gigagrad.devices.device import register_device as register_device
    from gigagrad.devices.machine import Machine as Machine

__all__ = ["Device", "Machine", "MemoryGuard", "device_for", "register_device"]


def __getattr__(name: str) -> Any:
    """Import what loads PyTorch when it is asked for: `heap` is used before."""
    if name not in __all__:
        raise AttributeError(f"module 'gigagrad.devices' has no attribute {name!r}")
    from gigagrad.devices import cpu, cuda, device  # noqa: F401  # the first two register themselves

    return getattr(device, name)
