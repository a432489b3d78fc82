"""What quantised storage is predicted to add to gradients, against what it adds."""

import math

import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.execution.rounding_error import RoundingErrors, average_in
from gigagrad.plans import split_segments
from tests.exactness.normed import Net, dice

BOUND = 1e-3
DRAWS = 16


class Chain(nn.Module):
    """A kept field, something in between, and the convolution whose gradient is looked at."""

    def __init__(self, between, channels=6, groups=1):
        super().__init__()
        self.stem, self.between = nn.Conv2d(3, 6, 3, padding=1), between
        self.head = nn.Conv2d(channels, 4, 3, padding=1, groups=groups)

    def forward(self, x):
        return self.head(self.between(self.stem(x)))


class Twice(nn.Module):
    """The same error in both terms."""

    def forward(self, x):
        return x + nn.functional.hardtanh(x, -100, 100)


class Joined(nn.Module):
    """Two kept fields, summed or side by side."""

    def __init__(self, join, channels):
        super().__init__()
        self.stem, self.other, self.join = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 6, 5, padding=2), join
        self.head = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x):
        return self.head(self.join(self.stem(x), self.other(x)))


def norm(training):
    layer = nn.BatchNorm2d(6)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 3, 6))
        layer.running_var.copy_(torch.linspace(0.1, 2, 6))
    return layer.train(training)


# What stands between, the most that the prediction may be above what is measured (1: it is meant to be met).
MET = {
    "nothing": (lambda: Chain(nn.Identity()), 1.2),
    "groups": (lambda: Chain(nn.Identity(), groups=2), 1.2),
    "norm and ReLU": (lambda: Chain(nn.Sequential(norm(False), nn.ReLU())), 1.2),
    "norm in training mode": (lambda: Chain(nn.Sequential(norm(True), nn.ReLU())), 1.5),
    "separate pooling": (lambda: Chain(nn.MaxPool2d(2)), 1.2),
    "sum": (lambda: Joined(torch.add, 6), 1.2),
    "difference": (lambda: Joined(torch.sub, 6), 1.2),
    "sum with itself": (lambda: Chain(Twice()), 1.2),
    "channels": (lambda: Joined(lambda a, b: torch.cat([a, b], 1), 12), 1.2),
    "overlapping pooling": (lambda: Chain(nn.MaxPool2d(3, 2, 1)), 4),
    "nearest": (lambda: Chain(nn.Upsample(scale_factor=2)), 2.5),
    "bilinear": (lambda: Chain(nn.Upsample(scale_factor=2, mode="bilinear")), 4),
}


def made(build):
    torch.manual_seed(0)
    return build().double()


def loss(output, target):
    """Linear, so that cotangents know nothing of rounded values; of mean 0, which a norm would not pass on."""
    weights = target[..., : output.shape[-2], : output.shape[-1]].mean(1, keepdim=True) - 0.5
    return (output * weights).sum()


def keeping(model, loss, pair, modules, scratch, **options):
    """An engine that keeps the outputs of these convolutions in files."""
    engine = gg.compile(model, loss, scratch=scratch, **options)
    graph = engine.problem(*pair).graph
    fields = [n.id for n in graph.nodes if n.is_field and "conv" in n.op and n.origin.module_path in modules]
    assert len(fields) == len(modules)
    segments = len(split_segments(graph, fields))
    choice = {
        "memory_format": "contiguous",
        "workers": 1,
        "tiles": [[36, 44]] * segments,
        "kept": [[i, "disk"] for i in fields],
    }
    engine.load_state_dict({"choices": {"backward " + "x".join(map(str, (1, *pair[0].shape))): choice}})
    return engine


@pytest.fixture
def pair():
    torch.manual_seed(1)
    smooth = nn.functional.interpolate(torch.rand(1, 4, 12, 14), size=(140, 168), mode="bicubic")[0].double()
    return torch.rand(3, 70, 84, dtype=torch.float64), smooth


@pytest.mark.parametrize("between", MET)
def test_the_prediction_is_met_or_is_a_bound(pair, tmp_path, between):
    build, most = MET[between]
    modules = [name for name in ("stem", "other") if hasattr(made(build), name)]

    def gradients(storage, count):
        model = made(build)
        engine = keeping(model, loss, pair, modules, tmp_path, storage=storage, seed=0)
        found = []
        for _ in range(count):
            model.zero_grad()
            engine.backward(*pair)
            found.append(model.head.weight.grad.clone())
        assert {field.storage for field in engine.plan(*pair).kept} == {storage}
        return found, engine

    (exact,), engine = gradients("exact", 1)
    assert engine.gradient_errors == {}
    assert engine.last_run.gradient_error == 0
    found, engine = gradients(f"error {BOUND}", DRAWS)
    mean = sum(found) / DRAWS
    scatter = math.sqrt(sum((one - mean).square().sum().item() for one in found) / (DRAWS - 1))
    assert set(engine.gradient_errors) == {"head.weight"}
    predicted = engine.gradient_errors["head.weight"]
    assert 1 / 1.2 < predicted / scatter < most
    assert engine.last_run.gradient_error == pytest.approx(predicted / exact.norm().item(), rel=1e-2)


