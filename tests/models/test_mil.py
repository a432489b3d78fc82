"""Heads over bags of patches, against their published equations, parameter counts and plain computations."""

from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.errors import ModelError
from gigagrad.graphs import GATHER
from gigagrad.models.mil import (
    HEADS,
    AttentionPool,
    BagNetwork,
    Clam,
    GatedAttention,
    MaxPool,
    MeanPool,
    NystromAttention,
    PositionEncoding,
    TransMil,
    pseudo_inverse,
)

SMALL = {"transmil": {"width": 16, "heads": 2, "landmarks": 4}}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def features(count, width=6):
    return torch.randn(count, width, dtype=torch.float64)


def head(name, classes=2, width=6):
    return HEADS[name](width, classes, **SMALL.get(name, {})).double()


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def test_parameters_are_as_many_as_published():
    """As the authors' programs print them, for 1024 features and two classes; Ilse et al. with 500 features."""
    assert parameters(Clam(1024, 2)) == 790_791
    assert parameters(TransMil(1024, 2)) == 2_672_146
    assert parameters(GatedAttention(500, 128)) == 2 * (500 * 128 + 128) + 129


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("count", [1, 2, 5, 16, 17])
def test_every_head_gives_an_answer_and_attention(name, count):
    module, x = head(name, classes=3).eval(), features(count)
    assert module(x).shape == (1, 3)
    attention = module.attention(x).detach()
    assert attention.shape == (count,)
    if name != "transmil":
        assert (attention >= 0).all()
        assert float(attention.sum()) == pytest.approx(1)


@pytest.mark.parametrize("name", ["mean", "max", "abmil", "clam"])
def test_the_order_of_patches_does_not_count(name):
    module, x, order = head(name).eval(), features(9), torch.randperm(9)
    torch.testing.assert_close(module(x[order]), module(x))
    torch.testing.assert_close(module.attention(x[order]), module.attention(x)[order])


def test_pooling_is_a_linear_layer_of_the_mean_or_the_maximum():
    x = torch.tensor([[1.0, 5.0], [3.0, -1.0], [3.0, 2.0]])
    for kind, pooled, attention in (
        (MeanPool, [7 / 3, 2.0], [1 / 3] * 3),
        (MaxPool, [3.0, 5.0], [0.5, 0.25, 0.25]),
    ):
        module = kind(2, 4)
        torch.testing.assert_close(module(x)[0], module.classifier(torch.tensor(pooled)))
        torch.testing.assert_close(module.attention(x), torch.tensor(attention))


@pytest.mark.parametrize("width", [0, 5])
def test_gated_attention_is_equation_nine(width):
    module, x = AttentionPool(6, 2, width=width, hidden=4).double(), features(7)
    h = [module.embed(row) for row in x]
    v, u, w = module.scores.value, module.scores.gate, module.scores.score
    scores = [w.weight[0] @ (torch.tanh(v(each)) * torch.sigmoid(u(each))) + w.bias[0] for each in h]
    total = sum(torch.exp(each) for each in scores)
    weights = [torch.exp(each) / total for each in scores]
    pooled = torch.stack([a * each for a, each in zip(weights, h, strict=True)]).sum(0)
    torch.testing.assert_close(module.attention(x), torch.stack(weights))
    torch.testing.assert_close(module(x)[0], module.classifier(pooled))


def test_clam_in_eval_mode_is_attention_pooling_and_in_training_gives_chosen_patches_too():
    module, x = Clam(6, 3, width=5, hidden=4, k=2, dropout=0.0).double(), features(9)
    logits, instances = module(x)
    torch.testing.assert_close(module.eval()(x), logits)
    torch.testing.assert_close(module.pool(x), logits)
    ordered = module.attention(x).argsort(descending=True).tolist()
    chosen = ordered[:2] + ordered[:-3:-1]
    expected = torch.stack([each(module.pool.embed(x[chosen])) for each in module.instances])
    torch.testing.assert_close(instances, expected)
    assert instances.shape == (3, 4, 2)


def test_clam_takes_bags_of_fewer_patches_than_it_chooses():
    assert Clam(6, 2).double()(features(3))[1].shape == (2, 6, 2)


