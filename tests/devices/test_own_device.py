"""A device from outside the project, through public imports alone: one that counts its memory, and sums in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.devices import Device, Machine, MemoryGuard, register_device
from gigagrad.errors import ConfigError

MIB = 2**20


@register_device
class Counter(Device):
    kind = "counter"
    sum_dtype = torch.float32  # as a device must that has no float64

    def __init__(self, name: str) -> None:
        index = int(name.partition(":")[2] or 0)
        if index > 1:
            raise ConfigError(f"there are two counters, 0 and 1, not {index}")
        super().__init__(name, "cpu")
        self.now = self.most = self.tiles = 0

    def held_bytes(self) -> int:
        return self.now

    def peak_bytes(self) -> int:
        return self.most

    def trim(self) -> None:
        self.now = 0

    def machine(self, say: object = None) -> Machine:
        return Machine(flops_per_second=1e12)

    def memory_guard(self, peak_bytes: int, budget_bytes: int | None) -> MemoryGuard:
        return Guard(self)


class Guard(MemoryGuard):
    def __init__(self, device: Counter) -> None:
        self._device = device

    def begin_pass(self, tile_bytes: int, beside_bytes: int, largest_bytes: int = 0) -> None:
        self._device.now = tile_bytes + beside_bytes
        self._device.most = max(self._device.most, self._device.now)

    def tile_done(self) -> None:
        self._device.tiles += 1


def test_a_device_from_outside_plans_runs_and_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    image, target = torch.rand(3, 200, 220), torch.rand(1, 200, 220)
    F.mse_loss(model(image[None]), target[None]).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    device = Counter("counter:1")
    engine = gg.compile(model, F.mse_loss, memory=20 * MIB, device=device)  # no process is counted
    engine.backward(image, target)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))
    plan = engine.plan(image, target)
    assert 0 < device.most <= plan.predicted_peak_bytes <= 20 * MIB
    assert device.tiles == plan.tile_count


def test_it_is_found_by_its_name() -> None:
    assert gg.compile(nn.Conv2d(1, 1, 3), device="counter:1").plan(torch.rand(1, 9, 9)).device == "counter:1"
    with pytest.raises(ConfigError, match="two counters"):
        gg.compile(nn.Conv2d(1, 1, 3), device="counter:2")
    with pytest.raises(ConfigError, match="'counter'"):
        gg.compile(nn.Conv2d(1, 1, 3), device="abacus")
