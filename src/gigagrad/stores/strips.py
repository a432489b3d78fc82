"""Store a field that is added to from the top to the bottom, and given away as it is finished."""

from __future__ import annotations

import torch

from gigagrad.boxes import Box
from gigagrad.stores.store import Store
from gigagrad.stores.tier import FieldSpec


class Strips(Store):
    """The rows in use of a field: from the first that was not taken to the last that was touched. `whole`: all of them
    from the beginning, for whoever adds in any order before anything is taken. For one thread.
    """

    def __init__(self, field: FieldSpec, device: torch.device, *, whole: bool) -> None:
        super().__init__(field.shape, field.dtype, field.axes)
        self._device, self._first = device, 0
        self._rows = self._zeros(field.shape[field.axes[0]] if whole else 0)

    def read(self, box: Box) -> torch.Tensor:
        self._reach(box.y1)
        y, x = self.axes
        return self._rows.narrow(y, box.y0 - self._first, box.height).narrow(x, box.x0, box.width)

    def write(self, box: Box, crop: torch.Tensor) -> None:
        self.read(box).copy_(crop)

    def add(self, box: Box, crop: torch.Tensor) -> None:
        self.read(box).add_(crop.to(self._device))

    def take(self, y1: int) -> tuple[Box, torch.Tensor] | None:
        """Take the rows down to `y1` that were not taken before, not to be touched again; None where there are none."""
        box = Box(self._first, 0, y1, self.shape[self.axes[1]])
        if box.empty:
            return None
        strip, y = self.read(box), self.axes[0]
        self._rows, self._first = self._rows.narrow(y, box.height, self._rows.shape[y] - box.height), y1
        return box, strip

    def flush(self) -> None:
        """Do nothing: nothing waits."""

    def close(self) -> None:
        self._rows = self._zeros(0)

    def _reach(self, y1: int) -> None:
        """Have the rows down to `y1`, in memory of their own: what was taken belongs to whoever has it."""
        missing = y1 - self._first - self._rows.shape[self.axes[0]]
        if missing > 0:
            self._rows = torch.cat([self._rows, self._zeros(missing)], self.axes[0])

    def _zeros(self, rows: int) -> torch.Tensor:
        shape = list(self.shape)
        shape[self.axes[0]] = rows
        return torch.zeros(shape, dtype=self.dtype, device=self._device)
