"""Optimizer state that ranks share: the same steps by any number of them, and files that any number reads."""

from __future__ import annotations

import copy
import errno
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from gigagrad.errors import ConfigError, WriteError
from gigagrad.ranks import SingleRank, run_threaded
from gigagrad.training import FitConfig
from gigagrad.training.learner import check_apart, make_optimizer
from gigagrad.training.sharing import Shards, load_shards

CONFIG = FitConfig(slides="c.csv", out="run", rates=("0=0.1",), shard_optimizer=True)


def made() -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 2), nn.Linear(2, 1))
    net[2].requires_grad_(False)
    return net


NET = made()
"""Ranks are threads here, which share one generator."""


def net() -> nn.Sequential:
    return copy.deepcopy(NET)


def stepped(ranks, model, optimizer, shards, steps=range(3)):
    """With gradients that all ranks have; one parameter never gets any."""
    for step in steps:
        noise = torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=noise)
            parameter.grad = gradient if parameter.requires_grad and name != "1.bias" else None
        optimizer.step()
        if shards is not None:
            shards.spread()
    return [parameter.detach().clone() for parameter in model.parameters()]


def sharded(ranks, config=CONFIG):
    model = net()
    shards = Shards(model, ranks)
    return model, make_optimizer(config, model, shards.own), shards


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd?momentum=0.9", "rmsprop"])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_any_number_of_ranks_steps_like_one(count, optimizer):
    config = replace(CONFIG, optimizer=optimizer)
    model = net()
    expected = stepped(SingleRank(), model, make_optimizer(config, model), None)
    for found in run_threaded(count, lambda ranks: stepped(ranks, *sharded(ranks, config))):
        assert all(map(torch.equal, expected, found))


def test_each_parameter_s_state_is_of_one_rank():
    def work(ranks):
        model, optimizer, shards = sharded(ranks)
        stepped(ranks, model, optimizer, shards)
        states = sum(len(group["params"]) for group in optimizer.param_groups)
        assert states == len(shards.own)
        assert len(optimizer.param_groups) == 2
        return sorted(shards.own), sum(parameter.numel() for parameter in shards.own.values())

    found = run_threaded(2, work)
    names = [name for own, _ in found for name in own]
    assert sorted(names) == sorted(name for name, p in net().named_parameters() if p.requires_grad)
    assert max(numbers for _, numbers in found) <= 36


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # threads of one process share filters
@pytest.mark.parametrize(("wrote", "reads"), [(1, 1), (3, 1), (3, 2), (2, 5)])
def test_any_number_of_ranks_goes_on(wrote, reads, tmp_path):
    folder = tmp_path / "optimizer" / "step-3"
    folder.mkdir(parents=True)
    (folder / "rank-9-of-9.safetensors").write_text("of a start that did not come to its end")

    def begin(ranks):
        model, optimizer, shards = sharded(ranks)
        stepped(ranks, model, optimizer, shards)
        count = shards.save(optimizer, folder)
        after = copy.deepcopy(model.state_dict())
        return count, after, stepped(ranks, model, optimizer, shards, range(3, 6))

    count, after, expected = run_threaded(wrote, begin)[0]
    assert count == 3 * 5
    assert len([*folder.iterdir()]) == wrote

    def go_on(ranks):
        model, optimizer, shards = sharded(ranks)
        model.load_state_dict(after)
        load_shards(optimizer, model, folder, count)
        return stepped(ranks, model, optimizer, shards, range(3, 6))

    for found in run_threaded(reads, go_on):
        assert all(map(torch.equal, expected, found))
    next(iter(folder.iterdir())).unlink()
    if wrote > 1:
        model, optimizer, _ = sharded(SingleRank())
        with pytest.raises(ValueError, match=re.escape("tensors of the optimizer's state, not 15")):
            load_shards(optimizer, model, folder, count)


class Together(torch.optim.SGD):
    """Steps by the sign of the sum of all gradients."""

    def step(self, closure=None):
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        sign = sum(gradient.sum() for gradient in gradients).sign()
        for gradient in gradients:
            gradient *= sign
        return super().step(closure)


def test_an_optimizer_whose_steps_depend_on_all_parameters_is_not_shared():
    with pytest.raises(ConfigError, match="depends on all parameters together"):
        check_apart(replace(CONFIG, optimizer=f"{__name__}:Together"))
    before = torch.get_rng_state()
    for optimizer in ("adam", "adamw?amsgrad=true", "sgd?momentum=0.9", "apollo", "rmsprop", "lbfgs"):
        check_apart(replace(CONFIG, optimizer=optimizer))
    assert torch.equal(torch.get_rng_state(), before)


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = 1
        return super().step(closure)


def test_state_that_is_no_tensor_is_refused(tmp_path):
    config = replace(CONFIG, optimizer=f"{__name__}:Counting")
    model, optimizer, shards = sharded(SingleRank(), config)
    stepped(SingleRank(), model, optimizer, shards)
    with pytest.raises(ConfigError, match="Counting keeps a int for each parameter"):
        shards.save(optimizer, tmp_path / "step-1")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_ends_the_writing_comes_as_itself(tmp_path, monkeypatch, error):
    """PyTorch wraps it, an interrupt too, in something that is no `Exception`."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", fail)
    model, optimizer, shards = sharded(SingleRank())
    stepped(SingleRank(), model, optimizer, shards)
    kind = WriteError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind) as told:
        shards.save(optimizer, tmp_path / "step-3")
    assert kind is KeyboardInterrupt or "rank-1-of-1.safetensors: No space left on device; free" in str(told.value)
