"""Linear layers by oneDNN are PyTorch's but for rounding, and nothing else goes there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.images.bag import ArrayBag
from gigagrad.prediction import Encoder, encoding
from gigagrad.prediction.encoding import LinearByOneDnn, onednn_is_faster

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the inputs of oneDNN's layers."""
    shapes, by_onednn = [], torch.ops.mkldnn._linear_pointwise

    def counted(x, *others):
        shapes.append(tuple(x.shape))
        return by_onednn(x, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    return shapes


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 5, 8), (2, 3, 4, 8), (0, 8)])
def test_layers_are_pytorch_s(shape, bias, calls):
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 5, bias=bias), torch.rand(shape)
    with torch.no_grad():
        want = layer(x)
        with LinearByOneDnn():
            torch.testing.assert_close(layer(x), want)
    assert calls == [shape]


def test_other_numbers_and_layouts_stay_as_they_are(calls):
    torch.manual_seed(0)
    weight, x = torch.rand(5, 8), torch.rand(6, 4, 8).transpose(0, 1)
    with torch.no_grad(), LinearByOneDnn():
        assert torch.equal(F.linear(x.double(), weight.double()), x.double() @ weight.double().T)
        assert F.linear(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
        assert calls == []
        torch.testing.assert_close(F.linear(x, weight), x @ weight.T)
    assert calls == [(4, 6, 8)]


@pytest.mark.parametrize(("vendor", "capability", "faster"), [
    ("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False),
])  # fmt: skip
def test_it_is_faster_where_mkl_takes_half_vectors(vendor, capability, faster, monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(encoding, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert onednn_is_faster.__wrapped__() is faster
    monkeypatch.setattr(encoding, "_CPUINFO", tmp_path / "none")
    assert onednn_is_faster.__wrapped__() is False


@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_encoders_have_their_features_by_it(precision, calls, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 7), nn.GELU(), nn.Linear(7, 3))
    bag = ArrayBag(np.random.default_rng(0).random((9, 3, 4, 4), np.float32))
    monkeypatch.setattr(encoding, "onednn_is_faster", lambda: False)
    want = np.concatenate([found for _, found in Encoder(net, precision=precision).features(bag)])
    assert calls == []
    monkeypatch.setattr(encoding, "onednn_is_faster", lambda: True)
    found = np.concatenate([found for _, found in Encoder(net, precision=precision).features(bag)])
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    assert calls == ([(9, 48), (9, 7)] if precision is None else [])
