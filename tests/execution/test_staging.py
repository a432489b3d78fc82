"""Copies between the host and a device, on one that finds what would be wrong numbers on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import StoreError
from gigagrad.execution.staging import StagedStore, Staging
from gigagrad.stores import DiskStore, FieldSpec, HostStore, Scratch, Store
from gigagrad.threads import SideThreads
from tests.devices.apart import NAME, STREAMS, ApartTensor
from tests.devices.streams import COMPUTE, Hazard, SimulatedEvent, SimulatedStreams
from tests.exactness.normed import Net, dice
from tests.exactness.steering import with_fields_in, with_layout
from tests.stores.test_stores import StoreConformance, slow_writing  # noqa: F401


@pytest.fixture(autouse=True)
def nothing_asked_for() -> Iterator[None]:
    STREAMS.forget()
    yield
    STREAMS.pins = True
    STREAMS.forget()


@pytest.fixture
def staging() -> Iterator[Staging]:
    staging = Staging(STREAMS, torch.device(NAME), 1)
    yield staging
    staging.close()


def step(tier: str, scratch: Path | None = None) -> list[torch.Tensor]:
    """Loss and gradients of a step whose image is on the host, in bytes, and whose fields are in a tier."""
    torch.manual_seed(0)
    net = Net()
    image, target = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8), torch.rand(1, 64, 96)
    engine = gg.compile(FromBytes(net), dice, device=NAME, tile=(16, 24), scratch=scratch)
    with_layout(engine, image, target, "channels_last")
    with_fields_in(engine, image, target, tier)
    assert tier == "memory" or engine.plan(image, target).bytes_in(tier) > 0
    STREAMS.forget()
    loss = engine.backward(image, target)
    return [loss.cpu(), *(p.grad for p in net.parameters() if p.grad is not None)]


def blocks_of(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The pinned memory that is taken from now on."""
    blocks, of = list[torch.Tensor](), SimulatedStreams.pinned_like

    def noted(self: SimulatedStreams, tensor: torch.Tensor) -> torch.Tensor:
        blocks.append(of(self, tensor))
        return blocks[-1]

    monkeypatch.setattr(SimulatedStreams, "pinned_like", noted)
    return blocks


