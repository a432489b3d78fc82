"""Training-mode norms, global and whole-field operators against plain autograd, in float64 with many tiles."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from tests.exactness.comparison import compare
from tests.exactness.normed import Residual, dice

TOLERANCE = 1e-9
HEIGHT, WIDTH = 45, 53


def bce(output, target):
    return F.binary_cross_entropy_with_logits(output, target)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    image = torch.randn(3, HEIGHT, WIDTH, dtype=torch.float64)
    return image, (torch.rand(1, HEIGHT, WIDTH) > 0.5).double()


def check(model, loss, pair, tile=(20, 17)):
    """Loss, gradients and buffers; returns the plan."""
    model = model.double().train()
    result = compare(model, loss, *pair, tile=tile)
    assert result.loss_error <= TOLERANCE
    assert result.gradient_error <= TOLERANCE, result.worst_parameter
    assert result.buffer_error <= TOLERANCE
    assert result.plan.tile_count > 1
    return result.plan


def between(layer):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer, nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))


NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, not affine": lambda: nn.BatchNorm2d(8, affine=False, momentum=0.3),
    "batch, nothing tracked": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "group": lambda: nn.GroupNorm(2, 8),
    "group of one": lambda: nn.GroupNorm(1, 8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "instance, tracked": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "layer, over space": lambda: nn.LayerNorm([8, HEIGHT, WIDTH]),
    "twice": lambda: nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)),
}


@pytest.mark.parametrize("loss", [bce, dice])
@pytest.mark.parametrize("name", NORMS)
def test_norms_in_training_mode(name, loss, pair):
    plan = check(between(NORMS[name]()), loss, pair)
    assert not plan.whole_field


def test_layer_norm_over_channels(pair):
    class Norm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    assert not check(between(Norm(8)), bce, pair).whole_field


class Gate(nn.Module):
    """Squeeze-and-excitation after a norm, with any pooling."""

    def __init__(self, pool):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.gate, self.head = pool, nn.Conv2d(8, 8, 1), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        gate = self.gate(self.pool(x)).sigmoid()
        if gate.shape[-1] > 1:
            gate = F.interpolate(gate, size=x.shape[-2:], mode="bilinear")
        return self.head(x * gate)


@pytest.mark.parametrize("size", [1, (3, 4), (7, 5)])
@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])
def test_pooling_of_the_whole_image(pool, size, pair):
    plan = check(Gate(pool(size)), bce, pair)
    assert bool(plan.whole_field) == (pool is nn.AdaptiveMaxPool2d and size != 1)


def test_the_first_of_equal_maxima_gets_the_gradient(pair):
    image, target = pair
    check(Gate(nn.AdaptiveMaxPool2d(1)), bce, (image.round(), target))


class Through(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        return self.head(self.function(self.stem(x)))


def attention(x):
    tokens = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens, tokens).transpose(1, 2).reshape(x.shape)


def attention_pooling(x):
    return x * (x.flatten(2).softmax(-1) * x.flatten(2)).sum(-1)[..., None, None]


def unpooled(x):
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y, indices, 2, output_size=x.shape[-2:])  # type: ignore[arg-type]


def sampled(x):
    return F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh() * 0.5, align_corners=False)


STATISTICS = {
    "deviation": lambda x: x / x.std((2, 3), keepdim=True),
    "variance of everything": lambda x: x - x.var(),
    "largest": lambda x: x / x.amax((2, 3), keepdim=True),
    "largest of everything": lambda x: x - x.max(),
    "smallest": lambda x: x * x.amin(dim=(-1, -2), keepdim=True),
    "by hand": lambda x: (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True, correction=0) + 1e-5).sqrt(),
}
STATISTICS["deviation of a constant"] = lambda x: x + (x * 0 + x.mean((2, 3), keepdim=True)).std((2, 3), keepdim=True)
WHOLE = {
    "attention": attention,
    "attention pooling": attention_pooling,
    "fourier": lambda x: torch.fft.ifft2(torch.fft.fft2(x) * 2).real,
    "mean of rows": lambda x: x * x.mean(3, keepdim=True),
    "gram matrix": lambda x: torch.einsum("bchw,bdhw->bcd", x, x).mean(-1)[..., None, None] * x / 1000,
    "turned": lambda x: x.flip(3) + x,
    "rolled": lambda x: torch.roll(x, (3, 2), (2, 3)),
    "unpooled": unpooled,
    "sampled": sampled,
    "as strided": lambda x: x + x.permute(0, 2, 3, 1).as_strided((1, 1, HEIGHT, WIDTH), (1, 1, WIDTH, 1), 5),
    "largest few": lambda x: x * x.flatten(2).topk(5, -1)[0].mean(-1)[..., None, None],
    "unfolded": lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1) / 9,
    "turned, then coarse": lambda x: F.interpolate(F.avg_pool2d(x.flip(2), 2), size=x.shape[-2:]),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_stream(name, pair):
    assert not check(Through(STATISTICS[name]), bce, pair).whole_field


@pytest.mark.parametrize("name", WHOLE)
def test_what_has_no_tile_rule_runs_whole(name, pair):
    assert check(Through(WHOLE[name]), bce, pair).whole_field


def test_weight_and_spectral_norm(pair):
    wrap = torch.nn.utils.parametrizations
    model = nn.Sequential(
        wrap.spectral_norm(nn.Conv2d(3, 8, 3, padding=1)), nn.ReLU(), wrap.weight_norm(nn.Conv2d(8, 1, 1))
    )
    check(model, bce, pair)


def test_an_auxiliary_head(pair):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.fine, self.coarse = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 1, 3, stride=4, padding=1)

        def forward(self, x):
            x = self.norm(self.stem(x)).relu()
            return {"out": self.fine(x), "aux": F.interpolate(self.coarse(x), size=x.shape[-2:], mode="bilinear")}

    check(Two(), lambda o, t: bce(o["out"], t) + 0.4 * dice(o["aux"], t), pair)


LATE = {
    "a factor": lambda o, t: F.mse_loss(o, t) * o.detach().flatten().median(),
    "a summand": lambda o, t: F.mse_loss(o, t).log() + o.detach().flatten().median(),
}


@pytest.mark.parametrize("name", LATE)
def test_a_loss_that_waits_for_a_whole_field_of_its_last_segment(name, pair):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    assert check(model, LATE[name], pair).whole_field


@pytest.mark.parametrize("start", [None, torch.zeros(1, dtype=torch.float64)], ids=["none", "another shape"])
def test_a_buffer_that_is_replaced_when_a_new_size_is_seen(pair, start):
    class Ramp(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 3, padding=1)
            self.register_buffer("ramp", start)

        def forward(self, x):
            if self.ramp is None or self.ramp.shape[-1] != x.shape[-1]:  # type: ignore[has-type]
                self.ramp = torch.arange(x.shape[-1], dtype=x.dtype)
            return self.conv(x) * self.ramp

    model = Ramp().double()
    check(model, bce, pair)
    engine = gg.compile(model, bce, tile=(20, 17))
    for _ in range(2):  # the second capture finds the buffer as the first run left it
        engine.backward(*pair)
        assert torch.equal(model.ramp, torch.arange(WIDTH, dtype=torch.float64))


def test_a_buffer_that_takes_a_whole_field(pair):
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 3, padding=1)
            self.register_buffer("last", torch.zeros(1, 1, HEIGHT, WIDTH))

        def forward(self, x):
            y = self.conv(x)
            self.last.copy_(y.detach())  # type: ignore[operator]
            return y

    check(Memory(), F.mse_loss, pair)


def test_class_weights_from_the_image(pair):
    def loss(output, target):
        positive = target.mean()
        return F.binary_cross_entropy_with_logits(output, target, pos_weight=(1 - positive) / positive)

    check(between(nn.BatchNorm2d(8)), loss, pair)


def test_a_long_residual_chain(pair):
    check(Residual(6), bce, pair)


def test_the_cases_in_which_a_peer_goes_wrong(pair):
    """lightstream 1.0.7 fails on BatchNorm's own parameters, on linear layers, on transposed convolutions and on U-Nets
    of two levels; here they are in one network."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 6), (6, 8), (8, 12)))
            self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (6, 8, 12))
            self.mix = nn.Linear(12, 12)
            self.up_b, self.up_a = nn.ConvTranspose2d(12, 8, 2, 2), nn.ConvTranspose2d(16, 6, 3, 2, 1)
            self.head = nn.Conv2d(12, 1, 1)

        def forward(self, x):
            a = self.norms[0](self.a(x)).relu()
            b = self.norms[1](self.b(F.max_pool2d(a, 2, ceil_mode=True))).relu()
            c = self.norms[2](self.c(F.max_pool2d(b, 2, ceil_mode=True))).relu()
            c = self.mix(c.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            b = torch.cat([b, self.up_b(c)[..., : b.shape[-2], : b.shape[-1]]], 1)
            up = self.up_a(b)[..., : a.shape[-2], : a.shape[-1]]
            return self.head(torch.cat([a, up], 1))

    assert not check(Net(), bce, pair).whole_field


def test_background_does_not_hide_the_incoming_gradient(pair):
    """A peer caches what blank tiles give, and with it ignores the cotangent that comes in."""
    image, target = pair
    image[:, :, 20:] = 1.0
    check(between(nn.BatchNorm2d(8)), lambda o, t: (o * t).sum() + dice(o, t), (image, target), tile=(8, 8))


def test_frozen_parts_need_no_work(pair):
    model = Residual(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    check(model, bce, pair)


def test_tied_parameters(pair):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 1, 1)
            self.block, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
            self.again = self.block

        def forward(self, x):
            x = self.norm(self.block(self.stem(x))).relu()
            return self.head(self.norm(self.again(x)).relu())

    check(Tied(), bce, pair)


def test_a_classifier(pair):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8)
            self.layer, self.out = nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.layer(self.norm(self.stem(x)).relu().mean((2, 3))))

    check(Classifier(), F.cross_entropy, (pair[0], torch.tensor([2])), tile=(10, 10))
