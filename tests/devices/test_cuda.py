"""What a GPU holds, by PyTorch's allocator as a test says it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gigagrad as gg
from gigagrad.devices import device_for, machine
from gigagrad.devices.cuda import Cuda, PlannedCuda
from gigagrad.devices.machine import Gpu, write_profile
from tests.devices.fake import FakeCpu

MIB = 2**20


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes in tensors, and bytes that the cache holds beside them."""
    pool = {"used": 10 * MIB, "cached": 0, "emptied": 0, "most": 0}

    def empty() -> None:
        pool["cached"] = 0
        pool["emptied"] += 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def stats(device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        amounts = {"allocated_bytes": pool["used"], "reserved_bytes": pool["used"] + pool["cached"]}
        pool["most"] = max(pool["most"], amounts["reserved_bytes"])
        peaks = {"reserved_bytes": pool["most"]}
        return {name: {"all": {"current": now, "peak": peaks.get(name, 0)}} for name, now in amounts.items()}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    return pool


def test_cached_blocks_are_held_but_not_used_until_they_are_given_back(pool: dict[str, int]) -> None:
    device = device_for("cuda")
    pool["cached"] = 500 * MIB
    assert (device.held_bytes(), device.used_bytes()) == (510 * MIB, 10 * MIB)
    device.trim()
    assert (device.held_bytes(), device.peak_bytes()) == (10 * MIB, 510 * MIB)


def test_the_allocator_is_held_to_the_plan_while_a_run_lasts(
    pool: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = [1.0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=400 * MIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: shares[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    watch = device_for("cuda").memory_guard(100 * MIB, None)
    assert shares == [1.0, 0.25]
    watch.begin_pass(30 * MIB, 0)
    watch.close()
    watch.close()
    assert shares == [1.0, 0.25, 1.0]


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


@pytest.mark.usefixtures("pool")
def test_its_rates_are_the_saved_ones_of_the_card_or_typical_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    monkeypatch.setattr(machine, "profile_path", lambda card: tmp_path / f"{card}.json")
    device, said = device_for("cuda"), list[str]()
    assert device.machine(said.append) == Gpu.typical("NVIDIA L4")
    measured = Gpu.typical("NVIDIA L4").with_rates(Gpu.typical("NVIDIA A10").rates)
    write_profile(tmp_path / "NVIDIA L4.json", measured)
    assert device.machine(said.append) == measured
    assert said == []
    (tmp_path / "NVIDIA L4.json").write_text("{")
    assert device.machine(said.append) == Gpu.typical("NVIDIA L4")
    assert "gigagrad calibrate --device cuda" in said[0]


def test_a_planned_one_has_the_rates_it_is_given() -> None:
    assert PlannedCuda(Gpu.typical("T4")).machine() == Gpu.typical("T4")
    assert PlannedCuda().machine() == Gpu.typical("")


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
