"""The losses of MONAI and of segmentation-models-pytorch, with ignored pixels and absent classes, against PyTorch."""

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.errors import CaptureError

importlib.import_module("gigagrad.models.torchvision_operators")
monai: Any
smp: Any

HEIGHT, WIDTH = 60, 70
IGNORED = 255
pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Loaded by the process that runs these tests, not by each that collects them: it takes seconds."""
    global monai, smp
    monai = pytest.importorskip("monai.losses")
    smp = pytest.importorskip("segmentation_models_pytorch.losses")


def made_targets():
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(1, HEIGHT, WIDTH, generator=generator).double()
    binary, ids = (share > 0.5).double(), torch.zeros(1, HEIGHT, WIDTH, dtype=torch.long)
    ids[share > 0.4] = 1
    ids[:, :20, :30] = 3  # class 2 is absent
    one_hot = F.one_hot(ids[0], 4).permute(2, 0, 1).double()
    mask = (torch.rand(1, HEIGHT, WIDTH, generator=generator) > 0.3).double()
    targets = {"binary": binary, "ids": ids, "one hot": one_hot, "share": share, "masked": torch.cat([binary, mask])}
    for name in ("binary", "ids", "one hot"):
        targets[f"{name}, ignored"] = targets[name].clone()
        targets[f"{name}, ignored"][:, 25:40] = IGNORED
    return targets


TARGETS = made_targets()


def flat(loss):
    """Of ids without an axis for channels."""
    return lambda output, target: loss(output, target[:, 0])


def masked(loss):
    return lambda output, target: loss(output, target[:, :-1], target[:, -1:])


MULTI = {"softmax": True, "to_onehot_y": True}
SOME_WEIGHTS = [1.0, 2.0, 3.0]
DISTANCES = 1 - torch.eye(4).double()
QUICK = {
    "Dice": (lambda: monai.DiceLoss(sigmoid=True), "binary"),
    "Dice, weights": (lambda: monai.DiceLoss(include_background=False, weight=SOME_WEIGHTS, **MULTI), "ids"),
    "DiceCE": (lambda: monai.DiceCELoss(weight=torch.arange(1, 5).double(), **MULTI), "ids"),
    "DiceFocal": (lambda: monai.DiceFocalLoss(**MULTI), "ids"),
    "GeneralizedDice": (lambda: monai.GeneralizedDiceLoss(**MULTI), "ids"),
    "Tversky": (lambda: monai.TverskyLoss(sigmoid=True), "binary"),
    "MaskedDice": (lambda: masked(monai.MaskedDiceLoss(sigmoid=True)), "masked"),
    "Focal": (lambda: monai.FocalLoss(use_softmax=True, to_onehot_y=True), "ids"),
    "MCC": (lambda: monai.MCCLoss(sigmoid=True), "binary"),
    "smp Dice, ignored": (lambda: flat(smp.DiceLoss("multiclass", ignore_index=IGNORED)), "ids, ignored"),
    "smp Jaccard": (lambda: smp.JaccardLoss("binary"), "binary"),
    "smp Tversky, ignored": (lambda: smp.TverskyLoss("binary", ignore_index=IGNORED), "binary, ignored"),
    "smp Focal": (lambda: flat(smp.FocalLoss("multiclass")), "ids"),
    "smp SoftBCE": (lambda: smp.SoftBCEWithLogitsLoss(ignore_index=IGNORED, smooth_factor=0.1), "binary, ignored"),
    "smp SoftCE": (lambda: flat(smp.SoftCrossEntropyLoss(smooth_factor=0.1, ignore_index=IGNORED)), "ids, ignored"),
}
SLOW = {
    "Dice, ids": (lambda: monai.DiceLoss(**MULTI), "ids"),
    "Dice, batch": (lambda: monai.DiceLoss(batch=True, reduction="sum", squared_pred=True, **MULTI), "ids"),
    "Dice, jaccard": (lambda: monai.DiceLoss(softmax=True, include_background=False, jaccard=True), "one hot"),
    "DiceCE, binary": (lambda: monai.DiceCELoss(sigmoid=True), "binary"),
    "DiceFocal, binary": (lambda: monai.DiceFocalLoss(sigmoid=True), "binary"),
    "GeneralizedDice, simple": (lambda: monai.GeneralizedDiceLoss(w_type="simple", **MULTI), "ids"),
    "GeneralizedDiceFocal": (lambda: monai.GeneralizedDiceFocalLoss(**MULTI), "ids"),
    "Wasserstein": (lambda: monai.GeneralizedWassersteinDiceLoss(DISTANCES), "ids"),
    "Tversky, ids": (lambda: monai.TverskyLoss(alpha=0.3, batch=True, **MULTI), "ids"),
    "Focal, weights": (lambda: monai.FocalLoss(alpha=0.3, weight=torch.arange(1, 5).double(), to_onehot_y=True), "ids"),
    "MCC, ids": (lambda: monai.MCCLoss(**MULTI), "ids"),
    "MaskedLoss": (lambda: masked(monai.MaskedLoss(monai.DiceLoss(sigmoid=True))), "masked"),
    "clDice": (lambda: monai.SoftDiceclDiceLoss(sigmoid=True), "binary"),
    "NACL": (lambda: flat(monai.NACLLoss(classes=4, dim=2)), "ids"),
    "MutualInformation": (lambda: monai.GlobalMutualInformationLoss(num_bins=8), "share"),
    "CrossCorrelation": (lambda: monai.LocalNormalizedCrossCorrelationLoss(spatial_dims=2), "share"),
    "Jukebox": (lambda: monai.JukeboxLoss(spatial_dims=2), "share"),
    "MultiScale": (lambda: monai.MultiScaleLoss(monai.DiceLoss(sigmoid=True), scales=[1, 2]), "binary"),
    "smp Dice, classes": (lambda: flat(smp.DiceLoss("multiclass", classes=[1, 3], log_loss=True)), "ids"),
    "smp Dice, labels": (lambda: smp.DiceLoss("multilabel", ignore_index=IGNORED), "one hot, ignored"),
    "smp Jaccard, ignored": (lambda: flat(smp.JaccardLoss("multiclass", ignore_index=IGNORED)), "ids, ignored"),
    "smp Focal, normalized": (lambda: smp.FocalLoss("multilabel", alpha=0.3, normalized=True), "one hot"),
    "smp MCC": (lambda: lambda output, target: smp.MCCLoss()(output.sigmoid(), target), "binary"),
}
BY_NAME = QUICK | SLOW
CHANNELS = {"ids": 4, "one hot": 4}
FLOAT32_INSIDE = dict.fromkeys(["Focal, weights", "DiceFocal", "DiceFocal, binary", "GeneralizedDiceFocal"], 1e-6)
"""Losses that are rounded to float32 whatever they are given."""


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_loss_and_gradients_are_pytorchs(name):
    make, kind = BY_NAME[name]
    torch.manual_seed(0)
    image, target, loss = torch.randn(2, HEIGHT, WIDTH).double(), TARGETS[kind], make()
    model = nn.Conv2d(2, CHANNELS.get(kind.partition(",")[0], 1), 3, padding=1).double()
    reference = copy.deepcopy(model)
    expected = loss(reference(image[None]), target[None])
    expected.backward()
    value = gg.compile(model, loss, tile=(48, 64)).backward(image, target)
    tolerance = FLOAT32_INSIDE.get(name, 1e-9)
    torch.testing.assert_close(value, expected.detach(), rtol=tolerance, atol=0)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= tolerance * theirs.grad.norm().clamp(min=1e-6)


REFUSED = {
    "Boundary": (lambda: monai.BoundaryLoss(sigmoid=True), "binary"),
    "Hausdorff": (lambda: monai.HausdorffDTLoss(sigmoid=True), "binary"),
    "AUCM": (lambda: monai.AUCMLoss(), "binary"),
    "smp Focal, ignored": (lambda: smp.FocalLoss("binary", ignore_index=IGNORED), "binary, ignored"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_at_the_values_of_pixels_says_so(name):
    make, kind = REFUSED[name]
    engine = gg.compile(nn.Conv2d(2, 1, 1).double(), make(), tile=(48, 64))
    with pytest.raises(CaptureError, match=r"losses.\w+\.py:\d+.*(are no values yet|depends on values)"):
        engine.backward(torch.randn(2, HEIGHT, WIDTH).double(), TARGETS[kind])
