"""Define a bag: the patches of a slide, a batch `(N, C, h, w)` for a model that a run reads a few at a time.

A reader derives from `Bag`, calls `Bag.__init__` and implements `_read_inside`, which is only ever asked for a few
patches, one at least, that there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from gigagrad.errors import ImageError
from gigagrad.images.image import Closing
from gigagrad.images.pixels import Array, Pixels

if TYPE_CHECKING:
    import torch


class Bag(Closing, ABC):
    """Patches of one slide, or of several, in a fixed order.

    Attributes (constant after construction):
        shape: `(N, C, h, w)`: the number of patches, channels, and pixels of one patch.
        dtype: of what `read` returns; a `torch.dtype` only where the source is a tensor.
        mpp: micrometres per pixel of the patches, None if unknown.
        name: a stem for output folders and messages.
        cache_bytes: the most that reading may keep in memory beside the pixels it returns.
        thread_bytes: what each thread that reads holds beside that, at most, while it decodes.
        decode_seconds: about what one thread takes to decode all patches; 0 where pixels are only copied.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, int, int, int],
        dtype: np.dtype[Any] | torch.dtype,
        name: str,
        mpp: float | None = None,
        cache_bytes: int = 0,
        thread_bytes: int = 0,
        decode_seconds: float = 0.0,
    ) -> None:
        """Describe a bag. Raises `ImageError` for one without patches, or of patches without pixels."""
        if shape[0] < 1:
            raise ImageError(f"{name} is a bag without patches; give one patch at least")
        if min(shape) < 1:
            raise ImageError(f"{name} has no pixels: its shape (N, C, h, w) is {shape}; every axis must be at least 1")
        self.shape: Final = shape
        self.dtype: Final = dtype
        self.name = name
        self.mpp: Final = mpp
        self.cache_bytes: Final = cache_bytes
        self.thread_bytes: Final = thread_bytes
        self.decode_seconds: Final = decode_seconds

    def __len__(self) -> int:
        return self.shape[0]

    @final
    def read(self, start: int, stop: int) -> Pixels:
        """Read the patches `start` to `stop` (excluded), `(stop - start, C, h, w)`.

        The result may share memory with the source: do not write to it. Safe to call from several threads at once.

        Raises `ImageError` if the bag is closed, there are no such patches, or a file turns out to be corrupt there.
        """
        self._require_open()
        if not 0 <= start < stop <= len(self):
            raise ImageError(f"{self.name} has the patches 0 to {len(self) - 1}; asked for {start} to {stop - 1}")
        patches = self._read_inside(start, stop)
        assert patches.shape == (stop - start, *self.shape[1:]), (patches.shape, start, stop)
        return patches

    @abstractmethod
    def _read_inside(self, start: int, stop: int) -> Pixels:
        """Read patches that there are, one at least; thread-safe."""

    def __repr__(self) -> str:
        scale = "mpp unknown" if self.mpp is None else f"{self.mpp:g} um/px"
        return f"<{type(self).__name__} {self.name}: {' x '.join(map(str, self.shape))} {self.dtype}, {scale}>"


class ArrayBag(Bag):
    """A bag in memory: an array or a tensor `(N, C, h, w)`."""

    def __init__(self, patches: Array | torch.Tensor, *, name: str = "bag", mpp: float | None = None) -> None:
        """Raises `ImageError` for other than four axes."""
        if patches.ndim != 4:
            raise ImageError(f"a bag has the shape (N, C, h, w), got {tuple(patches.shape)}")
        shape = (patches.shape[0], patches.shape[1], patches.shape[2], patches.shape[3])
        super().__init__(shape=shape, dtype=patches.dtype, name=name, mpp=mpp)
        self._patches: Pixels | None = patches if isinstance(patches, np.ndarray) else patches.detach()

    def _read_inside(self, start: int, stop: int) -> Pixels:
        assert self._patches is not None
        return self._patches[start:stop]

    def _release(self) -> None:
        self._patches = None
