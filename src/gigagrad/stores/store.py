"""Define the abstract store: one field of the whole image, written, added to and read box by box."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from gigagrad.boxes import Box


def crop_shape(shape: tuple[int, ...], axes: tuple[int, int], box: Box) -> tuple[int, ...]:
    """Return the shape of a field's crop on a box."""
    crop = list(shape)
    crop[axes[0]], crop[axes[1]] = box.shape
    return tuple(crop)


class Store(ABC):
    """A field of the given shape; `axes` are the (negative) positions of y and x. All boxes lie inside the field.

    What is read holds all that was written or added before, by whatever thread; where that is still on its way, reading
    waits. Several threads may use one store at a time, on boxes that do not overlap.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, axes: tuple[int, int]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.axes = axes

    def crop_shape(self, box: Box) -> tuple[int, ...]:
        """Return the shape of what is read on a box."""
        return crop_shape(self.shape, self.axes, box)

    @abstractmethod
    def read(self, box: Box) -> torch.Tensor:
        """Return a crop, not to be written to: it may share the store's memory. Raises what earlier writing raised."""

    @abstractmethod
    def write(self, box: Box, crop: torch.Tensor) -> None:
        """Replace what the box holds."""

    @abstractmethod
    def add(self, box: Box, crop: torch.Tensor) -> None:
        """Add to what the box holds; a new store holds zeros."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything that was written is in its place. Raises what the writing raised."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the store holds; it is not used again, but may be closed again."""

    def retire(self) -> None:
        """Close it, by whoever knows that no crop that was read is in use any more."""
        self.close()

    def whole(self) -> torch.Tensor:
        """Read the whole field."""
        return self.read(Box.whole(*(self.shape[axis] for axis in self.axes)))