@pytest.mark.parametrize("subtyping", [False, True])
@pytest.mark.parametrize("label", [0, 2])
def test_the_loss_of_clam(subtyping, label):
    logits, instances = torch.randn(1, 3), torch.randn(3, 8, 2)
    found = gg.losses.clam((logits, instances), torch.tensor([label]), bag_weight=0.6, subtyping=subtyping)
    evidence, none = torch.ones(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    total = F.cross_entropy(instances[label], torch.cat([evidence, none]))
    if subtyping:
        others = [F.cross_entropy(instances[k, :4], none) for k in range(3) if k != label]
        total = (total + sum(others)) / 3
    torch.testing.assert_close(found, 0.6 * F.cross_entropy(logits, torch.tensor([label])) + 0.4 * total)


def test_iterations_reach_the_pseudo_inverse():
    a = torch.randn(3, 5, 5, dtype=torch.float64).softmax(2)
    torch.testing.assert_close(pseudo_inverse(a, 40), torch.linalg.pinv(a), rtol=1e-6, atol=1e-6)


def test_nystrom_attention_with_a_landmark_for_each_token_is_softmax_attention():
    module, x = NystromAttention(8, heads=2, landmarks=6, iterations=60).double().eval(), features(6, 8)
    q, k, v = (each.reshape(6, 2, 4).transpose(0, 1) for each in module.to_qkv(x).chunk(3, 1))
    exact = F.scaled_dot_product_attention(q, k, v) + module.residual(v[None])[0]
    torch.testing.assert_close(module(x), module.to_out(exact.transpose(0, 1).reshape(6, 8)))
    row = (q[:, 2:3] @ k.transpose(1, 2) / 2).softmax(2).mean((0, 1))
    torch.testing.assert_close(module.row(x, 2), row)


def test_nystrom_attention_fills_runs_with_zeros_in_front():
    module, x = NystromAttention(8, heads=2, landmarks=4).double().eval(), features(6, 8)
    filled = torch.cat([torch.zeros(2, 8, dtype=torch.float64), x])
    torch.testing.assert_close(module(x), module(filled)[2:])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(module(x), module(filled.roll(2, 0))[4:])


def test_position_encoding_adds_three_convolutions_of_the_square():
    module, x = PositionEncoding(4), torch.randn(10, 4)
    square = x[1:].T.reshape(1, 4, 3, 3)
    expected = square.clone()
    each: Any
    for side, each in zip((7, 5, 3), module.convolutions, strict=True):
        expected += F.conv2d(square, each.weight, each.bias, padding=side // 2, groups=4)
    torch.testing.assert_close(module(x), torch.cat([x[:1], expected.reshape(4, 9).T]))
    assert parameters(PositionEncoding(512)) == 512 * (49 + 25 + 9 + 3)


def test_transmil_fills_its_square_with_the_first_patches():
    module, x = head("transmil").eval(), features(6)
    torch.testing.assert_close(module(x), module(torch.cat([x, x[:3]])))
    all_nine = module.attention(torch.cat([x, x[:3]]))
    torch.testing.assert_close(module.attention(x), torch.cat([all_nine[:3] + all_nine[6:], all_nine[3:6]]))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("clam", {"k": 0}, "k of one or more"),
        ("transmil", {"width": 30}, "a width that its heads divide"),
        ("transmil", {"landmarks": 0}, "one landmark or more"),
    ],
)
def test_impossible_settings_are_told(name, settings, words):
    with pytest.raises(ValueError, match=words):
        HEADS[name](6, 2, **settings)
    with pytest.raises(ValueError, match="two classes or more"):
        Clam(6, 1)


class Encoder(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_an_encoder_that_is_frozen_stays_in_eval_mode():
    network: Any = BagNetwork(Encoder(), head("abmil").float())
    assert network.train().encoder.training
    network.encoder.requires_grad_(False)
    assert not network.train().encoder.training
    assert network.head.training
    x = torch.randn(4, 3, 8, 8)
    before = {name: tensor.clone() for name, tensor in network.encoder.state_dict().items()}
    network(x).sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.encoder.state_dict().items())
    network.encoder[0].bias.requires_grad_(True)
    assert network.train().encoder.training
    assert not network.eval().encoder.training


