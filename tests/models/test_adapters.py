"""Low-rank adapters of an encoder: what is trained, where weights come from, and exact gradients."""

from typing import Any

import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.errors import ModelError
from gigagrad.models import load_model, load_weights_into, resolve, save_model

pytest.importorskip("timm")
VIT = "mil:encoder=timm:vit_tiny_patch16_224&encoder.img_size=32&encoder.depth=2&head=mean&classes=2"
BAG = torch.randint(0, 255, (5, 3, 32, 32), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _installed():
    pytest.importorskip("peft")
    torch.manual_seed(0)


def trained(model):
    return {name for name, parameter in model.network.encoder.named_parameters() if parameter.requires_grad}


def moved(model):
    """Gives the adapters an effect, which they begin without."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ("", {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}),
        ("&lora.targets=*.qkv", {"attn.qkv"}),
        ("&lora.targets=blocks.?.mlp,*.qkv", {"attn.qkv", "mlp.fc1", "mlp.fc2"}),
    ],
)
def test_only_adapters_are_trained_and_they_begin_as_nothing(settings, layers):
    model: Any = resolve(f"{VIT}&lora=4&lora.alpha=8{settings}")
    names = {f"blocks.{n}.{layer}.lora_{side}.default.weight" for n in (0, 1) for layer in layers for side in "AB"}
    assert trained(model) == names
    assert all(parameter.requires_grad for parameter in model.network.head.parameters())
    qkv = model.network.encoder.blocks[0].attn.qkv
    assert qkv.lora_A["default"].weight.shape == (4, 192)
    assert qkv.scaling["default"] == 2
    plain: Any = resolve(VIT)
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    plain.load_state_dict({name: tensor for name, tensor in state.items() if "lora_" not in name})
    torch.testing.assert_close(model.eval()(BAG), plain.eval()(BAG))
    assert not torch.equal(moved(model)(BAG), plain(BAG))
    assert model.train().network.encoder.training  # parts of it are trained


def test_convolutions_have_adapters_where_they_are_named():
    with pytest.raises(ModelError, match=r"no linear layer; name others, as in lora.targets=conv1\.0"):
        resolve("mil:encoder=timm:resnet10t&lora=2")
    model = resolve("mil:encoder=timm:resnet10t&lora=2&lora.targets=layer4")
    assert all(name.startswith("layer4.") for name in trained(model))
    assert model(BAG).shape == (1, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("lora=0", "from 1 on, got 0"),
        ("lora.alpha=3", "of no adapters; give their rank, as in lora=8"),
        ("lora=4&lora.alhpa=3", "did you mean 'alpha'"),
        ("lora=4&lora.alpha=much", "cannot build model"),
        ("lora=4&lora.targets=*.qvk", "no layer of the encoder matches '*.qvk'"),
        ("lora=4&lora.targets=3", "cannot build model"),
    ],
)
def test_a_mistake_gets_one_clear_line(settings, words):
    with pytest.raises(ModelError) as caught:
        resolve(f"{VIT}&{settings}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_come_from_a_file_without_adapters_and_from_one_with(tmp_path):
    source: Any = resolve(VIT)
    torch.save(source.network.encoder.state_dict(), tmp_path / "encoder.pt")
    model: Any = resolve(f"{VIT}&lora=4")
    report = load_weights_into(model, tmp_path / "encoder.pt")
    assert not report.unexpected
    assert all("lora_" in name or name.startswith("network.head.") for name in report.missing)
    qkv = model.network.encoder.blocks[1].attn.qkv.base_layer.weight
    assert torch.equal(qkv, source.network.encoder.blocks[1].attn.qkv.weight)
    save_model(tmp_path / "best.pt", f"{VIT}&lora=4", moved(model))
    torch.testing.assert_close(load_model(tmp_path / "best.pt")[1](BAG), model.eval()(BAG))
    assert load_weights_into(resolve(f"{VIT}&lora=4"), tmp_path / "best.pt").complete


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'gigagrad\[lora\]'"):
        resolve(f"{VIT}&lora=4")


def test_the_engine_has_autograd_s_gradients_and_captures_once():
    model = moved(resolve(f"{VIT}&lora=4")).double()
    target = torch.tensor([1])
    loss = gg.losses.ce(model(BAG), target)
    loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    engine = gg.compile(model, gg.losses.ce, tile=(2, 1))
    for _ in range(2):
        model.zero_grad()
        assert engine.backward(BAG, target) == pytest.approx(float(loss.detach()), abs=1e-12)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
