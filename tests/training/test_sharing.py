"""A step's slides shared out to groups: the same bits for any number of them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gigagrad as gg
from gigagrad.errors import ConfigError, ModelError
from gigagrad.images import open_image
from gigagrad.losses import named_loss
from gigagrad.ranks import Mesh, SingleRank, run_threaded
from gigagrad.training import FitConfig
from gigagrad.training.learner import Learner
from gigagrad.training.sharing import GradientTree, assign


def test_the_longest_slides_go_first():
    assert assign([5, 9, 4, 3, 3], 2) == [1, 0, 1, 0, 1]
    assert assign([7, 7], 3) == [0, 1]
    assert assign([2, 2, 2, 2, 5], 2) == [0, 1, 1, 1, 0]
    assert assign([3] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert assign([1, 2, 3], 1) == [0, 0, 0]


def test_groups_end_with_similar_loads():
    """Graham's bound: no group has more than 4/3 of what is best, which is at least the mean and the longest."""
    pixels = torch.randint(1, 1000, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    loads = [0] * 6
    for slide, owner in enumerate(assign(pixels, 6)):
        loads[owner] += pixels[slide]
    assert max(loads) <= 4 / 3 * max(sum(pixels) / 6, max(pixels))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_gradients_join_in_the_same_tree_whoever_has_them(count, groups):
    generator = torch.Generator().manual_seed(count)
    parameters = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(2).half())]
    slides: list[list[Any]] = [
        # Of very different sizes, so that any other order has other bits; some reach one parameter only.
        [torch.randn(p.shape, generator=generator).mul_(10.0 ** (i % 5)).to(p.dtype) for p in parameters]
        for i in range(count)
    ]
    for slide in slides[::3]:
        slide[1] = None
    owners = assign(torch.randint(1, 9, (count,), generator=generator).tolist(), groups)

    def work(ranks):
        tree = GradientTree(parameters, count)
        for slide, owner in enumerate(owners):
            if owner == ranks.index:
                tree.add(slide, [None if g is None else g.clone() for g in slides[slide]])
        return tree.total(ranks)

    def joined(first, stop):
        """The tree, as it is defined: halves of the next power of two."""
        if stop - first == 1:
            return slides[first]
        half = 1 << ((stop - first - 1).bit_length() - 1)
        pairs = zip(joined(first, first + half), joined(first + half, stop), strict=True)
        return [two if one is None else one if two is None else one + two for one, two in pairs]

    for found in run_threaded(groups, work):
        for mine, theirs in zip(found, joined(0, count), strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def test_nobody_sends_more_than_a_share_to_each_twice():
    parameter = nn.Parameter(torch.zeros(6, 4))

    def work(ranks):
        tree = GradientTree([parameter], 4)
        tree.add(ranks.index, [torch.full((6, 4), 2.0**ranks.index)])
        (total,) = tree.total(ranks)
        assert total is not None
        return ranks.sent_bytes, total.unique().tolist()

    assert run_threaded(4, work) == [(3 * 2 * 4 * 6, [15.0])] * 4


class Normed(nn.Module):
    """Two kinds of running statistics, and a count of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.average = nn.BatchNorm2d(4, momentum=None)
        self.last = nn.Conv2d(4, 1, 1)
        self.latest: torch.Tensor
        self.register_buffer("latest", torch.zeros(4))

    def forward(self, image):
        field = self.norm(self.first(image / 255))
        self.latest.copy_(field.mean((0, 2, 3)))
        return self.last(torch.relu(self.average(field)))


def learned(model, groups, sizes):
    """A step with the slides of these sizes, by so many groups: the models of all of them, and what was told."""
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for height, width in sizes:
        slide = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
        pairs.append((open_image(slide), open_image((slide[:1] > 99).byte())))
    config = FitConfig(slides="", out="", accumulate=len(sizes), optimizer="sgd", learning_rate=0.1)

    def work(ranks):
        own = copy.deepcopy(model)
        mesh = Mesh.of(ranks, (groups, 1))
        learner = Learner(config, own, named_loss("bce"), mesh, grouped=False)
        opened: list[Any] = [partial(nullcontext, pair) for pair in pairs]
        told = learner.add(opened, [height * width for height, width in sizes], lambda *_: None)
        learner.step(0, 1, len(sizes))
        return own, [values["loss"] for values in told]

    return run_threaded(groups, work) if groups > 1 else [work(SingleRank())]


def test_groups_leave_the_same_bits_in_weights_and_buffers():
    torch.manual_seed(0)
    model, sizes = Normed(), [(24, 20), (12, 16), (24, 20)]
    (one, losses), *_ = learned(model, 1, sizes)
    plain = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for height, width in sizes:
        slide = torch.randint(0, 256, (1, 3, height, width), generator=generator, dtype=torch.uint8)
        plain.train()
        (F.binary_cross_entropy_with_logits(plain(slide), (slide[:, :1] > 99).float()) / len(sizes)).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    for (name, mine), theirs in zip(one.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=name)
    for other, told in learned(model, 3, sizes):
        assert told == losses
        for (name, mine), theirs in zip(other.state_dict().items(), one.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs), name


class Drifting(nn.Module):
    """What it computes depends on what it wrote before."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 1, 1)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, image):
        self.seen.add_(1)
        return self.head(image / 255) * self.seen


class Counting(Drifting):
    """The same in Python."""

    runs = 0

    def forward(self, image):
        self.runs += 1
        return self.head(image / 255) * self.runs


@pytest.mark.parametrize(("model", "words"), [(Drifting, r"buffers.*model\.seen"), (Counting, "attributes")])
def test_slides_that_depend_on_each_other_are_refused(model, words):
    engine = gg.compile(model().train(), named_loss("bce").function)
    slide = torch.zeros(3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ModelError, match=rf"{words}.*leave all ranks in one group"):
        engine.check_independent(slide, slide[:1])
    gg.compile(Normed().train(), named_loss("bce").function).check_independent(slide, slide[:1])


def test_cases_stay_in_one_group():
    config = FitConfig(slides="", out="", accumulate=3)
    mesh = Mesh(SingleRank(), type("Three", (SingleRank,), {"count": 3})(), SingleRank())
    with pytest.raises(ConfigError, match=r"cases and cox .* has 3 groups; give --mesh 1x1"):
        Learner(config, Normed(), named_loss("bce"), mesh, grouped=True)


class Raw(nn.Module):
    """Of pixels as they are: in float16 the gradients of a bright slide overflow, those of a dim one do not."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, image):
        return self.last(torch.relu(self.first(image.float())))


def in_half(model, ranks, groups):
    """A learner, and a step of it with slides that are dim or bright."""
    config = FitConfig(slides="", out="", optimizer="sgd", learning_rate=1e-3, precision="float16")
    mesh = Mesh.of(ranks, (groups, 1))
    learner = Learner(config, model, named_loss("bce"), mesh, grouped=False)
    noise = torch.randint(0, 256, (3, 256, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    seen = {"bright": open_image(noise), "dim": open_image(noise // 128)}
    target = open_image(torch.ones(1, 256, 256, dtype=torch.uint8))

    def step(*slides, done=lambda *_: None):
        opened: list[Any] = [partial(nullcontext, (seen[slide], target)) for slide in slides]
        learner.add(opened, [256 * 256] * len(slides), done)
        learner.step(0, 1, len(slides))
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    return learner, step


def test_overflows_of_other_groups_and_of_earlier_slides_count_alike():
    torch.manual_seed(3)
    model = Raw()

    def work(ranks, groups):
        learner, step = in_half(copy.deepcopy(model), ranks, groups)
        weights = [step("bright", "dim"), step("dim", "dim")]
        return weights, learner.state(None)["engine"]["overflows"]

    weights, overflows = work(SingleRank(), 1)
    assert overflows == 1
    for others, again in run_threaded(2, lambda ranks: work(ranks, 2)):
        assert again == overflows
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, weights, strict=True))


def test_a_step_that_is_stopped_leaves_no_overflows_in_the_state():
    torch.manual_seed(3)
    learner, step = in_half(Raw(), SingleRank(), 1)

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step("bright", "dim", done=stop)
    assert learner.engine.overflows == 1
    assert learner.state(None)["engine"]["overflows"] == 0
