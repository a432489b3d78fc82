"""Define what ranks are to each other: processes, or threads, that compute the chunks of one image together.

They do the same things in the same order, and meet in `exchange`: bytes travel, and whoever gets them adds. Every
collective begins with a few bytes from each, none where all is well, so that an error of one of them ends all.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from math import prod
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from gigagrad.errors import GigagradError, RankError
from gigagrad.threads import operator_threads

if TYPE_CHECKING:
    import torch

Message: TypeAlias = "torch.Tensor"
"""Bytes: a 1-d tensor of uint8 on the CPU."""
_OBJECT, _ERROR, _MENDABLE = b"\0", b"\1", b"\2"
"""The first byte of what is gathered: the rest is an object, or the text of an error, gigagrad's own or not."""

Item = TypeVar("Item")
Result = TypeVar("Result")


# Messages


def as_bytes(tensor: torch.Tensor) -> Message:
    """Return a tensor's bytes on the CPU; its own memory where it lies there without gaps."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def packed(tensors: Iterable[torch.Tensor]) -> Message:
    """Concatenate the bytes of tensors on the CPU."""
    import torch

    flat = [as_bytes(tensor) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def unpacked(message: Message, shapes: Iterable[tuple[Sequence[int], torch.dtype]]) -> Iterator[torch.Tensor]:
    """Yield the tensors, of these shapes, that a message was packed of; copies only where their places do not suit
    their numbers.
    """
    end = 0
    for shape, dtype in shapes:
        place, end = end, end + prod(shape) * dtype.itemsize
        flat = message[place:end] if place % dtype.itemsize == 0 else message[place:end].clone()
        yield flat.view(dtype).reshape(tuple(shape))


def copy_into(tensors: Iterable[torch.Tensor], message: Message) -> None:
    """Copy into `tensors` what was packed of tensors like these."""
    tensors = [*tensors]
    for tensor, value in zip(tensors, unpacked(message, ((one.shape, one.dtype) for one in tensors)), strict=True):
        tensor.detach().copy_(value)


# Ranks


def is_mendable(error: Exception) -> bool:
    """Return whether an error is no fault of gigagrad's own."""
    return isinstance(error, (GigagradError, OSError, MemoryError))


def named(ranks: Sequence[int]) -> str:
    """Write `rank 1`, or `ranks 0, 3`."""
    return f"rank{'s'[: len(ranks) - 1]} {', '.join(map(str, ranks))}"