class FromBytes(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(image.float() / 255)
        return found


@pytest.mark.parametrize("tier", ["memory", "host", "disk"])
def test_no_thread_that_runs_a_tile_loop_waits_for_a_copy(tier: str, tmp_path: Path) -> None:
    found = step(tier, tmp_path if tier == "disk" else None)
    assert STREAMS.waited == []
    assert STREAMS.uploads > 0
    assert (STREAMS.downloads > 0) is (tier != "memory")
    STREAMS.pins = False
    pageable = step(tier, tmp_path if tier == "disk" else None)
    assert STREAMS.uploads == STREAMS.downloads == 0
    assert all(torch.equal(a, b) for a, b in zip(found, pageable, strict=True))
    assert bool(STREAMS.waited) is (tier != "memory"), "tiles write to fields in the loop; readers are other threads"


def test_images_of_bytes_travel_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(monkeypatch)
    step("memory")
    assert {(block.dtype, block.shape[1]) for block in blocks} == {(torch.uint8, 3), (torch.float32, 1)}


def test_bits_do_not_depend_on_where_fields_are() -> None:
    on_device, on_host, again = step("memory"), step("host"), step("host")
    assert all(torch.equal(a, b) for a, b in zip(on_host, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(on_host, on_device, strict=True))


@pytest.mark.parametrize("forgotten", ["wait", "use"])
@pytest.mark.parametrize("tier", ["memory", "host"])
def test_a_forgotten_wait_is_found(forgotten: str, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedStreams, forgotten, lambda *_: None)
    with pytest.raises(Hazard):
        step(tier)


def test_pinned_memory_that_changes_under_a_copy_is_found(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(monkeypatch)
    staging.upload(torch.ones(4, 5))
    blocks[0].zero_()
    with pytest.raises(Hazard, match="while a copy read it"):
        STREAMS.record().synchronize()


def test_what_has_not_arrived_is_not_read(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedEvent, "synchronize", lambda _: None)
    found = list[torch.Tensor]()
    staging.download(torch.ones(4, 5).to(NAME), found.append, None).result()
    assert found[0].isnan().all()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_crops_with_gaps_arrive_in_their_order_of_axes(staging: Staging, layout: torch.memory_format) -> None:
    whole = torch.rand(1, 3, 9, 8).contiguous(memory_format=layout)
    crop = whole[..., 2:7, 1:5]
    there = staging.upload(crop)
    assert torch.equal(there.cpu(), crop)
    assert there.is_contiguous(memory_format=layout)
    back = list[torch.Tensor]()
    staging.download(whole.to(NAME)[..., 2:7, 1:5], back.append, None).result()
    assert torch.equal(back[0], crop)
    assert back[0].is_contiguous(memory_format=layout)


def test_a_crop_may_be_overwritten_once_it_is_handed_over(staging: Staging) -> None:
    """Results of all tiles may lie in the same memory."""
    found, held, crop = list[torch.Tensor](), threading.Lock(), torch.ones(4, 5).to(NAME)

    def wait(_: torch.Tensor) -> None:
        with held:
            pass

    with held:
        staging.download(torch.zeros(1), wait, None)
        task = staging.download(crop, found.append, None)
        crop.zero_()
    task.result()
    assert found[0].eq(1).all()


def test_what_the_writing_thread_raises_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it goes on to write what comes behind."""
    write, numbers = HostStore.write, count()

    def failing(self: HostStore, box: Box, crop: torch.Tensor) -> None:
        if next(numbers) == 3:
            raise StoreError("no more")
        write(self, box, crop)

    monkeypatch.setattr(HostStore, "write", failing)
    with pytest.raises(StoreError, match="no more"):
        step("host")


class Recording(HostStore):
    """Notes the first pixel of what is added, once it may."""

    def __init__(self, fails: float | None = None) -> None:
        """`fails`: the pixel that it cannot add."""
        super().__init__((1, 1, 8, 8), torch.float32, (-2, -1), device=torch.device("cpu"))
        self.added, self.may, self.fails = list[float](), threading.Lock(), fails

    def add(self, box: Box, crop: torch.Tensor) -> None:
        with self.may:
            self.added.append(crop.flatten()[0].item())
            if self.added[-1] == self.fails:
                raise StoreError("no more")
            super().add(box, crop)


def test_crops_are_added_in_their_order_and_few_wait(staging: Staging) -> None:
    inner = Recording()
    store = StagedStore(inner, staging)
    given = list[int]()

    def add_all() -> None:
        for number in range(7):
            store.add(Box.whole(8, 8), torch.full((1, 1, 8, 8), float(number)).to(NAME))
            given.append(number)

    with inner.may:
        adding = threading.Thread(target=add_all)
        adding.start()
        adding.join(0.3)
        assert given == [0, 1, 2], "a plan counts one that is written and two that wait"
    adding.join()
    assert store.read(Box.whole(8, 8)).cpu().eq(21).all()
    assert inner.added == [0, 1, 2, 3, 4, 5, 6]


def test_where_one_crop_fails_nothing_is_read_any_more(staging: Staging) -> None:
    inner = Recording(fails=1)
    store = StagedStore(inner, staging)
    with inner.may:
        for number in range(3):
            store.add(Box.whole(8, 8), torch.full((1, 1, 8, 8), float(number)).to(NAME))
    for look in (store.flush, store.whole):
        with pytest.raises(StoreError, match="no more"):
            look()
    assert inner.added == [0, 1]
    store.close()


def test_no_more_is_read_than_a_plan_counts(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the host is ahead of the device, a tile is read when all but the last few are computed."""
    waited, done, of = list[int](), list[int](), SimulatedEvent.synchronize

    def noted(event: SimulatedEvent) -> None:
        waited.append(event.clock[COMPUTE])
        of(event)

    monkeypatch.setattr(SimulatedEvent, "synchronize", noted)
    with SideThreads(2, "test") as pool:
        read = staging.read_ahead(range(12), lambda _: staging.upload(torch.ones(2, 2)), pool, lambda crop: [crop])
        for tile, crop in read:
            assert crop.add(tile).cpu().eq(1 + tile).all()
            event = STREAMS.record()
            done.append(event.clock[COMPUTE])
    assert sorted(set(waited) & set(done)) == done[: 12 - 2 - 1 - 1]  # two read, one waits, one is computed


def test_what_is_left_early_is_waited_for(staging: Staging) -> None:
    """Reading a field may write zeros to it."""
    field, all_read = torch.ones(4, 4).to(NAME), threading.Event()

    def read_zeros(tile: int) -> torch.Tensor:
        zeros = field.zero_()
        if tile == 2:
            all_read.set()
        return zeros

    with SideThreads(1, "test") as pool:
        read = staging.read_ahead(range(5), read_zeros, pool, lambda crop: [crop])
        next(read)
        assert all_read.wait(60)
        read.close()  # type: ignore[attr-defined]
    assert field.cpu().eq(0).all()


class ForTheHost(StagedStore):
    """Gives and takes tensors of the host, by way of the device."""

    def read(self, box: Box) -> torch.Tensor:
        found = super().read(box)
        assert isinstance(found, ApartTensor)
        return found.cpu()

    def whole(self) -> torch.Tensor:
        return super().whole().cpu()

    def write(self, box: Box, crop: torch.Tensor) -> None:
        super().write(box, crop.to(NAME))

    def add(self, box: Box, crop: torch.Tensor) -> None:
        super().add(box, crop.to(NAME))


class TestStagedHostStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def staged(self, staging: Staging) -> None:
        self.staging = staging

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, axes: tuple[int, int]) -> Store:
        return ForTheHost(HostStore(shape, dtype, axes, device=torch.device("cpu")), self.staging)


class TestStagedDiskStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def staged(self, staging: Staging, tmp_path: Path) -> Iterator[None]:
        self.staging, self.scratch = staging, Scratch(tmp_path, 0)
        yield
        self.scratch.close()

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, axes: tuple[int, int]) -> Store:
        return ForTheHost(DiskStore(FieldSpec("field", shape, dtype, axes), self.scratch), self.staging)
