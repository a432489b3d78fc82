"""Define what copies beside the computation take of a device: pinned memory, streams and events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait, in the calling thread, until the stream has come there."""


class Streams(ABC):
    """The two streams of a device on which crops are copied, one in each direction, and the memory they are copied
    through. The *current* stream is the one on which the calling thread asks for operators.
    """

    @abstractmethod
    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned host memory of a tensor's shape, in its order of axes and without gaps, with anything in it.
        Raises RuntimeError where there is none.

        It may be dropped while a copy uses it: it is not handed out again before the copy is over.
        """

    @abstractmethod
    def uploading(self) -> AbstractContextManager[object]:
        """Make the stream of uploads the current one in the block."""

    @abstractmethod
    def downloading(self) -> AbstractContextManager[object]:
        """Make the stream of downloads the current one in the block."""

    @abstractmethod
    def record(self) -> Event:
        """Return the event that the current stream has done all it was asked for until now."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let the current stream wait for an event. The calling thread goes on."""

    @abstractmethod
    def use(self, tensor: torch.Tensor) -> None:
        """Note that the current stream uses a tensor which was made on another: its memory is not handed out again
        before the current stream is done.
        """


class CudaStreams(Streams):
    """Streams of one GPU, through CUDA. Pinned memory comes from PyTorch's caching allocator for it, and stays with the
    process.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._up: torch.cuda.Stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        self._down: torch.cuda.Stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, device: torch.device) -> CudaStreams:
        """Return the streams of a GPU, always the same: PyTorch keeps freed memory for the stream it was taken on."""
        return _streams_of(torch.cuda.current_device() if device.index is None else device.index)

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def uploading(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._up)

    def downloading(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._down)

    def record(self) -> Event:
        # A thread that waits sleeps: others read and decode on its core.
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._index))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._index).wait_event(event)

    def use(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._index))


@lru_cache
def _streams_of(index: int) -> CudaStreams:
    return CudaStreams(index)
