"""Where kept fields live: one abstract store, in memory or in files under a scratch folder."""

from gigagrad.stores.disk import DiskStore
from gigagrad.stores.host import HostStore
from gigagrad.stores.scratch import WRITES_BEHIND, Scratch
from gigagrad.stores.store import Store

__all__ = ["WRITES_BEHIND", "DiskStore", "HostStore", "Scratch", "Store"]
