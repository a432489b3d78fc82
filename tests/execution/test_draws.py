"""One seed is one draw, whatever the plan: random operators on whole fields, on fields, on pooled vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gigagrad as gg
from gigagrad.execution.seeds import drawing
from gigagrad.ranks import SingleRank, run_threaded
from tests.execution.by_ranks import outcome, prepared_by


def _tokens(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Of tokens `(1, positions, channels)`, back as an image: they lie in memory as the kept field does."""
    return lambda y: draw(y.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(y.shape)


def _attended(tokens: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.3)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout of tokens": _tokens(lambda t: F.dropout(t, 0.3)),
    "dropout of channels of tokens": _tokens(lambda t: F.dropout1d(t, 0.5)),
    "alpha dropout of tokens": _tokens(lambda t: F.alpha_dropout(t, 0.3, training=True)),
    "feature alpha dropout": lambda y: F.feature_alpha_dropout(y.flatten(2), 0.5, training=True).reshape(y.shape),
    "noise of tokens": _tokens(lambda t: t * torch.rand_like(t) + t * torch.randn_like(t)),
    "mask of tokens": _tokens(lambda t: t * torch.bernoulli(t.sigmoid())),
    "chosen positions": lambda y: y * y.flatten()[torch.multinomial(y.flatten().softmax(0), 9)].sum(),
    "shuffled positions": lambda y: y.flatten(2)[:, :, torch.randperm(y[0, 0].numel())].reshape(y.shape) * y,
    "attention with dropout": lambda y: y * _attended(y[:, :, ::9, ::9].flatten(2).transpose(1, 2)).sum(),
    "dropout of pixels": lambda y: F.dropout(y, 0.3),
    "dropout of channels": lambda y: F.dropout2d(y, 0.5),
    "dropout of a pooled vector": lambda y: y * F.dropout(y.mean((2, 3)), 0.5)[:, :, None, None],
}


BY_PYTORCH = DRAWS.keys() - {"chosen positions", "shuffled positions"}
"""Those that draw the same where PyTorch runs the model as it is."""


