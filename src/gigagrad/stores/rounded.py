"""A store whose field is rounded on its way in, so that it takes fewer bytes."""

from __future__ import annotations

import torch

from gigagrad.boxes import Box
from gigagrad.stores.rounding import Rounding
from gigagrad.stores.store import Store


class RoundedStore(Store):
    """A field of `dtype` in an `inner` store of the rounding's packed dtype. What is read is `rounding.round` of it.

    For fields of the forward pass only: `add` is refused, because cotangents stay exact, and so are integers.
    """

    def __init__(self, inner: Store, rounding: Rounding, dtype: torch.dtype) -> None:
        assert dtype.is_floating_point, f"a field of {dtype} is stored as it is"
        packed = rounding.packed_dtype(dtype)
        assert inner.dtype == packed, f"the inner store holds {inner.dtype}; {rounding} packs {dtype} as {packed}"
        super().__init__(inner.shape, dtype, inner.axes)
        self._inner = inner
        self._rounding = rounding

    def read(self, box: Box) -> torch.Tensor:
        return self._rounding.unpack(self._inner.read(box), box, self.axes, self.dtype)

    def write(self, box: Box, crop: torch.Tensor) -> None:
        self._inner.write(box, self._rounding.pack(crop, box, self.axes))

    def add(self, box: Box, crop: torch.Tensor) -> None:
        raise AssertionError("sums are never rounded: a cotangent belongs in a store of its own dtype")

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()