def test_an_encoder_that_gives_fields_is_told():
    network = BagNetwork(nn.Conv2d(3, 6, 3), head("mean").float())
    with pytest.raises(ModelError, match=r"gives \(4, 6, 6, 6\) for 4 patches"):
        network(torch.randn(4, 3, 8, 8))


def test_attention_of_a_bag_is_that_of_its_features():
    network, x = BagNetwork(Encoder(), head("abmil").float()).eval(), torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(network.attention(x), network.head.attention(network.encoder(x)))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_every_head_can_be_exported(name, training):
    module, x = head(name).train(training), features(7)
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize("name", ["abmil", "clam"])
def test_the_engine_captures_each_mode_once(name):
    model = BagNetwork(Encoder(), HEADS[name](6, 2, **SMALL.get(name, {})))
    engine = gg.compile(model, gg.losses.clam)
    captured: list[object] = []
    engine.events.subscribe(lambda event: captured.append(event) if "capture" in str(event) else None)
    bag, target = torch.rand(11, 3, 8, 8), torch.tensor([1])
    for _ in range(2):
        engine.backward(bag, target)
    known = len(captured)
    for _ in range(2):
        model.train()
        engine.backward(bag, target)
        model.eval()
        engine.forward(bag, target)
    assert 0 < known < len(captured) <= 2 * known


class WithoutGraph(nn.Module):
    """An encoder as people freeze one by hand."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    @torch.no_grad()
    def forward(self, x):
        return self.encoder(x)


ALL = [("abmil", training, frozen) for training in (False, True) for frozen in (False, True, "no_grad")]


@pytest.mark.parametrize(("name", "training", "frozen"), [*ALL, *((name, True, False) for name in HEADS)])
def test_the_engine_has_autograd_s_gradients(name, training, frozen):
    model = BagNetwork(Encoder(), head(name)).double()
    if frozen == "no_grad":
        model.encoder = WithoutGraph(model.encoder)
    else:
        model.encoder.requires_grad_(not frozen)
    model.train(training)
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    bag, target = torch.rand(11, 3, 8, 8, dtype=torch.float64), torch.tensor([1])
    buffers = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    loss = gg.losses.clam(model(bag), target)
    loss.backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.load_state_dict(buffers)
    engine = gg.compile(model, gg.losses.clam, tile=(3, 1))
    assert not [whole for whole in engine.plan(bag, target).whole_field if whole.module.startswith("encoder")]
    assert engine.backward(bag, target) == pytest.approx(loss.item(), abs=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mean", "max", "abmil", "clam"])
def test_features_of_all_patches_are_pooled_chunk_by_chunk(name):
    """No operator reads the features as a whole: memory would grow with the number of patches."""
    model = BagNetwork(Encoder(), HEADS[name](6, 2, **SMALL.get(name, {}))).eval()
    engine = gg.compile(model, F.cross_entropy)
    graph = engine.problem(torch.rand(300, 3, 8, 8), torch.tensor([1])).graph
    assert all(prod(node.shape) <= 300 for node in graph.nodes if node.op == GATHER)


class SeveralRows(nn.Module):
    """Pooling by several rows of attention, a row for each class."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.encoder, self.scores, self.classifier = Encoder(), nn.Linear(6, rows), nn.Linear(6 * rows, 2)

    def forward(self, x):
        features = self.encoder(x)
        return self.classifier((self.scores(features).softmax(0).T @ features).reshape(1, -1))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_each_row_of_attention_is_a_sum_over_patches(rows):
    model = SeveralRows(rows).double()
    bag, label = torch.rand(23, 3, 8, 8, dtype=torch.float64), torch.tensor([1])
    F.cross_entropy(model(bag), label).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    engine = gg.compile(model, F.cross_entropy, tile=(5, 1))
    engine.in_tiles = True
    graph = engine.problem(bag, label).graph
    assert all(prod(node.shape) <= 23 * rows for node in graph.nodes if node.op == GATHER)
    engine.backward(bag, label)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13)
