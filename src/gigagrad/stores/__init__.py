"""Store kept fields: one abstract store, in memory or in files under a scratch folder."""

from gigagrad.stores.disk import Blosc, DiskStore, DiskTier, PlannedDiskTier, faster_codec
from gigagrad.stores.host import HostStore, HostTier, MemoryTier
from gigagrad.stores.rounding import Half, Quantised, RoundedStore, Rounding, parse_storage
from gigagrad.stores.scratch import Scratch
from gigagrad.stores.store import FieldSpec, OpenTier, Store, Strips, Tier, Windows, crop_shape, register_tier

__all__ = [
    "Blosc",
    "DiskStore",
    "DiskTier",
    "FieldSpec",
    "Half",
    "HostStore",
    "HostTier",
    "MemoryTier",
    "OpenTier",
    "PlannedDiskTier",
    "Quantised",
    "RoundedStore",
    "Rounding",
    "Scratch",
    "Store",
    "Strips",
    "Tier",
    "Windows",
    "crop_shape",
    "faster_codec",
    "parse_storage",
    "register_tier",
]