def test_what_is_not_known_is_left_out(pair, tmp_path):
    model = made(lambda: Chain(nn.SiLU()))
    engine = keeping(model, loss, pair, ["stem"], tmp_path, storage=f"error {BOUND}")
    engine.backward(*pair)
    assert engine.gradient_errors == {}
    assert engine.last_run.gradient_error == 0


def test_errors_are_scaled_with_the_gradient(pair, tmp_path):
    """Where one pass does, the cotangent of the last sum is known only when it ends, and scales what was gathered."""

    def relative(loss):
        model = made(MET["nothing"][0])
        model.stem.requires_grad_(False)
        engine = keeping(model, loss, pair, ["stem"], tmp_path, storage=f"error {BOUND}", seed=0)
        assert [step.phase for step in engine.plan(*pair).passes] == ["forward", "one pass"]
        engine.backward(*pair)
        return engine.gradient_errors["head.weight"], engine.last_run.gradient_error

    plain, halved = relative(loss), relative(lambda o, t: (loss(o, t) ** 2).sqrt() / 2)
    assert halved[0] == pytest.approx(plain[0] / 2)
    assert halved[1] == pytest.approx(plain[1])


def test_a_run_that_quantises_nothing_has_no_error(pair, tmp_path):
    """Though the engine's average remembers another one that did."""
    first = keeping(made(MET["nothing"][0]), loss, pair, ["stem"], tmp_path, storage=f"error {BOUND}", seed=0)
    first.backward(*pair)
    second = gg.compile(made(MET["nothing"][0]), loss)
    second.load_state_dict({"choices": {}, "gradient_errors": first.state_dict()["gradient_errors"]})
    second.backward(*pair)
    assert second.gradient_errors == first.gradient_errors
    assert second.last_run.gradient_error == 0


def test_watching_changes_nothing(pair, tmp_path, monkeypatch):
    image, mask = pair[0], (pair[1][:1, :70, :84] > 0.5).double()

    def step():
        torch.manual_seed(0)
        model = Net().double().train()
        engine = keeping(model, dice, (image, mask), ["stem", "down"], tmp_path, storage="error 0.05", seed=0)
        engine.backward(image, mask)
        return [p.grad for p in model.parameters()], engine

    watched, engine = step()
    assert engine.last_run.gradient_error > 0
    monkeypatch.setattr("gigagrad.execution.tile_loops.error_gains", lambda *_: {})
    unwatched, engine = step()
    assert engine.last_run.gradient_error == 0
    assert all(torch.equal(a, b) for a, b in zip(watched, unwatched, strict=True))


def test_the_average_goes_on_in_another_engine(pair, tmp_path):
    def engine(seed):
        return keeping(made(MET["nothing"][0]), loss, pair, ["stem"], tmp_path, storage=f"error {BOUND}", seed=seed)

    first = engine(0)
    for _ in range(2):
        first.backward(pair[0], 2 * pair[1] - 0.5)  # twice the cotangents
    second = engine(0)
    second.load_state_dict(first.state_dict())
    assert second.gradient_errors == first.gradient_errors
    second.backward(*pair)
    before = first.gradient_errors["head.weight"]
    assert second.gradient_errors["head.weight"] == pytest.approx(before * math.sqrt(0.9 + 0.1 / 4), rel=1e-6)


def test_averages_begin_with_the_first_run_and_follow_the_newest():
    known: dict[str, float] = {}
    average_in(known, {"a": 4.0, "b": 1.0}, {})
    assert known == {"a": 4.0, "b": 1.0}
    average_in(known, {"a": 14.0}, {})
    assert known == pytest.approx({"a": 5.0, "b": 1.0})


def test_scaling_the_cotangents_scales_the_errors_of_these_convolutions():
    graph = gg.compile(Net(), dice).problem(torch.rand(3, 32, 32), torch.rand(1, 32, 32)).graph
    convolutions = [node for node in graph.nodes if "conv" in node.op][:2]
    errors, squares = RoundingErrors(graph), torch.tensor([4.0, 9.0], dtype=torch.float64)
    errors.add({node.id: squares for node in convolutions})
    before = errors.by_weight(0.1)
    errors.scale({convolutions[0].id}, -2.0)
    scaled, same = (graph[node.operands[1]].arguments["name"] for node in convolutions)
    assert errors.by_weight(0.1) == pytest.approx({scaled: 4 * before[scaled], same: before[same]})
