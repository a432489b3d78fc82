"""Where kept fields live: one abstract store, in memory or in files under a scratch folder."""

from gigagrad.stores.codecs import Blosc, Codec, faster_codec
from gigagrad.stores.disk import DiskStore
from gigagrad.stores.host import HostStore
from gigagrad.stores.rounded import RoundedStore
from gigagrad.stores.rounding import Half, Quantised, Rounding, parse_storage
from gigagrad.stores.scratch import Scratch
from gigagrad.stores.store import Store

__all__ = [
    "Blosc",
    "Codec",
    "DiskStore",
    "Half",
    "HostStore",
    "Quantised",
    "RoundedStore",
    "Rounding",
    "Scratch",
    "Store",
    "faster_codec",
    "parse_storage",
]
