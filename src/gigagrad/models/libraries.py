"""Networks of timm, segmentation-models-pytorch and MONAI by their names: whole ones, and as encoders of patches.

Nothing is downloaded and no file opened but published weights, where these are asked for.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from torch import Tensor, nn

from gigagrad.errors import ModelError, did_you_mean
from gigagrad.models.networks import IMAGENET_MEAN, IMAGENET_STD
from gigagrad.named import Literal

WEIGHTS: Final = {"pretrained", "encoder_weights", "weights"}
"""Settings that ask a library for published weights."""
_CENTRED: Final = {"inceptionresnetv2", "inceptionv4", "xception"}
"""Encoders of smp whose published weights take intensities of -1..1; smp keeps this in files that it downloads."""
_PLACES: Final = {"checkpoint", "dir", "file", "filename", "hub", "path", "pretrained", "repo", "url", "weights"}
"""Words in the names of settings that say, as text, what a library is to load: `checkpoint_path`, `pretrained_url`."""

_ONE_OF_A_LIST: Final = re.compile("'(int|float)' (has no len|object is not (iterable|subscriptable))")
"""Parts of Python's messages about a number in the place of a list."""

Plain: TypeAlias = tuple[nn.Module, object, Sequence[float], Sequence[float]]
"""A network of a library, its channels, and the mean and the standard deviation that each of these is to have."""
Encoder: TypeAlias = tuple[nn.Module, object, Sequence[float], Sequence[float], int | None]
"""A `Plain` whose network gives a vector of each image, and how long that is, where the network says so."""


def _timm(name: str, model_name: str, settings: dict[str, Literal], published: bool) -> Plain:
    timm = import_library("timm", name, extra="timm")
    if not timm.is_model(model_name):
        refuse_unknown(name, model_name, timm.list_models())
    settings = {"pretrained": False, **(settings if published else _without_weights(settings))}
    network = build_network(name, timm.create_model, settings, model_name)
    known = network.pretrained_cfg or {}
    mean, std = known.get("mean", IMAGENET_MEAN), known.get("std", IMAGENET_STD)
    return network, settings.get("in_chans", 3), mean, std


def _smp(name: str, model_name: str, settings: dict[str, Literal], published: bool) -> Plain:
    smp = import_library("segmentation_models_pytorch", name, extra="smp")
    if model_name.lower() not in smp.MODEL_ARCHITECTURES_MAPPING:
        refuse_unknown(name, model_name, smp.MODEL_ARCHITECTURES_MAPPING)
    encoder = str(settings.get("encoder_name", "resnet34"))
    timm = import_library("timm", name, extra="timm") if encoder.startswith("tu-") else None
    if not (timm and timm.is_model(encoder[3:])) and encoder not in smp.encoders.get_encoder_names():
        refuse_unknown(name, encoder, smp.encoders.get_encoder_names())
    if timm is None:  # of its own encoders smp leaves out what it does not know, without a word
        build = smp.MODEL_ARCHITECTURES_MAPPING[model_name.lower()]
        known = [*inspect.signature(build).parameters, "decoder_use_batchnorm"]
        for key in settings.keys() - known:
            raise ModelError(f"{model_name} in model {name!r} has no setting {key!r}{did_you_mean(key, known)}")
    # To smp only None means random weights: False and 0 download. Of an encoder of timm, its name says which weights.
    weights = settings.get("encoder_weights") or None
    wanted = None if not published or weights is None else True if timm else weights
    network = build_network(
        name, smp.create_model, {**_without_weights(settings), "encoder_weights": wanted}, model_name
    )
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    # What the weights were made for, also where a file fills a network that began with them.
    if weights is not None and timm is not None:
        known = timm.models.get_pretrained_cfg(encoder[3:])
        mean, std = getattr(known, "mean", None) or mean, getattr(known, "std", None) or std
    elif weights is not None and encoder in _CENTRED:
        mean = std = (0.5,) * 3
    return network, settings.get("in_channels", 3), mean, std


def _monai(name: str, model_name: str, settings: dict[str, Literal], published: bool) -> Plain:
    networks = import_library("monai.networks.nets", name, extra="monai")
    offered = {key: value for key, value in vars(networks).items() if _makes_network(value, networks.__name__)}
    if model_name not in offered:
        refuse_unknown(name, model_name, offered)
    build = offered[model_name]
    defaults = {key: parameter.default for key, parameter in inspect.signature(build).parameters.items()}
    settings = settings if published else _without_weights(settings)
    if defaults.get("pretrained") is True:
        defaults["pretrained"] = False
        settings = {"pretrained": False, **settings}
    check_opens_nothing(name, defaults)
    return build_network(name, build, settings), settings.get("in_channels", 3), IMAGENET_MEAN, IMAGENET_STD


def _makes_network(found: object, package: str) -> bool:
    """Say whether `found` is a network class of `package`, or a function of it that says it returns one."""
    made = found
    if inspect.isfunction(found):
        made = found.__annotations__.get("return")
        made = found.__globals__.get(made) if isinstance(made, str) else made
    of_package = str(getattr(found, "__module__", "")).startswith(f"{package}.")
    return of_package and isinstance(made, type) and issubclass(made, nn.Module)


