"""Steps that are recorded and replayed give the bits of steps that are computed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.devices import Device
from gigagrad.devices.cuda import PlannedCuda
from gigagrad.events import Notice
from gigagrad.execution.run import Run
from gigagrad.plans import estimate
from gigagrad.plans.plan import amount_of
from gigagrad.threads import SideThreads
from tests.devices.recording import RecordingCpu

Pair = tuple[Any, Any]


def network(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(6)] if norm else [nn.Identity(), nn.Identity()]
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), norms[0], nn.ReLU(), nn.Conv2d(4, 6, 5, stride=2), norms[1], nn.Conv2d(6, 1, 1)
    ).train()


def images(count: int, height: int = 61, width: int = 83) -> list[Pair]:
    draw = torch.Generator().manual_seed(5)
    shapes = (3, height, width), (1, (height - 3) // 2, (width - 3) // 2)
    return [(torch.rand(shapes[0], generator=draw), torch.rand(shapes[1], generator=draw)) for _ in range(count)]


def steps(device: Device | str, model: nn.Module, pairs: list[Pair], loss: Any = F.mse_loss) -> list[torch.Tensor]:
    """Return the losses, the gradients and the state after some steps with an optimizer between them."""
    model = copy.deepcopy(model)
    engine = gg.compile(model, loss, device=device, tile=(16, 24), progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for image, target in pairs:
        optimizer.zero_grad()
        found.append(engine.backward(image, target))
        found += [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        found += [one.clone() for one in model.state_dict().values()]
    return found


def smooth_dice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p = output.sigmoid()
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


@pytest.mark.parametrize("loss", [F.mse_loss, smooth_dice])
@pytest.mark.parametrize("norm", [True, False])
def test_steps_that_are_replayed_give_the_same_bits(norm: bool, loss: Any) -> None:
    device, pairs = RecordingCpu(), images(4)
    expected, found = steps(RecordingCpu(most=0), network(norm), pairs, loss), steps(device, network(norm), pairs, loss)
    assert (device.recorded, device.replayed) == (1, 3)
    assert all(map(torch.equal, found, expected))


def test_no_other_thread_has_a_part_in_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    device, pairs, submit = RecordingCpu(), images(3), SideThreads.submit

    def alone(self: SideThreads, *given: Any) -> Any:
        assert not device.is_recording
        return submit(self, *given)

    monkeypatch.setattr(SideThreads, "submit", alone)
    steps(device, network(), pairs)
    assert (device.recorded, device.replayed) == (1, 2)


def test_a_step_that_cannot_be_recorded_is_computed_and_says_so() -> None:
    device, pairs = RecordingCpu(most=0), images(3)
    assert all(map(torch.equal, steps(device, network(), pairs), steps(RecordingCpu(most=0), network(), pairs)))
    engine = gg.compile(network(), F.mse_loss, device=device, tile=(16, 24), progress=False)
    told: list[str] = []
    engine.events.subscribe(lambda event: told.append(event.text) if isinstance(event, Notice) else None)
    for pair in pairs:
        engine.backward(*pair)
    assert len([text for text in told if "cannot be recorded" in text and "capturing" in text]) == 1


class Classes(nn.Module):
    """Scores of a whole slide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.conv(x.float() / 255).relu().mean((2, 3)))
        return found


def test_files_and_labels_are_read_anew_for_each_step(tmp_path: Path) -> None:
    pairs: list[Pair] = []
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (70, 90, 3), np.uint8)
        path = tmp_path / f"{number}.tif"
        tifffile.imwrite(path, pixels, photometric="rgb", tile=(32, 32), compression="zlib")
        pairs.append((path, number % 3))
    device = RecordingCpu()
    torch.manual_seed(0)
    model = Classes()
    expected, found = (steps(one, model, pairs, F.cross_entropy) for one in (RecordingCpu(most=0), device))
    assert device.replayed == 3
    assert all(map(torch.equal, found, expected))


def test_a_class_score_outlives_the_next_step() -> None:
    device, pairs = RecordingCpu(), images(4)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    recorded, plain = (
        gg.compile(model, device=one, tile=(16, 24), progress=False) for one in (device, RecordingCpu(most=0))
    )
    scores = [recorded.forward(image) for image, _ in pairs]
    assert device.replayed == 3
    assert all(torch.equal(score, plain.forward(image)) for score, (image, _) in zip(scores, pairs, strict=True))


def test_weights_that_moved_are_recorded_anew() -> None:
    device, pairs = RecordingCpu(), images(4)
    model = network()
    engine = gg.compile(model, F.mse_loss, device=device, tile=(16, 24), progress=False)
    for pair in pairs[:3]:
        engine.backward(*pair)
    assert device.recorded == 1
    with torch.no_grad():
        conv = model[0]
        assert isinstance(conv, nn.Conv2d)
        conv.weight.data = conv.weight * 2
    model.zero_grad()
    expected = copy.deepcopy(model)
    engine.backward(*pairs[3])
    assert device.recorded == 2
    computed = gg.compile(expected, F.mse_loss, device=RecordingCpu(most=0), tile=(16, 24), progress=False)
    computed.backward(*pairs[3])
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.equal(own.grad, other.grad)


