"""Where kept fields live. One abstract store; host memory is the tier there is so far."""

from gigagrad.stores.host import HostStore
from gigagrad.stores.store import Store

__all__ = ["HostStore", "Store"]
