"""Features do not depend on how patches are put together, and stay within the memory that is named."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

from gigagrad.errors import BudgetError, ConfigError, ImageError, ModelError
from gigagrad.images.bag import ArrayBag
from gigagrad.prediction import Encoder
from gigagrad.units import parse_bytes
from tests.devices.apart import NAME
from tests.devices.fake import FakeCpu


class Net(nn.Module):
    """A small network of what encoders have: convolutions, a norm, attention among a patch's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16)
        self.act: nn.Module = nn.ReLU()
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        x_NCHW = self.act(self.norm(self.conv(x_NCHW.to(self.conv.weight.dtype) / 255)))
        features: torch.Tensor = self.block(x_NCHW.flatten(2).transpose(1, 2)).mean(1)
        return features


class Shape(nn.Module):
    """Something else than a row for each patch."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return x_NCHW.float().mean(self.axes)


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = Net()
    net(torch.rand(8, 3, 32, 32))  # running statistics of its own
    return net


@pytest.fixture
def bag():
    return ArrayBag(np.random.default_rng(0).integers(0, 256, (97, 3, 32, 32), np.uint8))


def features(encoder, bag, **changes):
    batches = dataclasses.replace(encoder.batches(bag), **changes)
    parts = list(encoder.features(bag, batches))
    assert [start for start, _ in parts] == list(range(0, len(bag), batches.size))
    return np.concatenate([part for _, part in parts])


def by_pytorch(net, bag):
    with torch.inference_mode():
        found = net.eval()(torch.as_tensor(np.asarray(bag.read(0, len(bag)))))
    return (found.float() if found.dtype == torch.bfloat16 else found).numpy()


@pytest.mark.parametrize("size", [1, 7, 64])
def test_features_are_pytorch_s_whatever_the_size_of_a_batch(net, bag, size):
    """Kernels add up in another order for another number of patches: only rounding may differ."""
    net = net.double()
    want = by_pytorch(net, bag)
    found = features(Encoder(net), bag, size=size)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, want, rtol=1e-10, atol=1e-12)


def test_features_of_single_precision_are_close(net, bag):
    want = by_pytorch(net, bag)
    for size in (1, 7, 64):
        found = features(Encoder(net), bag, size=size)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, want, atol=1e-5)


def test_features_have_the_same_bits_by_any_number_of_threads(net, bag):
    encoder = Encoder(net)
    one = features(encoder, bag, size=7, workers=1)
    for workers in (2, 3, 8):
        assert np.array_equal(features(encoder, bag, size=7, workers=workers), one)


def test_patches_that_may_not_be_written_to_and_tensors_are_read(net, bag):
    want = features(Encoder(net), bag)
    pixels = np.asarray(bag.read(0, 97)).copy()
    pixels.flags.writeable = False
    assert np.array_equal(features(Encoder(net), ArrayBag(pixels)), want)
    assert np.array_equal(features(Encoder(net), ArrayBag(torch.from_numpy(pixels.copy()))), want)


def test_half_precision_is_autocast_s(net, bag):
    found = features(Encoder(net, precision="bfloat16"), bag)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = by_pytorch(net, bag)
    assert found.dtype == np.float32
    assert not np.array_equal(found, features(Encoder(net), bag))
    np.testing.assert_allclose(found, want, atol=0.05)


def test_a_batch_is_read_once_and_no_gradient_is_kept(net, bag):
    seen = []

    class Counted(ArrayBag):
        def _read_inside(self, start, stop):
            seen.append((start, stop))
            return super()._read_inside(start, stop)

    counted = Counted(np.asarray(bag.read(0, 97)))
    encoder = Encoder(net)
    features(encoder, counted, size=32)
    assert sorted(seen) == [(0, 32), (32, 64), (64, 96), (96, 97)]
    assert not any(parameter.requires_grad for parameter in encoder.network.parameters())
    assert not encoder.network.training


def test_leaving_early_ends_the_threads(net, bag):
    before = {*threading.enumerate()}
    found = Encoder(net).features(bag, dataclasses.replace(Encoder(net).batches(bag), size=1, workers=2))
    next(found)
    found.close()
    left = {*threading.enumerate()} - before
    assert {thread.name for thread in left} <= {"gigagrad-memory"}, "that waits for the next step"


def test_a_bag_that_cannot_be_read_says_so(net):
    class Damaged(ArrayBag):
        def _read_inside(self, start, stop):
            raise ImageError("damaged there")

    with pytest.raises(ImageError, match="damaged there"):
        list(Encoder(net).features(Damaged(np.zeros((4, 3, 32, 32), np.uint8))))


def test_another_precision_is_refused(net):
    with pytest.raises(ConfigError, match="unknown precision 'float8'; use one of bfloat16, float16, or None"):
        Encoder(net, precision="float8")


@pytest.mark.parametrize(
    ("net", "told"),
    [
        (Shape(2), r"makes \(1, 3, 32\) of 1 patches; expected one row for each, \(N, D\)"),
        (Shape(0, 1), r"makes \(32, 32\) of 1 patches"),
        (nn.Conv2d(5, 2, 1), r"does not take patches \(3, 32, 32\): RuntimeError"),
    ],
)
def test_what_makes_no_row_of_each_patch_is_refused(net, told, bag):
    with pytest.raises(ModelError, match=told):
        Encoder(net).length(bag)


def test_batches_become_smaller_before_fewer_are_computed_side_by_side(bag):
    net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    bag = ArrayBag(np.broadcast_to(np.float32(0), (100, 3, 512, 512)))
    most = Encoder(net, device=FakeCpu()).batches(bag)
    assert most.size == 16
    tight = Encoder(net, memory=most.predicted_peak_bytes - most.tile_bytes // 2, device=FakeCpu()).batches(bag)
    assert tight.workers == most.workers
    assert 1 <= tight.size < 16
    assert tight.predicted_peak_bytes < most.predicted_peak_bytes
    with pytest.raises(BudgetError, match=r"cannot be encoded one by one.*smallest budget that works") as refused:
        Encoder(net, memory="64 MiB", device=FakeCpu()).batches(bag)
    assert Encoder(net, memory=refused.value.smallest_bytes, device=FakeCpu()).batches(bag).size == 1


def test_the_digest_follows_from_functions_that_are_settings():
    """As the activation of PyTorch's own transformer, by which other features were taken for these."""
    digests = []
    for activation in (torch.tanh, torch.sin, torch.nn.functional.silu, torch.nn.functional.mish):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 8, activation=activation)
        digests.append(Encoder(layer).digest)
    assert len(set(digests)) == len(digests)