class Drawing(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = names
        self.body = nn.Conv2d(2, 6, 3, padding=1).double()
        self.norm = nn.InstanceNorm2d(6)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        for name in self.names:
            y = self.norm(DRAWS[name](y))
        return y * self.scale


def loss(output: Tensor, weights: Tensor) -> Tensor:
    return (output * weights).mean()


def found(engine: gg.Engine, image: Tensor, weights: Tensor) -> list[Tensor]:
    engine.model.zero_grad()
    torch.manual_seed(3)
    value = engine.backward(image, weights)
    scale: Any = engine.model.scale
    assert torch.allclose(value, scale.grad * scale.detach(), rtol=1e-9), "the gradient is that of what was drawn"
    return [value, *(parameter.grad.clone() for parameter in engine.model.parameters())]


def planned(state: dict[str, Any], tiers: str | None, **choice: Any) -> dict[str, Any]:
    """The state of an engine whose plans are others."""
    choices = {}
    for name, known in state["choices"].items():
        choices[name] = {**known, **choice}
        if tiers is not None:
            choices[name]["kept"] = [[node, tiers] for node, _ in known["kept"]]
    return {**state, "choices": choices}


@pytest.mark.parametrize(
    "names",
    [
        ("dropout of tokens", "alpha dropout of tokens", "mask of tokens"),
        ("noise of tokens", "dropout of pixels", "shuffled positions", "dropout of a pooled vector"),
        ("noise of tokens", "dropout of pixels", "attention with dropout", "dropout of a pooled vector"),
        ("dropout of channels of tokens", "feature alpha dropout", "dropout of channels"),
        ("chosen positions", "attention with dropout", "dropout of tokens"),
    ],
    ids=", ".join,
)
def test_a_seed_draws_the_same_in_any_plan(names, tmp_path):
    generator = torch.Generator().manual_seed(1)
    image, weights = (torch.randn(c, 46, 39, generator=generator, dtype=torch.float64) for c in (2, 6))
    engine = gg.compile(Drawing(names), loss, scratch=tmp_path, progress=False)
    engine.in_tiles = True
    first = found(engine, image, weights)
    state, (choice,) = engine.state_dict(), engine.state_dict()["choices"].values()
    tiles = [[9, 13] for _ in choice["tiles"]]
    layout = "contiguous" if choice["memory_format"] == "channels_last" else "channels_last"
    for other in (
        planned(state, "disk"),
        planned(state, "memory", tiles=tiles, memory_format=layout),
        planned(state, "disk", tiles=tiles, memory_format=layout, workers=2),
    ):
        engine.load_state_dict(other)
        for one, two in zip(first, found(engine, image, weights), strict=True):
            torch.testing.assert_close(two, one, rtol=1e-8, atol=1e-11)
    at_once = gg.compile(engine.model, loss, progress=False)
    at_once.load_state_dict(planned(state, None, whole="forward and backward"))
    assert bool(at_once.plan(image, weights).whole) == BY_PYTORCH.issuperset(names)
    for one, two in zip(first, found(at_once, image, weights), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-8, atol=1e-11)
    run = prepared_by(engine, image, weights)

    def by(ranks):
        return outcome(run, ranks)[0]

    torch.manual_seed(3)
    alone = by(SingleRank())
    for count in (2, 3):
        torch.manual_seed(3)
        assert run_threaded(count, by) == [alone] * count
    torch.manual_seed(4)
    assert by(SingleRank()) != alone


def test_runs_with_one_seed_draw_alike_beside_rounded_fields_too(tmp_path):
    """What rounds fields draws as well, and more or less of it as a plan keeps more or fewer."""
    image, weights = torch.randn(2, 40, 40, dtype=torch.float64), torch.randn(6, 40, 40, dtype=torch.float64)
    model = Drawing(("dropout of tokens",))
    values = []
    for storage in ("exact", "error 1e-12"):
        engine = gg.compile(model, loss, seed=5, scratch=tmp_path, storage=storage, tile=(20, 20))
        engine.plan(image, weights)
        engine.load_state_dict(planned(engine.state_dict(), "disk"))
        values.append(engine.backward(image, weights))
    torch.testing.assert_close(values[1], values[0], rtol=1e-6, atol=1e-9)


def test_what_draws_nothing_takes_nothing_from_pytorchs_generator():
    model = nn.Sequential(nn.Conv2d(2, 1, 3), nn.Flatten(2), nn.Dropout(0.4)).double().eval()
    engine, image = gg.compile(model, lambda o, t: o.square().mean() + t.sum()), torch.rand(2, 20, 20).double()
    before = torch.get_rng_state()
    engine.backward(image, torch.zeros(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_operators_that_draw_are_known_by_their_tags():
    class Many(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            flat = F.dropout(x.flatten(1), 0.5)
            return flat * torch.rand_like(flat) + flat.sort().values

    engine = gg.compile(Many(), lambda o, t: o.square().mean() + t.sum())
    graph = prepared_by(engine, torch.rand(1, 9, 9), torch.zeros(1)).prepared.graph
    drawn = [graph[i].op for i in drawing(graph)]
    assert any("dropout" in op for op in drawn)
    assert any("rand_like" in op for op in drawn)
    assert len(drawn) == 2
    assert [*drawing(graph).values()] == [0, 1]


@pytest.mark.parametrize("tile", [None, (9, 13)])
def test_an_engine_with_a_seed_that_loads_a_state_goes_on_drawing(tile):
    image, weights = torch.ones(2, 24, 23, dtype=torch.float64), torch.ones(6, 24, 23, dtype=torch.float64)

    def engine() -> gg.Engine:
        return gg.compile(Drawing(("dropout of channels",)).double(), noted, seed=3, tile=tile, progress=False)

    def noted(output: Tensor, target: Tensor) -> Tensor:
        return (output * target).square().sum()

    whole, before, after = engine(), engine(), engine()
    for each in (before, after):
        each.model.load_state_dict(whole.model.state_dict())
    expected = [float(whole.backward(image, weights)) for _ in range(5)]
    assert len(set(expected)) > 1
    found = [float(before.backward(image, weights)) for _ in range(2)]
    after.load_state_dict(before.state_dict())
    assert [*found, *(float(after.backward(image, weights)) for _ in range(3))] == expected
