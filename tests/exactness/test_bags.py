"""Bags of patches against plain autograd on all of them at once: encoders, heads, chunks, patches cut from images."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gigagrad as gg
from tests.exactness.comparison import compare

TOLERANCE = 1e-10
SIDE = 16


class Tokens(nn.Module):
    """A transformer over the tokens of a patch, with a class token and embedded positions."""

    def __init__(self, side: int, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, (side // 4) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, 3, 2 * width, dropout=0.0, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        tokens: Tensor = self.layers(x)
        return tokens[:, 0]


class Windows(nn.Module):
    """Attention in windows of a patch, whose products count windows instead of patches."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Conv2d(3, width, 2, 2), nn.Linear(width, 3 * width)
        self.bias = nn.Parameter(torch.randn(1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.roll(self.embed(x).permute(0, 2, 3, 1), (-1, 1), (1, 2))
        n, height, width, channels = x.shape
        x = x.view(n, height // 4, 4, width // 4, 4, channels).transpose(2, 3).reshape(-1, 16, channels)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 3 + self.bias, -1) @ v
        return x.view(n, -1, channels).mean(1)


ENCODERS = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, 2, 1, groups=4),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ),
    "batch norms": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 12, 3, 2, 1),
        nn.BatchNorm2d(12),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(12),
    ),
    "transformer": lambda: Tokens(SIDE),
    "windows": lambda: Windows(),
}


class Attention(nn.Module):
    """Gated attention over the patches (Ilse et al., 2018, equation 9)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.v, self.u, self.w = nn.Linear(width, 8), nn.Linear(width, 8), nn.Linear(8, 1)

    def forward(self, features: Tensor) -> Tensor:
        scores = self.w(torch.tanh(self.v(features)) * torch.sigmoid(self.u(features)))
        return torch.softmax(scores, 0).T @ features


class Mixed(nn.Module):
    """A transformer over the patches, one token each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, features: Tensor) -> Tensor:
        mixed: Tensor = self.layer(features[None])
        return mixed.mean(1)


class Mean(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features.mean(0, keepdim=True)


class Largest(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features.amax(0, keepdim=True)


class Likeliest(nn.Module):
    """The three patches that score highest."""

    def forward(self, features: Tensor) -> Tensor:
        return features[features[:, 0].topk(3).indices].mean(0, keepdim=True)


HEADS = {
    "attention": Attention,
    "transformer": Mixed,
    "mean": lambda width: Mean(),
    "max": lambda width: Largest(),
    "top-k": lambda width: Likeliest(),
}


class Model(nn.Module):
    def __init__(self, encoder: nn.Module, head: nn.Module, width: int = 12) -> None:
        super().__init__()
        self.encoder, self.head, self.classifier = encoder, head, nn.Linear(width, 2)

    def forward(self, bag: Tensor) -> Tensor:
        features = self.encoder(bag.to(self.classifier.weight.dtype) / 255)
        scores: Tensor = self.classifier(self.head(features))
        return scores


def model_of(encoder: str, head: str, *, training: bool) -> nn.Module:
    torch.manual_seed(0)
    return Model(ENCODERS[encoder](), HEADS[head](12)).double().train(training)


def bag_of(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def check(model, image, tile):
    result = compare(model, F.cross_entropy, image, torch.tensor([1]), tile=tile)
    assert result.loss_error <= TOLERANCE
    assert result.gradient_error <= TOLERANCE, result.worst_parameter
    assert result.buffer_error <= TOLERANCE
    return result.plan


PAIRS = [(encoder, head, True) for encoder in ENCODERS for head in ("attention", "top-k")]
PAIRS += [("convolutions", head, True) for head in ("transformer", "mean", "max")]


@pytest.mark.parametrize(("encoder", "head", "training"), [*PAIRS, *((one, "attention", False) for one in ENCODERS)])
def test_encoders_and_heads(encoder, head, training):
    """`bench/bag_exactness.py` has sixty, with encoders of timm."""
    plan = check(model_of(encoder, head, training=training), bag_of(19), (7, 1))
    assert plan.tile_count > 3
    of_encoder = [whole for whole in plan.whole_field if whole.module.startswith("encoder")]
    assert not of_encoder


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("count", [2, 37])
def test_chunks_of_a_bag(count, chunk):
    check(model_of("batch norms", "attention", training=True), bag_of(count), (chunk, 1))


class Cut(nn.Module):
    """Cuts its image into patches first."""

    def __init__(self, model: nn.Module, how: str) -> None:
        super().__init__()
        self.model, self.how = model, how

    def forward(self, image: Tensor) -> Tensor:
        n, channels, height, width = image.shape
        if self.how == "reshape":
            blocks = image.reshape(n, channels, height // SIDE, SIDE, width // SIDE, SIDE)
            patches = blocks.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels, SIDE, SIDE)
        elif self.how == "unfold":
            windows = image.unfold(2, SIDE, SIDE // 2).unfold(3, SIDE, SIDE // 2)
            patches = windows.permute(0, 2, 3, 1, 4, 5).contiguous().view(-1, channels, SIDE, SIDE)
        else:
            columns = F.unfold(image.to(torch.float64), SIDE, stride=SIDE)
            patches = columns.transpose(1, 2).reshape(-1, channels, SIDE, SIDE)
        scores: Tensor = self.model(patches)
        return scores


@pytest.mark.parametrize("how", ["reshape", "unfold", "columns"])
@pytest.mark.parametrize("encoder", ["batch norms", "transformer"])
def test_patches_cut_from_an_image(encoder, how):
    image = torch.randint(0, 256, (3, 4 * SIDE, 5 * SIDE), dtype=torch.uint8)
    plan = check(Cut(model_of(encoder, "attention", training=True), how), image, (2, 3))
    assert plan.tile_count > 3


def test_the_gradient_of_the_patches():
    model, bag = model_of("convolutions", "attention", training=True), bag_of(11).double().requires_grad_()
    engine = gg.compile(model, F.cross_entropy, tile=(3, 1))
    engine.backward(bag, torch.tensor([0]))
    assert bag.grad is not None
    whole = bag.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(F.cross_entropy(model(whole), torch.tensor([0])), whole)
    assert (bag.grad - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


def test_scores_of_each_patch():
    model, bag = ENCODERS["convolutions"]().double().eval(), bag_of(11).double()
    engine = gg.compile(model, tile=(4, 1))
    found = engine.forward(bag)
    with torch.no_grad():
        assert torch.allclose(found, model(bag), rtol=0, atol=1e-12)


def test_dropout_is_drawn_by_the_place_of_a_patch():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 12), nn.Dropout(0.5))
    model = Model(encoder, Attention(12)).double()
    bag, label = bag_of(11), torch.tensor([1])
    losses = []
    for chunk in (1, 4, 11):
        engine = gg.compile(model, F.cross_entropy, tile=(chunk, 1), seed=3)
        losses.append(engine.backward(bag, label))
    assert max(losses) - min(losses) <= 1e-12
    model.eval()
    assert abs(F.cross_entropy(model(bag), label) - losses[0]) > 1e-3
