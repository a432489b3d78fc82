"""Which models `bench/zoo.py` tries: published networks, of each family the smallest variant.

A model is named `suite/family/variant`; `variant` may carry settings (`?depth=2`) that make a very large one small by
repeating its block less often. All have random weights. Images are tried at the sizes listed, in that order: most
networks run at 96 x 128 px, others only at the size they were published for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gigagrad.models.torchvision_operators  # noqa: F401

CLASSES = 4
SIZES = ((96, 128), (128, 128), (224, 224), (256, 256), (320, 320))
SUITES = {
    "timm": "timm",
    "smp": "segmentation_models_pytorch",
    "torchvision": "torchvision",
    "monai": "monai",
}
"""Suites in the order in which they are tried, and the package each needs."""


@dataclass(frozen=True)
class Subject:
    """A model to try. `dense`: its target is a mask of the image's size, else a class label."""

    name: str
    build: Callable[[], nn.Module]
    dense: bool
    sizes: tuple[tuple[int, int], ...] = SIZES

    @property
    def suite(self) -> str:
        return self.name.split("/", 1)[0]


# The fewest parameters in each family of timm 1.0.31, without its own test networks, distilled twins and ports.
# Families that are missing here are counted when asked for.
_TIMM = """
beit_base_patch16_224?depth=2 halonet_h1 mobileone_s1 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32
convnext_zepto_rms cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny
deepseek_vit_412m?depth=2 deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small efficientformer_l1
efficientformerv2_s0 mobilenetv2_035 efficientvim_m1 efficientvit_b0 efficientvit_m0 vit_tiny_patch16_dinov3_qkvb
fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m?depth=2 ghostnet_050 hardcorenas_b hgnetv2_b0
hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3
inception_v4 lcnetv2_small levit_128s lowformer_b0 mambaout_femto maxvit_pico_rw_256 poolformerv2_s12 gmlp_ti16_224
lcnet_035 mobilenetv5_base mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_gap?depth=2
nasnetalarge nest_tiny nextvit_small nf_regnet_b0 pit_ti_224 pnasnet5large pvt_v2_b0
qwen3_vit_88m?depth=2 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d resnet10t resnetv2_18
rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224
tresnet_m twins_svt_small vgg11_bn visformer_tiny vit_tiny_patch16_224 vit_tiny_r_s16_p8_224
vit_srelpos_small_patch16_224 samvit_base_patch16_224?depth=2 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw
legacy_xception xception41p xcit_nano_12_p8_224
""".split()

_SMP_ENCODERS = ("resnet34", "efficientnet-b0", "mit_b0")
_SMP_WITHOUT_MIT = ("unetplusplus", "linknet")
_DPT_ENCODERS = ("tu-vit_tiny_patch16_224", "tu-deit_tiny_patch16_224")

_TORCHVISION = """
alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
mobilenet_v2 mobilenet_v3_small regnet_x_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t
swin_v2_t vgg11 vit_b_16 deeplabv3_mobilenet_v3_large deeplabv3_resnet50 fcn_resnet50 lraspp_mobilenet_v3_large
""".split()
_TORCHVISION_DENSE = ("deeplabv3", "fcn", "lraspp")

_CHANNELS: dict[str, Any] = {"in_channels": 3, "out_channels": 2}
_PYRAMID: dict[str, Any] = {"channels": (8, 16, 32), "strides": (2, 2)}
_KERNELS: dict[str, Any] = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2)}
_MONAI: dict[str, dict[str, Any]] = {
    "UNet": {"spatial_dims": 2, **_CHANNELS, **_PYRAMID, "num_res_units": 2},
    "AttentionUnet": {"spatial_dims": 2, **_CHANNELS, **_PYRAMID},
    "AutoEncoder": {"spatial_dims": 2, **_CHANNELS, "channels": (8, 16, 32), "strides": (2, 2, 2)},
    "BasicUNet": {"spatial_dims": 2, **_CHANNELS, "features": (8, 8, 16, 32, 64, 8)},
    "BasicUNetPlusPlus": {"spatial_dims": 2, **_CHANNELS, "features": (8, 8, 16, 32, 64, 8), "deep_supervision": True},
    "DynUNet": {"spatial_dims": 2, **_CHANNELS, **_KERNELS},
    "FlexibleUNet": {**_CHANNELS, "backbone": "efficientnet-b0"},
    "SegResNet": {"spatial_dims": 2, **_CHANNELS},
    "SegResNetDS": {"spatial_dims": 2, **_CHANNELS, "init_filters": 8, "dsdepth": 2},
    "MedNeXt": {"spatial_dims": 2, **_CHANNELS, "init_filters": 8},
    "HighResNet": {"spatial_dims": 2, **_CHANNELS},
    "RegUNet": {"spatial_dims": 2, **_CHANNELS, "num_channel_initial": 8, "depth": 3},
    "AHNet": {"spatial_dims": 2, **_CHANNELS, "upsample_mode": "bilinear"},
    "UNETR": {**_CHANNELS, "img_size": (96, 128), "hidden_size": 96, "mlp_dim": 192, "spatial_dims": 2},
    "SwinUNETR": {**_CHANNELS, "feature_size": 12, "spatial_dims": 2},
    "ViTAutoEnc": {**_CHANNELS, "img_size": (96, 128), "patch_size": 16, "hidden_size": 96, "mlp_dim": 192,
                   "spatial_dims": 2, "num_layers": 2},
    "HoVerNet": {"out_classes": 5},
    "PatchDiscriminator": {"spatial_dims": 2, "channels": 16, "in_channels": 3},
    "DenseNet121": {"spatial_dims": 2, "in_channels": 3, "out_channels": CLASSES},
    "SEResNet50": {"spatial_dims": 2, "in_channels": 3, "num_classes": CLASSES},
    "resnet18": {"spatial_dims": 2, "n_input_channels": 3, "num_classes": CLASSES},
    "EfficientNetBN": {"model_name": "efficientnet-b0", "pretrained": False, "num_classes": CLASSES},
    "ViT": {"in_channels": 3, "img_size": (96, 128), "patch_size": 16, "hidden_size": 96, "mlp_dim": 192,
            "classification": True, "num_classes": CLASSES, "spatial_dims": 2},
}  # fmt: skip
_MONAI_LABELS = ("DenseNet121", "SEResNet50", "resnet18", "EfficientNetBN", "ViT")

