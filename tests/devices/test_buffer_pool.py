"""Memory of fields that are gone."""

import gc
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gigagrad as gg
from gigagrad.allowances import MAPPED_BYTES, UNNOTICED_BYTES
from gigagrad.devices import device_for
from gigagrad.devices.buffer_pool import BufferPool
from gigagrad.devices.cpu import HeapGuard
from gigagrad.execution.run import Run
from gigagrad.threads import living
from tests.devices.fake import FakeCpu

SIZE = MAPPED_BYTES


@pytest.fixture(autouse=True)
def nothing_spare():
    gc.collect()
    BufferPool.give_back()
    yield
    BufferPool.give_back()


def test_a_block_serves_again_for_its_size():
    spare = BufferPool()
    block = spare.take(SIZE)
    address = block.data_ptr()
    spare.give(block)
    assert BufferPool.held_bytes() == SIZE
    assert spare.take(2 * SIZE).nbytes == 2 * SIZE
    assert spare.take(SIZE).data_ptr() == address
    assert BufferPool.held_bytes() == 0


def test_small_blocks_are_left_to_the_c_library():
    spare = BufferPool()
    spare.give(spare.take(SIZE - 1))
    assert BufferPool.held_bytes() == 0


@given(st.lists(st.sampled_from([SIZE, SIZE + 1, SIZE + 2]), max_size=5), st.lists(st.integers(0, 3), max_size=8))
def test_what_is_taken_from_the_system(held, wanted):
    BufferPool.give_back()
    spare, sizes = BufferPool(), [SIZE + more for more in wanted]
    for nbytes in held:
        spare.give(torch.empty(nbytes, dtype=torch.uint8))
    before = BufferPool.held_bytes()
    assert before == sum(held)
    told = spare.fresh_bytes(sizes)
    taken = [spare.take(nbytes) for nbytes in sizes]
    assert told == sum(block.nbytes for block in taken) - (before - BufferPool.held_bytes())


@pytest.mark.parametrize("enough", [1, 2 * SIZE, 2 * SIZE + 1, None])
def test_no_more_is_given_back_than_asked(enough):
    spares = BufferPool(), BufferPool()
    for spare, size, count in zip(spares, (2 * SIZE, SIZE), (1, 3), strict=True):
        for block in [torch.empty(size, dtype=torch.uint8) for _ in range(count)]:
            spare.give(block)
    given_back = BufferPool.give_back(enough)
    assert given_back + BufferPool.held_bytes() == 5 * SIZE
    if enough is None:
        assert given_back == 5 * SIZE
    else:
        assert enough <= given_back < enough + 2 * SIZE


def test_no_more_is_held_than_was_allowed():
    """With what is taken: other blocks go before a new one comes, and those that fit serve again."""
    spare = BufferPool()
    spare.most_bytes = 4 * SIZE
    blocks = [spare.take(SIZE), spare.take(SIZE), spare.take(2 * SIZE)]
    while blocks:
        spare.give(blocks.pop())
    assert spare.own_bytes == 4 * SIZE
    small = spare.take(SIZE)
    assert spare.own_bytes == 3 * SIZE
    large = spare.take(3 * SIZE)
    assert spare.own_bytes == 0
    del large
    spare.give(small)
    other = spare.take(3 * SIZE)
    assert spare.own_bytes == SIZE
    spare.most_bytes = 0
    assert spare.take(SIZE) is small
    assert spare.take(SIZE).nbytes == SIZE, "a plan knows that it fits"
    del other


def test_what_is_spare_is_not_used_and_goes_with_what_was_freed():
    device, spare = device_for("cpu"), BufferPool()

    def used(enough: int = 0) -> int:
        found = device.used_bytes(enough)
        if found is None:
            pytest.skip("the C library is not glibc")
        return found

    before = used()
    block = torch.ones(16 * MAPPED_BYTES, dtype=torch.uint8)
    assert used() - before > 12 * MAPPED_BYTES
    spare.give(block)
    del block
    assert abs(used() - before) < 4 * MAPPED_BYTES
    assert abs(used(before + 4 * MAPPED_BYTES) - before) < 4 * MAPPED_BYTES
    device.trim()
    assert BufferPool.held_bytes() == 0


def test_spare_blocks_go_before_the_heap_is_trimmed():
    device, spare = FakeCpu(1000 * MAPPED_BYTES), BufferPool()
    watch = HeapGuard(device, 900 * MAPPED_BYTES + UNNOTICED_BYTES, None)
    watch.begin_pass(0, 0)

    class Block:
        """Of a hundred large blocks, as the fake process holds them."""

        nbytes = 60 * MAPPED_BYTES

        def __del__(self) -> None:
            device.held -= self.nbytes

    for _ in range(3):
        spare.give(Block())  # type: ignore[arg-type]
    watch.reserve(0)
    assert (device.held, device.trimmed) == (880 * MAPPED_BYTES, 0)
    watch.tile_done()
    assert (device.held, device.trimmed) == (880 * MAPPED_BYTES, 0)
    watch.reserve(50 * MAPPED_BYTES)
    assert (device.held, device.trimmed) == (820 * MAPPED_BYTES, 0)
    watch.reserve(100 * MAPPED_BYTES)  # nothing is spare any more
    assert device.trimmed == 1


def test_the_fields_of_a_step_lie_where_those_of_the_last_one_did():
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(8)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3, padding=1), norm, torch.nn.ReLU(), torch.nn.Conv2d(8, 1, 1))
    engine = gg.compile(model.train(), torch.nn.functional.mse_loss, memory="4GiB", tile=(300, 300), device=FakeCpu())
    image, target = torch.rand(1, 600, 600), torch.rand(1, 600, 600)
    found = []
    for _ in range(3):
        model.zero_grad()
        norm.reset_running_stats()
        engine.backward(image, target)
        found.append([p.grad.clone() for p in model.parameters()])
        held = BufferPool.held_bytes()
        assert held >= 600 * 600 * 8 * 4
        for blocks in living(BufferPool._all):
            for block in (block for of_a_size in blocks._blocks.values() for block in of_a_size):
                block.view(torch.float32).fill_(torch.nan)
    assert BufferPool.held_bytes() == held  # no more from step to step
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    del engine, blocks
    gc.collect()
    assert BufferPool.held_bytes() == 0


def engine_that_keeps():
    """An engine with two kept fields, of which one is 11 MiB, and its inputs."""
    first, norm = torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
    model = torch.nn.Sequential(first, norm, torch.nn.ReLU(), torch.nn.Conv2d(8, 1, 3, padding=1)).train()
    engine = gg.compile(model, torch.nn.functional.mse_loss, tile=(300, 300))
    pair = torch.rand(1, 600, 600), torch.rand(1, 600, 600)
    assert any(field.size_bytes >= MAPPED_BYTES for field in engine.plan(*pair).kept)
    return engine, pair


def test_nothing_stays_of_a_step_that_fails(monkeypatch):
    engine, pair = engine_that_keeps()
    engine.backward(*pair)
    assert BufferPool.held_bytes()
    monkeypatch.setattr(Run, "_backward_rest", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.backward(*pair)
    assert BufferPool.held_bytes() == 0


def test_a_stream_leaves_no_memory_that_its_pieces_may_lie_in():
    engine, (image, _) = engine_that_keeps()
    forward = gg.compile(engine.model, tile=(300, 300))
    assert any(field.size_bytes >= MAPPED_BYTES for field in forward.plan(image).kept)
    assert list(forward.stream(image))
    assert BufferPool.held_bytes() == 0
