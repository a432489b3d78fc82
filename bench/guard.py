"""What it costs to look, before every call, whether anything changed: a ResNet-50 classifier, and small images.

    python bench/guard.py [--rounds 20]

Seconds of the look itself, of the walk that a capture makes, of a capture, and of a whole step at 64 x 64 px with an
unchanged model and with one whose counter goes up in every forward (captured again each time). The fastest of the
rounds counts. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.graphs import Composite, InputSpec, trace
from gigagrad.graphs.guard import Guard
from gigagrad.models import torchvision_operators  # noqa: F401


class Counting(nn.Module):
    """A network that counts its calls."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.calls = network, 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.network(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    import timm

    model = timm.create_model("resnet50", num_classes=2)
    composite = Composite(model, F.cross_entropy)
    image = InputSpec((1, 3, 4096, 4096), torch.float32, field=True)
    label = InputSpec((1,), torch.int64, field=False)
    capture_seconds = fastest(lambda: trace(composite, image, label), 3)
    guard = trace(composite, image, label).guard
    assert guard.holds()
    result = {
        "look_ms": 1000 * fastest(guard.holds, rounds),
        "look_after_every_parameter_changed_ms": 1000 * after_a_step(model, guard, rounds),
        "walk_ms": 1000 * fastest(guard.renew, rounds),
        "capture_s": capture_seconds,
        "small_step_ms": 1000 * small_step(lambda network: network, rounds),
        "small_step_that_counts_ms": 1000 * small_step(Counting, rounds),
    }
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))


def fastest(work: Callable[[], object], rounds: int) -> float:
    found = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found = min(found, time.perf_counter() - start)
    return found


def after_a_step(model: nn.Module, guard: Guard, rounds: int) -> float:
    def look() -> None:
        assert guard.holds()

    found = float("inf")
    for _ in range(rounds):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.999)
        found = min(found, fastest(look, 1))
    return found


def small_step(wrap: Callable[[nn.Module], nn.Module], rounds: int) -> float:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    engine = gg.compile(wrap(network), lambda o, t: F.binary_cross_entropy_with_logits(o, t))
    image, target = torch.rand(3, 64, 64), torch.rand(1, 64, 64)
    engine.backward(image, target)
    return fastest(lambda: engine.backward(image, target), rounds)


if __name__ == "__main__":
    main()