QUICK = (
    "timm/resnet/resnet10t",
    "timm/convnext/convnext_zepto_rms",
    "timm/efficientnet/mobilenetv2_035",
    "timm/nfnet/nf_regnet_b0",
    "timm/vision_transformer/vit_tiny_patch16_224",
    "timm/pvt_v2/pvt_v2_b0",
    "smp/unet/resnet34",
    "smp/fpn/mit_b0",
    "smp/deeplabv3plus/resnet34",
    "smp/manet/efficientnet-b0",
    "torchvision/segmentation/lraspp_mobilenet_v3_large",
    "torchvision/classification/squeezenet1_1",
)


def subjects(suite: str) -> list[Subject]:
    """All models of one suite whose package is installed."""
    if find_spec(SUITES[suite]) is None:
        return []
    return {"timm": _timm, "smp": _smp, "torchvision": _torchvision, "monai": _monai}[suite]()


def _timm() -> list[Subject]:
    import timm

    chosen = {variant.split("?")[0]: variant for variant in _TIMM}
    found = []
    for family in timm.list_modules():
        names = [name for name in timm.list_models(module=family) if timm.is_model(name)]
        variant = next((chosen[name] for name in names if name in chosen), None) or min(names, key=_parameters)
        name, _, query = variant.partition("?")
        settings: dict[str, Any] = {
            key: int(value) for key, value in (pair.split("=") for pair in query.split("&") if pair)
        }
        if family == "vision_transformer_sam":
            settings |= {"global_attn_indexes": (1,)}  # of the two blocks that are left
        published = timm.get_pretrained_cfg(name)
        own = [size[-2:] for size in (published.min_input_size, published.input_size) if size]
        sizes = tuple(own) if published.fixed_input_size else (*SIZES[:2], *own)

        def build(name: str = name, settings: dict[str, Any] = settings) -> nn.Module:
            return timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)

        found.append(Subject(f"timm/{family}/{variant}", build, dense=False, sizes=sizes))
    return found


def _parameters(name: str) -> float:
    import timm

    if name.startswith("test_"):
        return inf
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in timm.create_model(name, pretrained=False).parameters())


def _smp() -> list[Subject]:
    import segmentation_models_pytorch as smp

    found = []
    for architecture in smp.MODEL_ARCHITECTURES_MAPPING:
        encoders = _DPT_ENCODERS if architecture == "dpt" else _SMP_ENCODERS
        for encoder in encoders:
            if encoder.startswith("mit") and architecture in _SMP_WITHOUT_MIT:
                continue  # refused by the library

            def build(architecture: str = architecture, encoder: str = encoder) -> nn.Module:
                return smp.create_model(architecture, encoder, encoder_weights=None, classes=2)

            found.append(Subject(f"smp/{architecture}/{encoder}", build, dense=True))
    return found


def _torchvision() -> list[Subject]:
    import torchvision

    found = []
    for name in _TORCHVISION:
        dense = name.startswith(_TORCHVISION_DENSE)
        settings: dict[str, Any] = {"weights_backbone": None} if dense else {}
        if name.startswith(("googlenet", "inception")):
            settings["init_weights"] = False

        def build(name: str = name, settings: dict[str, Any] = settings) -> nn.Module:
            return torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **settings)

        kind = "segmentation" if dense else "classification"
        found.append(Subject(f"torchvision/{kind}/{name}", build, dense=dense))
    return found


def _monai() -> list[Subject]:
    from monai.networks import nets

    found = []
    for name, settings in _MONAI.items():

        def build(name: str = name, settings: dict[str, Any] = settings) -> nn.Module:
            return getattr(nets, name)(**settings)

        found.append(Subject(f"monai/nets/{name}", build, dense=name not in _MONAI_LABELS))
    return found
