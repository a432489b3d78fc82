"""Ranks that were given different things refuse, all of them, before anything is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.execution import agreement
from gigagrad.execution.agreement import Agreement
from gigagrad.execution.sources import image_source
from gigagrad.graphs import LossModule
from gigagrad.images import Image
from gigagrad.ranks import Ranks, SingleRank, run_threaded

COUNT = 3
ODD = 1


class Step:
    """What a rank is given; a case changes it on one of them."""

    def __init__(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model: Any = copy.deepcopy(model)
        self.image: Any = torch.rand(3, 40, 36, generator=generator)
        self.target: Any = torch.rand(1, 40, 36, generator=generator)
        self.loss: Callable[..., torch.Tensor] = doubled
        self.options: dict[str, Any] = {"tile": (20, 18), "seed": 1}
        self.method = "backward"


def doubled(output, target):
    return (output - target).square().mean() * 2


def tripled(output, target):
    return (output - target).square().mean() * 3


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.1), nn.Conv2d(4, 1, 1))


def told(
    model: nn.Module, change: Callable[[Step], object], later: Callable[[Step], object] | None = None
) -> list[str]:
    """What each rank is told: one is changed at the first step, or `later`, at the second."""

    def work(ranks: Ranks) -> str:
        step = Step(model)
        if ranks.index == ODD:
            change(step)
        engine = gg.compile(step.model, step.loss, mesh=ranks, progress=False, **step.options)
        try:
            for number in range(1 if later is None else 3):
                if number == 1 and ranks.index == ODD:
                    assert later is not None
                    later(step)
                getattr(engine, step.method)(step.image, step.target)
        except ConfigError as error:
            return str(error)
        return "ran"

    return run_threaded(COUNT, work, timeout=60)


def changed(name: str, value: Callable[[Any], Any]) -> Callable[[Step], None]:
    return lambda step: setattr(step, name, value(getattr(step, name)))


def one_more(tensor: torch.Tensor, place: int) -> torch.Tensor:
    other = tensor.detach().clone()
    other.view(-1)[place] += 0.5
    return other


def weight_changed(step: Step) -> None:
    with torch.no_grad():
        step.model[3].weight.view(-1)[2] += 1e-6


def buffer_changed(step: Step) -> None:
    step.model[1].running_mean.add_(1)


def stepped(step: Step) -> None:
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.sub_(0.01)


def both(step: Step) -> None:
    step.image, step.target = step.image[:, :38], step.target[:, :38]


GIVEN = "rank 1 was given another"
OTHER = "rank 1 would compute something else than rank 0, first at "
FIRST = {
    "image": (changed("image", lambda image: one_more(image, 4000)), f"{GIVEN} image than rank 0, and ranks"),
    "target": (changed("target", lambda target: one_more(target, -1)), f"{GIVEN} target than rank 0"),
    "label": (changed("target", lambda target: torch.tensor([1.0])), f"{GIVEN} target than rank 0"),
    "size": (both, f"{GIVEN} image and another target than rank 0"),
    "loss": (changed("loss", lambda loss: tripled), f"{OTHER}{__file__}"),
    "mode": (lambda step: step.model.eval(), "the model is in another mode on rank 1 than on rank 0"),
    "mode of a part": (lambda step: step.model[1].eval(), "the model is in another mode on rank 1 than on rank 0"),
    "frozen": (lambda step: step.model[0].requires_grad_(False), f"{OTHER}0.weight; give all ranks the same model"),
    "number": (lambda step: setattr(step.model[1], "eps", 1e-3), OTHER),
    "tile": (lambda step: step.options.update(tile=(9, 9)), "rank 1 was compiled with another tile than rank 0"),
    "several": (
        lambda step: step.options.update(tile=(9, 9), seed=2),
        "rank 1 was compiled with another tile and another",
    ),
    "precision": (lambda step: step.options.update(precision="bfloat16"), "rank 1 was compiled with another precision"),
    "weights": (weight_changed, "rank 1 has other weights than rank 0, the first of them 3.weight"),
    "buffers": (buffer_changed, "rank 1 has other weights than rank 0, the first of them 1.running_mean"),
    "method": (changed("method", lambda method: "forward"), "rank 1 and rank 0 were asked for different things"),
}


@pytest.mark.parametrize("name", FIRST)
def test_what_differs_is_named_on_every_rank(model, name):
    change, said = FIRST[name]
    found = told(model, change)
    assert all(text.startswith(said) for text in found), found


@pytest.mark.parametrize("name", ["image", "mode", "weights"])
def test_a_later_step_is_compared_as_well(model, name):
    change, said = FIRST[name] if name != "weights" else (stepped, "rank 1 has other weights than rank 0")
    found = told(model, lambda step: None, change)
    assert all(text.startswith(said) for text in found), found


def test_ranks_with_other_memory_and_copies_of_one_image_run(model):
    def own(step: Step) -> None:
        step.options.update(memory="16 GiB")
        step.image = np.asfortranarray(step.image.numpy())
        step.model[3].to(memory_format=torch.channels_last)

    assert told(model, own, lambda step: None) == ["ran"] * COUNT


def test_an_engine_that_is_younger_on_one_rank_is_compared_whole(model):
    def work(ranks: Ranks) -> str:
        step = Step(model)
        engine = gg.compile(step.model, step.loss, mesh=ranks, **step.options)
        engine.backward(step.image, step.target)
        if ranks.index == ODD:
            engine = gg.compile(step.model, step.loss, mesh=ranks, **step.options)
        engine.backward(step.image, step.target)
        if ranks.index == 0:
            engine = gg.compile(step.model, step.loss, mesh=ranks, **step.options)
            weight_changed(step)
        with pytest.raises(ConfigError, match="ranks 1, 2 have other weights than rank 0"):
            engine.backward(step.image, step.target)
        return "ran"

    assert run_threaded(COUNT, work, timeout=60) == ["ran"] * COUNT


def test_every_number_of_weights_is_compared_in_time(monkeypatch):
    """Also of tensors that do not lie in the order of their numbers."""
    monkeypatch.setattr(agreement, "_NUMBERS", 30)
    sizes = {"large": (8, 5, 3, 2), "small": (3,), "none": (0,), "one": ()}
    weights = {
        name: torch.arange(torch.Size(size).numel(), dtype=torch.float64).view(size) for name, size in sizes.items()
    }
    weights["turned"] = weights["large"].contiguous(memory_format=torch.channels_last)
    stride = sum(weight.numel() for weight in weights.values()) // 30
    seen = [[*agreement._some(weights, step)] for step in range(1, stride + 1)]
    for place, weight in enumerate(weights.values()):
        assert {*torch.cat([some[place] for some in seen]).tolist()} == {*weight.reshape(-1).tolist()}
    assert all(sum(map(len, some)) <= 40 for some in seen)
    assert len({agreement._digest(weights, step) for step in range(stride + 1)}) == stride + 1
    assert [len(some) for some in agreement._some(weights, 0)] == [weight.numel() for weight in weights.values()]


class Counting(Image):
    """A large file that counts the pixels it gives."""

    def __init__(self, side: int) -> None:
        super().__init__(shape=(3, side, side), dtype=np.dtype(np.uint8), name="slide")
        self.pixels = 0

    def _read_inside(self, box: Box) -> np.ndarray:
        self.pixels += box.area
        return np.full((3, *box.shape), (box.y0 + box.x0) % 251, np.uint8)


def test_of_a_large_image_some_is_compared(monkeypatch):
    slide = Counting(20_000)
    first = agreement._content(image_source(slide))
    assert slide.pixels == 16 * 128**2
    assert agreement._content(image_source(slide)) == first
    monkeypatch.setattr(agreement, "_WHOLE_BYTES", {True: 6400, False: 0})
    array = np.zeros((1, 1000, 100), np.float32)
    before, found = agreement._content(image_source(array)), 0
    for y in range(1000):
        array[0, y, 7] = 1
        found += agreement._content(image_source(array)) != before
        array[0, y, 7] = 0
    assert found == 64, "a row of each strip"


def test_one_process_compares_nothing(model):
    compared = Agreement(SingleRank(), LossModule(model, doubled), {})
    assert compared.all_gather_object("word", None, {}, backward=True, content=True) == ["word"]  # type: ignore[arg-type]
