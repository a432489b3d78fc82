"""Where kept fields live. One abstract store; host memory is the tier there is so far."""

from gigagrad.stores.codecs import Blosc, Codec, Raw, faster_codec
from gigagrad.stores.host import HostStore
from gigagrad.stores.rounded import RoundedStore
from gigagrad.stores.rounding import Half, Quantised, Rounding, parse_storage
from gigagrad.stores.store import Store

__all__ = [
    "Blosc",
    "Codec",
    "Half",
    "HostStore",
    "Quantised",
    "Raw",
    "RoundedStore",
    "Rounding",
    "Store",
    "faster_codec",
    "parse_storage",
]
