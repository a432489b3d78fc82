"""Unmodified networks of segmentation-models-pytorch and timm, in evaluation mode, against whole-image autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from tests.exactness.comparison import compare

TOLERANCE = 1e-11
smp = pytest.importorskip("segmentation_models_pytorch")
timm = pytest.importorskip("timm")


def dice_and_bce(output, target):
    p = output.sigmoid()
    return F.binary_cross_entropy_with_logits(output, target) + 1 - 2 * (p * target).sum() / (p.sum() + target.sum())


def awake(model: nn.Module) -> nn.Module:
    """Running statistics and affine parameters away from 0 and 1, where mistakes would hide."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.1)
    return model.double().eval()


def check(model, loss, image, target, tile, device="cpu"):
    result = compare(model, loss, image, target, tile=tile, device=device)
    assert result.plan.tile_count > 1
    assert result.loss_error <= TOLERANCE
    assert result.gradient_error <= TOLERANCE, result.worst_parameter


SEGMENTATION = {
    "unet": lambda: smp.Unet("resnet18", encoder_weights=None),
    "deeplabv3+": lambda: smp.DeepLabV3Plus("resnet18", encoder_weights=None, decoder_channels=32),
}


@pytest.mark.parametrize("name", SEGMENTATION)
def test_segmentation_networks(name):
    """Tiles of 48 px: far smaller than what these networks see around a pixel."""
    model = awake(SEGMENTATION[name]())
    image, target = torch.rand(3, 96, 128, dtype=torch.float64), torch.rand(1, 96, 128, dtype=torch.float64)
    check(model, dice_and_bce if name == "unet" else F.binary_cross_entropy_with_logits, image, target, (48, 64))


TRUNKS = [
    "resnet18",
    "convnext_atto",
    "mobilenetv3_small_100",
    "regnetx_002",
]  # `make zoo` has a dozen, bench/zoo.py all


class Trunk(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.trunk = timm.create_model(name, features_only=True, pretrained=False, out_indices=(2,))

    def forward(self, x):
        return self.trunk(x)[0]


@pytest.mark.parametrize("name", TRUNKS)
def test_trunks_on_odd_sizes(name):
    """Features at a third scale; tiles of a few pixels of a field of stride 8 or 16."""
    model = awake(Trunk(name))
    image = torch.rand(3, 83, 59, dtype=torch.float64)
    with torch.no_grad():
        target = torch.rand(model(image[None]).shape[1:], dtype=torch.float64)
    check(model, F.mse_loss, image, target, (3, 2))


def test_a_classifier_on_a_whole_image():
    model = awake(timm.create_model("resnet18", num_classes=3, pretrained=False))
    check(model, F.cross_entropy, torch.rand(3, 91, 70, dtype=torch.float64), torch.tensor([2]), (2, 2))


def test_the_papers_network():
    model = awake(gg.models.resolve("paper-unet"))
    image = torch.randint(0, 256, (3, 173, 211), dtype=torch.uint8)
    target = torch.randint(0, 2, (1, 173, 211), dtype=torch.uint8)

    def bce(output, mask):
        return F.binary_cross_entropy_with_logits(output, mask.to(output.dtype))

    check(model, bce, image, target, (31, 40))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["unet", "deeplabv3+"])
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_on_a_gpu(name, home):
    """Whether the model lives there or only the tiles do."""
    model = awake(SEGMENTATION[name]()).to(home)
    image, target = torch.rand(3, 96, 128, dtype=torch.float64), torch.rand(1, 96, 128, dtype=torch.float64)
    check(model, F.binary_cross_entropy_with_logits, image.to(home), target.to(home), (48, 64), device="cuda")