def _timm_encoder(name: str, model_name: str, settings: dict[str, Literal], published: bool) -> Encoder:
    plain = _timm(name, model_name, {"num_classes": 0, **settings}, published)
    # What comes out without a classifier: of some families its hidden layer, which is wider than the features.
    widths = settings.get("num_classes"), getattr(plain[0], "head_hidden_size", None), plain[0].num_features
    found = next(width for width in widths if isinstance(width, int) and width)
    return *plain, found


def _smp_encoder(name: str, model_name: str, settings: dict[str, Literal], published: bool) -> Encoder:
    smp = import_library("segmentation_models_pytorch", name, extra="smp")
    if model_name.startswith("tu-"):
        raise ModelError(f"model {name!r}: the encoder is one of timm; write encoder=timm:{model_name[3:]}")
    if model_name not in smp.encoders.get_encoder_names():
        refuse_unknown(name, model_name, smp.encoders.get_encoder_names())
    weights = settings.get("weights") or None
    wanted = {**_without_weights(settings), "weights": weights if published else None}
    stages = build_network(name, smp.encoders.get_encoder, wanted, model_name)
    mean, std = ((0.5,) * 3,) * 2 if weights is not None and model_name in _CENTRED else (IMAGENET_MEAN, IMAGENET_STD)
    return PooledStages(stages), settings.get("in_channels", 3), mean, std, stages.out_channels[-1]


def _monai_encoder(name: str, model_name: str, settings: dict[str, Literal], published: bool) -> Encoder:
    return *_monai(name, model_name, settings, published), None


class PooledStages(nn.Module):
    """An encoder that gives the fields of its stages: the mean over the pixels of the last, `(N, D)`."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x_NCHW: Tensor) -> Tensor:
        pooled_ND: Tensor = self.backbone(x_NCHW)[-1].mean((2, 3))
        return pooled_ND


LIBRARIES: Final = {"timm": _timm, "smp": _smp, "monai": _monai}
ENCODERS: Final = {"timm": _timm_encoder, "smp": _smp_encoder, "monai": _monai_encoder}


def import_library(module: str, name: str, *, extra: str) -> Any:
    """Import `module` for the model `name`. Raises `ModelError`, with the `extra` of gigagrad that brings it."""
    needs = f"model {name!r} needs the package {module.partition('.')[0]}"
    try:
        importlib.import_module("gigagrad.models.torchvision_operators")
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModelError(f"{needs} ({error}); install it with: pip install 'gigagrad[{extra}]'") from error
    except Exception as error:  # a torchvision built for another PyTorch raises RuntimeError, for one
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        advice = "; install the torchvision that was built for this PyTorch" if "torchvision" in reason else ""
        raise ModelError(f"{needs}, which is installed but fails to import: {reason}{advice}") from error


def asked(settings: Mapping[str, object]) -> list[str]:
    """The settings that ask for published weights."""
    return [key for key, value in settings.items() if key in WEIGHTS and value]


def _without_weights(settings: Mapping[str, Literal]) -> dict[str, Literal]:
    return {key: value for key, value in settings.items() if key not in WEIGHTS}


def check_opens_nothing(name: str, settings: Mapping[str, object]) -> None:
    """Raises `ModelError` for a setting that makes a library open a file or download one."""
    published = asked(settings)
    for key, value in settings.items():
        place = isinstance(value, str) and not _PLACES.isdisjoint(key.split("_"))
        if place or key in published:
            raise ModelError(
                f"model {name!r} names what the library is to open ({key}), but a name opens no file; "
                "leave it out, and give the weights as --weights FILE"
            )


def build_network(name: str, build: Callable[..., Any], settings: dict[str, Literal], *positional: str) -> Any:
    """Call a network's constructor; whatever it dislikes about the user's settings becomes one line."""
    try:
        return build(*positional, **settings)
    except ModelError:
        raise
    except Exception as error:  # third-party constructors raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        # Wrong settings are TypeError, KeyError, RuntimeError and the like; what fails on the way is not.
        if (weights := asked(settings)) and (isinstance(error, OSError) or type(error).__module__ != "builtins"):
            raise ModelError(
                f"cannot get the published weights of model {name!r}: {reason}; check the connection, or leave "
                f"{weights[0]} out and give a file with --weights"
            ) from error
        one = "; a list of one has a comma behind it, as in strides=2," if _ONE_OF_A_LIST.search(reason) else ""
        raise ModelError(f"cannot build model {name!r}: {reason}{one}") from error


def refuse_unknown(name: str, wrong: str, known: Iterable[str]) -> NoReturn:
    known = list(known)
    listing = f"; known are {', '.join(known)}" if len(known) <= 20 else ""
    raise ModelError(f"unknown {wrong!r} in model {name!r}{did_you_mean(wrong, known)}{listing}")