class Ranks(ABC):
    """All ranks as one of them sees them. Every method is called by all of them, in the same order."""

    index: int
    """The number of this rank, from 0 on."""
    count: int
    sent_bytes: int = 0
    """Bytes that this rank has sent so far, without what collectives begin with."""

    @property
    def others(self) -> list[int]:
        """Return all ranks but this one."""
        return [rank for rank in range(self.count) if rank != self.index]

    @abstractmethod
    def _exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        """Give these messages to other ranks and get theirs, of so many bytes. Raises RankError."""

    @abstractmethod
    def _gather(self, payload: bytes) -> Sequence[bytes]:
        """Gather short bytes from every rank. Raises RankError where one is silent."""

    def exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        """Send messages to other ranks, and return what they send to this one, by rank; empty ones don't travel.

        Raises RankError if another one failed, or is silent.
        """
        self.barrier()
        sent = {rank: message for rank, message in sent.items() if len(message)}
        self.sent_bytes += sum(map(len, sent.values()))
        return self._exchange(sent, {rank: nbytes for rank, nbytes in received.items() if nbytes})

    def all_to_all(self, sent: Mapping[int, Message]) -> dict[int, Message]:
        """Exchange messages where receivers do not know what comes."""
        lengths = self.all_gather_object([len(sent.get(rank, ())) for rank in range(self.count)])
        return self.exchange(
            sent, {rank: theirs[self.index] for rank, theirs in enumerate(lengths) if theirs[self.index]}
        )

    def barrier(self) -> None:
        """Wait for all. Raises RankError if another one failed, or is silent."""
        self._raise_reported(self._gather(b""))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather an object of JSON from each rank, by rank. Raises RankError if one failed, or is silent."""
        payloads = self._gather(_OBJECT + json.dumps(value).encode())
        self._raise_reported([b"" if payload.startswith(_OBJECT) else payload for payload in payloads])
        return [json.loads(payload[1:]) for payload in payloads]

    def map(
        self, items: Sequence[Item], work: Callable[[Item], Any], done: Callable[[int, Any], None] = lambda *_: None
    ) -> list[Any]:
        """Map `work` over items, shared among ranks, and return its results in their order: anything that JSON can
        hold. Item i is that of rank i modulo their count; `done` is told how many are done, and the last of these
        answers. Raises as `all_gather_object`.
        """
        results: list[Any] = []
        for start in range(0, len(items), self.count):
            mine = start + self.index
            answers = self.all_gather_object(work(items[mine]) if mine < len(items) else None)
            for answer in answers[: len(items) - start]:
                results.append(answer)
                done(len(results), answer)
        return results

    def job_error_scope(self) -> AbstractContextManager[None]:
        """Report an error of a whole program to all ranks, wherever they wait for whom."""
        return self.error_scope()

    @contextmanager
    def error_scope(self) -> Iterator[None]:
        """Report an error in the block to the other ranks at their next collective, which is at the end at the latest:
        it is done by all or by none.
        """
        try:
            yield
            self.barrier()
        except RankError:
            raise
        except Exception as error:
            self._report(error)
            raise

    def _report(self, error: Exception) -> None:
        kind, text = _MENDABLE if is_mendable(error) else _ERROR, str(error) or type(error).__name__
        try:
            self._gather(kind + text.encode(errors="replace"))
        except RankError:
            return  # somebody else failed, too: one's own error is raised

    def _raise_reported(self, payloads: Sequence[bytes]) -> None:
        for rank, payload in enumerate(payloads):
            if payload and rank != self.index:
                text, mendable = payload[1:].decode(errors="replace"), payload.startswith(_MENDABLE)
                raise RankError(f"rank {rank} failed: {text}", reported=True, mendable=mendable)


class SingleRank(Ranks):
    """A single process, and nobody to talk to."""

    index, count = 0, 1

    def _exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        assert not sent
        assert not received
        return {}

    def _gather(self, payload: bytes) -> Sequence[bytes]:
        return [payload]


class ThreadedRank(Ranks):
    """A rank among several in threads of this process. Made by `run_threaded`."""

    def __init__(self, index: int, inboxes: Sequence[Sequence[SimpleQueue[object]]], timeout: float) -> None:
        self.index, self.count = index, len(inboxes)
        self._inboxes, self._timeout = inboxes, timeout

    def _exchange(self, sent: Mapping[int, Message], received: Mapping[int, int]) -> dict[int, Message]:
        for rank, message in sent.items():
            self._inboxes[rank][self.index].put(message.clone())
        messages = {}
        for rank, nbytes in received.items():
            came = cast(Message, self._from(rank))
            assert len(came) == nbytes, f"{len(came)} bytes came from rank {rank}, {nbytes} were expected"
            messages[rank] = came
        return messages

    def _gather(self, payload: bytes) -> Sequence[bytes]:
        for rank in range(self.count):
            self._inboxes[rank][self.index].put(payload)
        payloads = []
        for rank in range(self.count):
            theirs = self._from(rank)
            assert isinstance(theirs, bytes), "a rank sends a message where others meet"
            payloads.append(theirs)
        return payloads

    def _from(self, rank: int) -> object:
        try:
            item = self._inboxes[self.index][rank].get(timeout=self._timeout)
        except Empty:
            raise RankError(f"rank {rank} has been silent for {self._timeout:g} s") from None
        if isinstance(item, BaseException):
            raise RankError(f"rank {rank} failed: {item}", reported=True)
        return item


def run_threaded(count: int, work: Callable[[Ranks], Result], timeout: float = 600.0) -> list[Result]:
    """Call `work(ranks)` on so many ranks, each in a thread of its own, and return their results by rank.

    Raises the error of the first rank that failed by itself.
    """
    inboxes: list[list[SimpleQueue[object]]] = [[SimpleQueue() for _ in range(count)] for _ in range(count)]

    def run(rank: int) -> Result:
        try:
            return work(ThreadedRank(rank, inboxes, timeout))
        except BaseException as error:
            for inbox in inboxes:
                inbox[rank].put(error)
            raise

    with ThreadPoolExecutor(count, "gigagrad-rank") as pool:
        runs = [pool.submit(run, rank) for rank in range(count)]
    if errors := [error for one in runs if (error := one.exception()) is not None]:
        raise min(errors, key=lambda error: isinstance(error, RankError))
    return [one.result() for one in runs]


# Processors round alike where kernels choose the same instructions.


def mismatched_numerics(ranks: Ranks) -> list[int]:
    """Return the ranks whose processors round a probe otherwise than the first one's. Raises RankError."""
    if ranks.count == 1:
        return []
    import torch

    first, *others = ranks.all_gather_object([torch.backends.cpu.get_cpu_capability(), _probe()])
    return [rank for rank, probe in enumerate(others, 1) if probe != first]


def _probe() -> str:
    """Digest a convolution, sums and an exponential, forward and backward, of numbers that are the same everywhere."""
    import torch
    import torch.nn.functional as F

    count = torch.arange(2 * 8 * 33 * 35, dtype=torch.float32)
    image = (count * 0.618034 % 1).reshape(2, 8, 33, 35).requires_grad_()
    weight = (count[: 16 * 8 * 9] * 0.414214 % 1 - 0.5).reshape(16, 8, 3, 3).requires_grad_()
    with operator_threads(1):
        torch.autograd.backward(F.conv2d(image, weight, padding=1).sigmoid().square().mean())
    assert image.grad is not None
    assert weight.grad is not None
    digest = hashlib.sha256(image.grad.numpy().tobytes())
    digest.update(weight.grad.numpy().tobytes())
    return digest.hexdigest()