def test_only_the_size_that_came_last_is_recorded() -> None:
    device, model = RecordingCpu(), network()
    engine = gg.compile(model, F.mse_loss, device=device, tile=(40, 48), progress=False)
    (one,), (other,) = images(1), images(1, 77, 75)
    for pair in (one, one, one, other, one, other):
        engine.backward(*pair)
    assert (device.recorded, device.replayed) == (1, 2)
    engine.backward(*other)
    assert (device.recorded, device.replayed) == (2, 3)


def test_fields_of_a_recorded_step_stay_on_the_device_and_others_go_where_there_is_room() -> None:
    model, (pair, *_) = network(), images(1, 2000, 3000)
    found = {}
    for budget in ("700MiB", "96MiB"):
        engine = gg.compile(model, F.mse_loss, device=PlannedCuda(), memory=budget, progress=False)
        plan = engine.plan(*pair)
        found[budget] = (plan.memory_at_peak, {field.tier for field in plan.kept})
    recorded, tight = (amount_of(amounts, estimate.IMAGES) for amounts, _ in found.values())
    assert recorded == 4 * (3 * 2000 * 3000 + 998 * 1498)
    assert not tight
    assert found["700MiB"][1] <= {"memory"}


def test_a_step_that_failed_is_computed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    device, (pair, *_) = RecordingCpu(), images(1)
    engine = gg.compile(network(), F.mse_loss, device=device, tile=(40, 48), progress=False)
    with monkeypatch.context() as broken:
        broken.setattr(Run, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.backward(*pair)
    for recorded in (0, 1, 1):
        engine.backward(*pair)
        assert device.recorded == recorded


def interrupted(run: Run) -> None:
    raise KeyboardInterrupt


def test_buffers_as_a_step_left_them_outlive_the_next_one() -> None:
    def written(device: Device) -> list[torch.Tensor]:
        model, lefts = network(), []
        engine = gg.compile(model, F.mse_loss, device=device, tile=(16, 24), progress=False)
        for pair in images(4):
            engine.backward(*pair)
            lefts.append(engine.leave_again)
        found = []
        for left in lefts:
            assert left is not None
            left()
            found += [buffer.clone() for buffer in model.buffers()]
        return found

    device = RecordingCpu()
    assert all(map(torch.equal, written(device), written(RecordingCpu(most=0))))
    assert device.replayed == 3


def test_whatever_else_runs_on_the_device_has_the_memory_of_a_recording() -> None:
    device, (pair, *_) = RecordingCpu(), images(1)
    engine = gg.compile(network(), F.mse_loss, device=device, tile=(40, 48), progress=False)
    other = gg.compile(network().eval(), device=device, progress=False)
    for _ in range(3):
        engine.backward(*pair)
    assert (device.recorded, device.replayed) == (1, 2)
    assert list(other.stream(pair[0]))
    engine.backward(*pair)
    assert (device.recorded, device.replayed) == (1, 2)
    engine.backward(*pair)
    assert (device.recorded, device.replayed) == (2, 3)


class Drops(nn.Module):
    """Draws by the place of a pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.conv(F.dropout(x, 0.5, training=True)).mean((1, 2, 3))
        return found


def test_every_replay_draws_anew() -> None:
    device, ((image, _), *_) = RecordingCpu(), images(1)
    model = Drops()
    engines = [gg.compile(model, device=one, tile=(16, 16), seed=3, progress=False) for one in (device, "cpu")]
    found, expected = ([engine.forward(image) for _ in range(4)] for engine in engines)
    assert device.replayed == 3
    assert len({value.item() for value in found}) == 4
    assert all(map(torch.equal, found, expected))


def test_a_step_that_draws_over_whole_fields_is_computed() -> None:
    class Noisy(Drops):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.rand(()).to(x)

    device = RecordingCpu()
    engine = gg.compile(Noisy(), device=device, tile=(16, 16), seed=3, progress=False)
    first, second = (engine.forward(images(1)[0][0]) for _ in range(2))
    assert not torch.equal(first, second)
    assert not device.recorded


def test_bags_of_patches_are_uploaded_anew_for_each_step() -> None:
    draw = torch.Generator().manual_seed(3)
    pairs = [
        (torch.randint(0, 256, (11, 3, 9, 8), dtype=torch.uint8, generator=draw), number % 3) for number in range(4)
    ]
    device = RecordingCpu()
    torch.manual_seed(0)
    model = Classes()
    mean = nn.Sequential(model, Mean())
    expected, found = (steps(one, mean, pairs, F.cross_entropy) for one in (RecordingCpu(most=0), device))
    assert device.replayed == 3
    assert all(map(torch.equal, found, expected))


class Mean(nn.Module):
    """Average the scores of patches."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.mean(0, keepdim=True)
