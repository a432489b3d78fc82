"""Which optimizer, of which parameters, at which rate: against PyTorch's own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gigagrad.errors import ConfigError, ModelError
from gigagrad.models.mil import BagNetwork, MeanPool
from gigagrad.training import FitConfig
from gigagrad.training.learner import AveragedWeights, freeze, make_optimizer, rate_share, set_rates

CONFIG = FitConfig(slides="c.csv", out="run", learning_rate=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def test_adam_is_the_default() -> None:
    optimizer = make_optimizer(CONFIG, Net())
    assert type(optimizer) is torch.optim.Adam
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]


def test_any_optimizer_with_its_settings() -> None:
    made = make_optimizer(replace(CONFIG, optimizer="SGD?momentum=0.9&nesterov=true", weight_decay=0.01), Net())
    assert isinstance(made, torch.optim.SGD)
    assert {made.defaults[key] for key in ("momentum", "weight_decay")} == {0.9, 0.01}
    assert made.defaults["nesterov"] is True
    betas = make_optimizer(replace(CONFIG, optimizer="adamw?betas=0.8,0.9"), Net()).defaults["betas"]
    assert betas == (0.8, 0.9)
    assert isinstance(make_optimizer(replace(CONFIG, optimizer="torch.optim:RMSprop"), Net()), torch.optim.RMSprop)


def test_no_weight_decay_is_none_and_none_given_is_the_optimizer_s_own() -> None:
    def decay(weight_decay: float | None, optimizer: str = "adamw") -> float:
        return make_optimizer(replace(CONFIG, optimizer=optimizer, weight_decay=weight_decay), Net()).defaults[
            "weight_decay"
        ]

    assert (decay(0), decay(0.1), decay(None)) == (0, 0.1, 0.01)
    assert decay(None, "adamw?weight_decay=0.2") == 0.2
    assert isinstance(make_optimizer(replace(CONFIG, optimizer="rprop", weight_decay=0), Net()), torch.optim.Rprop)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adm"}, "unknown optimizer 'adm', did you mean 'adam'"),
        ({"optimizer": "sgd?momentum=-1"}, "cannot make the optimizer .*Invalid momentum"),
        ({"optimizer": "sgd?speed=1"}, "the optimizer 'sgd' takes no speed"),
        ({"optimizer": "torch.nn:Identity"}, "no torch.optim.Optimizer"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "takes no weight_decay"),
        ({"rates": ("encoder",)}, "is no pattern with a factor"),
        ({"rates": ("encodr=0.1",)}, "no parameter of the model matches 'encodr', did you mean 'encoder'"),
        ({"frozen": ("backbone",)}, "frozen: no parameter of the model matches 'backbone'; it has encoder"),
        ({"frozen": ("*",)}, "leaves nothing to train"),
    ],
)
def test_a_mistake_gets_one_clear_line(changes, words) -> None:
    def make() -> None:
        model = Net()
        freeze(replace(CONFIG, **changes), model)
        make_optimizer(replace(CONFIG, **changes), model)

    with pytest.raises((ConfigError, ModelError), match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_frozen_and_slow_parameters() -> None:
    model, config = Net(), replace(CONFIG, frozen=("encoder.0",), rates=("encoder=0.1", "*.bias=2"))
    assert freeze(config, model) == ("encoder.0.weight", "encoder.0.bias")
    optimizer = make_optimizer(config, model)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    by_name = {name: rates.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert by_name == {
        "encoder.0.weight": None,
        "encoder.0.bias": None,
        "encoder.1.weight": pytest.approx(0.01),
        "encoder.1.bias": pytest.approx(0.01),
        "head.weight": 0.1,
        "head.bias": 0.2,
    }
    set_rates(optimizer, replace(config, schedule="linear"), 5, 10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.005, 0.1, 0.05])


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("blocks.[0-2]", "012"),
        ("blocks.[!4]", "0123"),
        ("b*.3", "3"),
        ("blocks", "01234"),
        ("blocks.?.weight", "01234"),
    ],
)
def test_patterns_match_modules(pattern, numbers) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(5))
    model.head = nn.Linear(1, 1)
    assert freeze(replace(CONFIG, frozen=(pattern,)), model) == tuple(f"blocks.{number}.weight" for number in numbers)


def test_a_frozen_encoder_is_in_eval_mode_at_once() -> None:
    model = BagNetwork(nn.Linear(1, 1), MeanPool(1, 1))
    freeze(replace(CONFIG, frozen=("head",)), model)
    assert model.encoder.training
    model.requires_grad_(True)
    freeze(replace(CONFIG, frozen=("encoder",)), model)
    assert not model.encoder.training
    assert model.training


@given(st.sampled_from([*FitConfig.CHOICES["schedule"]]), st.integers(0, 20), st.integers(1, 60))
def test_rates_rise_and_fall(schedule, warmup, steps) -> None:
    shares = [rate_share(schedule, warmup, step, steps) for step in range(steps)]
    assert all(0 < share <= 1 for share in shares)
    rising = min(warmup, steps)
    assert shares[:rising] == sorted(shares[:rising])
    assert shares[rising:] == sorted(shares[rising:], reverse=True)
    assert schedule != "constant" or set(shares[rising:]) <= {1.0}


def test_cosine_is_pytorchs() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    for step in range(12):
        assert rate_share("cosine", 0, step, 12) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_an_average_follows_the_weights_and_lends_itself() -> None:
    model = Net()
    average = AveragedWeights(model, 0.9)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(1, 40):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter))
                decay = min(0.9, (1 + step) / (10 + step))
                expected[name] = decay * expected[name] + (1 - decay) * parameter
        average.update(step)
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with average.applied():
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name])
    assert all(torch.equal(parameter, before) for parameter, before in zip(model.parameters(), own, strict=True))
    with pytest.raises(KeyboardInterrupt), average.applied():
        raise KeyboardInterrupt
    assert all(torch.equal(parameter, before) for parameter, before in zip(model.parameters(), own, strict=True))
    assert not math.isclose(float(own[0].sum()), float(average.weights["encoder.0.weight"].sum()))
