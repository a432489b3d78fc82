"""Streams, events and pinned memory, simulated: what a GPU would get wrong without a word raises here.

Every operator counts on the stream of the thread that asks for it, and every block of memory remembers who wrote it
last. A stream knows how far it has waited for the others (a vector clock), so that a use of what it has not waited for
is found whatever the timing. Copies to pinned memory happen as late as they may, when somebody waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from gigagrad.devices.streams import Event, Streams

Clock = dict[str, int]
"""How many operators of each stream are done."""
COMPUTE, UP, DOWN = "compute", "up", "down"


class Hazard(Exception):
    """Something that a GPU would do without an error, with wrong numbers now and then."""


class SimulatedEvent(Event):
    def __init__(self, streams: SimulatedStreams, clock: Clock) -> None:
        self.streams, self.clock = streams, clock

    def synchronize(self) -> None:
        self.streams.reach(self.clock)


class SimulatedStreams(Streams):
    """The streams of the one simulated device."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._here = threading.local()
        self.pins = True
        """False: the host locks no memory."""
        self.forget()

    def forget(self) -> None:
        """Begin anew: nothing was asked for."""
        self._known: dict[str, Clock] = {name: {name: 0} for name in (COMPUTE, UP, DOWN)}
        self._host: Clock = {}
        self._pinned: dict[int, torch.Tensor] = {}
        """Pinned memory by address: it is never handed out again."""
        self._written: dict[int, tuple[str, int]] = {}
        """The last write of every block, by address."""
        self._made: dict[int, set[str]] = {}
        """Streams that may use a block: the one that it was made on, and those that said so."""
        self._late: list[tuple[str, int, Callable[[], None]]] = []
        """Copies that have not happened yet, by the stream and when."""
        self.uploads = self.downloads = 0
        """Bytes that went through pinned memory."""
        self.waited: list[str] = []
        """What the threads that run a tile loop have waited for there."""

    # As `Streams`

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.pins:
            raise RuntimeError("no memory can be locked")
        pinned = torch.empty_like(tensor, device="cpu")
        with self._lock:
            self._pinned[pinned.untyped_storage().data_ptr()] = pinned
        return pinned

    def uploading(self) -> AbstractContextManager[None]:
        return self._on(UP)

    def downloading(self) -> AbstractContextManager[None]:
        return self._on(DOWN)

    @contextmanager
    def _on(self, name: str) -> Iterator[None]:
        before, self._here.stream = self.current, name
        try:
            yield
        finally:
            self._here.stream = before

    def record(self) -> SimulatedEvent:
        with self._lock:
            return SimulatedEvent(self, dict(self._known[self.current]))

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        with self._lock:
            _advance(self._known[self.current], event.clock)

    def use(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._made.setdefault(_address(tensor), set()).add(self.current)

    # For the device

    @property
    def current(self) -> str:
        name: str = getattr(self._here, "stream", COMPUTE)
        return name

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """Note what this thread waits for in the block."""
        self._here.loops = True
        try:
            yield
        finally:
            self._here.loops = False

    def waits(self, what: str) -> None:
        """Let this thread wait for all that the current stream was asked for."""
        if getattr(self._here, "loops", False):
            self.waited.append(what)
        with self._lock:
            clock = dict(self._known[self.current])
        self.reach(clock)

    def reach(self, clock: Clock) -> None:
        """Let everything happen down to there. Raises Hazard where pinned memory has changed under a copy."""
        with self._lock:
            due = [late for late in self._late if late[1] <= clock.get(late[0], 0)]
            self._late = [late for late in self._late if late not in due]
            for _, _, happen in due:
                happen()
            _advance(self._host, clock)

    def ran(self, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        """Note an operator on blocks of the device. Raises Hazard for what the current stream has not waited for."""
        with self._lock:
            here, known = self.current, self._known[self.current]
            written = list(written)
            for tensor in (*read, *written):
                stream, count = self._written.get(_address(tensor), (here, 0))
                if stream != here and max(known.get(stream, 0), self._host.get(stream, 0)) < count:
                    raise Hazard(f"stream {here!r} uses what {stream!r} makes, and has not waited for it")
                of = self._made.get(_address(tensor), {here})
                if here not in of and (here == DOWN or UP in of):
                    raise Hazard(f"stream {here!r} uses memory of {sorted(of)}, and nobody was told")
            known[here] += 1
            for tensor in made:
                self._made[_address(tensor)] = {here}
            for tensor in (*written, *made):
                self._written[_address(tensor)] = here, known[here]

    def copies(self, source: torch.Tensor, target: torch.Tensor, *, up: bool, non_blocking: bool) -> bool:
        """Note a copy between the host and the device, counted before as an operator. Returns True where it happens
        later. `source` and `target` have the numbers.
        """
        host = source if up else target
        if not non_blocking or host.untyped_storage().data_ptr() not in self._pinned:
            self.waits(f"a pageable copy of {tuple(host.shape)}" if not non_blocking or host.ndim else "a number")
            return False
        with self._lock:
            here, count = self.current, self._known[self.current][self.current]
            if up:
                self.uploads += host.nbytes
                before = _bytes(host).clone()

                def happen() -> None:
                    if not torch.equal(before, _bytes(host)):
                        raise Hazard("pinned memory was changed while a copy read it")

            else:
                self.downloads += host.nbytes
                host.fill_(float("nan") if host.is_floating_point() else 1)  # nobody should see this

                def happen() -> None:
                    target.copy_(source)

            self._late.append((here, count, happen))
        return not up


def _address(tensor: torch.Tensor) -> int:
    return getattr(tensor, "numbers", tensor).untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _advance(clock: Clock, other: Clock) -> None:
    for name, count in other.items():
        clock[name] = max(clock.get(name, 0), count)
