"""What a GPU holds, by PyTorch's allocator as a test says it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gigagrad as gg
from gigagrad.devices import device_for
from gigagrad.devices.cuda import Cuda
from tests.devices.fake import FakeCpu

MIB = 2**20


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes in tensors, and bytes that the cache holds beside them."""
    pool = {"used": 10 * MIB, "cached": 0, "emptied": 0}

    def empty() -> None:
        pool["cached"] = 0
        pool["emptied"] += 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def stats(device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        amounts = {"allocated_bytes": pool["used"], "reserved_bytes": pool["used"] + pool["cached"]}
        return {name: {"all": {"current": nbytes}} for name, nbytes in amounts.items()}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    return pool


def test_cached_blocks_are_held_but_not_used_until_they_are_given_back(pool: dict[str, int]) -> None:
    device = device_for("cuda")
    pool["cached"] = 500 * MIB
    assert (device.held_bytes(), device.used_bytes()) == (510 * MIB, 10 * MIB)
    device.trim()
    assert device.held_bytes() == 10 * MIB


def test_the_cache_is_emptied_where_it_would_grow_over_the_plan_and_not_before(pool: dict[str, int]) -> None:
    watch = device_for("cuda").memory_guard(100 * MIB, None)
    watch.begin_pass(30 * MIB, 0)
    pool["cached"] = 55 * MIB
    watch.tile_done()
    watch.reserve(40 * MIB)
    assert not pool["emptied"]
    watch.reserve(61 * MIB)
    assert pool["emptied"] == 1  # type: ignore[comparison-overlap]
    pool["cached"] = 61 * MIB
    watch.tile_done()
    assert pool["emptied"] == 2


def test_what_the_first_step_cached_is_not_the_base_of_the_second() -> None:
    """Under a budget: the second step's plan is the first one's."""

    class Caching(FakeCpu):
        def used_bytes(self, enough: int = 0) -> int | None:
            return 400 * MIB

    device = Caching(400 * MIB, left=400 * MIB)
    engine = gg.compile(gg.models.resolve("paper-unet"), memory=900 * MIB, device=device)
    image = np.zeros((3, 1000, 1000), np.uint8)
    before = engine.plan(image)
    device.held = 850 * MIB  # what tiles freed is cached
    assert engine.plan(image) is before
    other = engine.plan(np.zeros((3, 1000, 1016), np.uint8))  # planned anew
    assert other.predicted_peak_bytes <= before.predicted_peak_bytes + 20 * MIB


@pytest.mark.cuda
def test_a_real_one_holds_what_tensors_take() -> None:
    device = Cuda("cuda")
    before = device.used_bytes()
    assert before is not None
    tensor = torch.empty(2**20, device=device.torch_device)
    used = device.used_bytes()
    assert used is not None
    assert used - before >= tensor.nbytes
    assert device.held_bytes() >= used
