"""A processor that records steps as a GPU does: nothing is computed then, and every replay writes the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from gigagrad.devices.cpu import Cpu


class RecordingCpu(Cpu):
    """`recorded` and `replayed` count recordings; those after the first `most` fail."""

    records = True
    is_host = False

    def __init__(self, most: int = 10_000) -> None:
        super().__init__("cpu")
        self.recorded = self.replayed = 0
        self.most = most
        self.is_recording = False
        """What other threads ask for meanwhile is not recorded."""

    def record(self, work: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor]) -> FakeRecording:
        if self.recorded >= self.most:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1
        self.is_recording = True
        try:
            return FakeRecording(self, work, inputs)
        finally:
            self.is_recording = False


class FakeRecording:
    """Runs the work again at each replay."""

    held_bytes = used_bytes = 0

    def __init__(
        self, device: RecordingCpu, work: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor]
    ) -> None:
        self._device, self._work = device, work
        self.inputs = [torch.zeros_like(one, device="cpu") for one in inputs]
        self.result = tree_map_only(torch.Tensor, _like, work(self.inputs))
        for one in self.inputs:
            _spoilt(one)

    def replay(self) -> None:
        self._device.replayed += 1
        for to, value in zip(_tensors(self.result), _tensors(self._work(self.inputs)), strict=True):
            to.copy_(value)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _like(value: torch.Tensor) -> torch.Tensor:
    return _spoilt(value.detach().clone())


def _spoilt(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