def test_the_digest_follows_from_weights_and_settings(net):
    digest = Encoder(net).digest
    torch.manual_seed(0)
    again = Net()
    again.load_state_dict(net.state_dict())
    assert Encoder(again).digest == digest
    assert Encoder(again, precision="bfloat16").digest != digest
    again.act = nn.GELU()
    assert Encoder(again).digest != digest
    again.act = nn.ReLU()
    assert Encoder(again).digest == digest
    again.norm.eps = 1e-3
    assert Encoder(again).digest != digest
    again.norm.eps = net.norm.eps
    again.state_dict()["norm.running_mean"][3] += 1e-6
    assert Encoder(again).digest != digest


_BUDGET = """
import json, sys
import numpy as np
import torch
from torch import nn
from gigagrad.devices.heap import peak_resident_bytes
from gigagrad.images.bag import ArrayBag
from gigagrad.models import Normalise
from gigagrad.prediction import Encoder

def layers(i, o, stride=1):
    return nn.Conv2d(i, o, 3, stride, 1), nn.BatchNorm2d(o), nn.ReLU()

class Made(ArrayBag):
    def _read_inside(self, start, stop):
        return np.random.default_rng(start).integers(0, 256, (stop - start, *self.shape[1:]), np.uint8)

net = nn.Sequential(Normalise(), *layers(3, 64, 2), *layers(64, 64), *layers(64, 128, 2), *layers(128, 128),
                    nn.AdaptiveAvgPool2d(1), nn.Flatten())
bag = Made(np.broadcast_to(np.uint8(0), (int(sys.argv[2]), 3, 128, 128)))
encoder = Encoder(net, memory=sys.argv[1])
batches = encoder.batches(bag)
for _ in encoder.features(bag, batches):
    pass
print(json.dumps([batches.size, peak_resident_bytes(), batches.predicted_peak_bytes]))
"""


@pytest.mark.parametrize(("memory", "patches"), [("1 GiB", 100), ("430 MiB", 50), ("480 MiB", 50)])
def test_the_process_stays_below_prediction_and_budget(memory, patches):
    command = [sys.executable, "-W", "ignore", "-c", _BUDGET, memory, str(patches)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size, measured, predicted = json.loads(done.stdout.splitlines()[-1])
    assert measured <= predicted <= parse_bytes(memory)
    assert (size == 16) == (memory == "1 GiB")


def test_a_device_of_its_own_computes_one_batch_at_a_time(bag):
    """On the simulated device a tensor that was not brought there raises."""
    at_work = threading.Lock()

    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x_NCHW):
            assert at_work.acquire(blocking=False)
            try:
                return self.layer(x_NCHW.float().mean((2, 3)))
            finally:
                at_work.release()

    torch.manual_seed(0)
    net = Alone()
    want = by_pytorch(net, bag)
    encoder = Encoder(net, device=NAME)
    assert encoder.batches(bag).size == 128
    np.testing.assert_allclose(features(encoder, bag, size=7, workers=4), want, rtol=1e-5)
