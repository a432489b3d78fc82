"""Store kept fields: one abstract store, in memory or in files under a scratch folder."""

from gigagrad.stores.codecs import Blosc, Codec, faster_codec
from gigagrad.stores.disk import DiskStore, DiskTier, PlannedDiskTier
from gigagrad.stores.host import HostStore, HostTier, MemoryTier
from gigagrad.stores.partial import Strips, Windows
from gigagrad.stores.rounding import Half, Quantised, RoundedStore, Rounding, parse_storage
from gigagrad.stores.scratch import Scratch
from gigagrad.stores.store import Store, crop_shape
from gigagrad.stores.tier import FieldSpec, OpenTier, Tier, register_tier, registered_tier

__all__ = [
    "Blosc",
    "Codec",
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
    "registered_tier",
]
