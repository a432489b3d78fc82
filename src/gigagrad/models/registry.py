"""From a model's name, as written on the command line or in a run's configuration, to a module that takes slides.

    paper-unet                          the founding experiment's network with its preprocessing
    multi-stain?stains=2&classes=1      several registered stains into one segmentation: model(he, ihc)
    timm:NAME?key=value&key=value       a network of timm, freshly initialised
    smp:NAME?key=value                  a network of segmentation-models-pytorch (encoder_name=resnet34 ...)
    monai:NAME?key=value                a network of monai.networks.nets
    package.module:callable?key=value   whatever that callable returns, unchanged

Values are read as literals: `3`, `1e-3`, `true`, `none`, comma-separated tuples of those, else text. Nothing is
downloaded: networks start from random weights, and a setting that asks for published ones is refused.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

from torch import nn

from gigagrad.errors import ModelError
from gigagrad.models.multi_stain import MultiStainNet
from gigagrad.models.paper import PaperUNet
from gigagrad.models.preprocess import IMAGENET_MEAN, IMAGENET_STD, Normalise, Preprocess

_FORMS = "paper-unet, multi-stain, timm:NAME, smp:NAME?key=value, monai:NAME?key=value or package.module:callable"
_WEIGHT_SETTINGS = ("pretrained", "encoder_weights", "weights")

Literal = int | float | bool | str | None | tuple["Literal", ...]


def resolve(name: str) -> nn.Module:
    """The model that `name` stands for (see the module's text), in training mode, on the CPU.

    The built-in and the library models take uint8 `(N, 3, H, W)`, `multi-stain` one such image for each stain; their
    preprocessing is the first child.
    Raises `ModelError` for a malformed or unknown name, a missing package, or settings the network does not take.
    """
    path, _, query = name.partition("?")
    settings = _parse_query(name, query)
    source, colon, model_name = path.partition(":")
    if colon and source in _LIBRARIES and model_name:
        return _LIBRARIES[source](name, model_name, settings)
    if colon and source and model_name:
        model = _build(name, import_callable(path), settings)
        if not isinstance(model, nn.Module):
            raise ModelError(f"model {name!r} gave a {type(model).__name__}; expected a torch.nn.Module")
        return model
    if path == "paper-unet":
        if settings:
            raise ModelError(f"model {name!r} has settings, but paper-unet takes none; leave out everything after '?'")
        return _with_front(Preprocess(), PaperUNet())
    if path == "multi-stain":
        network: nn.Module = _build(name, MultiStainNet, settings)
        return network
    hint = _did_you_mean(path, ("paper-unet", "multi-stain", *_LIBRARIES))
    raise ModelError(f"unknown model {name!r}{hint}; a model is {_FORMS}")


def import_callable(path: str) -> Callable[..., Any]:
    """The object at `package.module:callable`; modules in the working directory are found too. Raises `ModelError`."""
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way while it is imported
        raise ModelError(f"cannot import {module_name!r} for {path!r}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(here)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ModelError(f"{module_name!r} has no {attribute!r}{_did_you_mean(attribute, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ModelError(f"{path!r} is a {type(found).__name__}; expected something to call")
    return found  # type: ignore[no-any-return]


def _with_front(front: nn.Module, network: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(preprocess=front, network=network))


def _front(channels: object, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD) -> nn.Module:
    """What turns a uint8 RGB slide into the input of a network with this many input channels."""
    return Preprocess() if channels == 1 else Normalise(mean, std)


def _timm(name: str, model_name: str, settings: dict[str, Literal]) -> nn.Module:
    timm = _import("timm", name, extra="timm")
    if not timm.is_model(model_name):
        _unknown(name, model_name, timm.list_models())
    network = _build(name, timm.create_model, {"pretrained": False, **settings}, model_name)
    published = network.pretrained_cfg or {}
    mean, std = published.get("mean", IMAGENET_MEAN), published.get("std", IMAGENET_STD)
    return _with_front(_front(settings.get("in_chans", 3), mean, std), network)


def _smp(name: str, model_name: str, settings: dict[str, Literal]) -> nn.Module:
    smp = _import("segmentation_models_pytorch", name, extra="smp")
    if model_name.lower() not in smp.MODEL_ARCHITECTURES_MAPPING:
        _unknown(name, model_name, smp.MODEL_ARCHITECTURES_MAPPING)
    encoder = settings.get("encoder_name", "resnet34")
    if not str(encoder).startswith("tu-") and encoder not in smp.encoders.get_encoder_names():
        _unknown(name, str(encoder), smp.encoders.get_encoder_names())
    network = _build(name, smp.create_model, {"encoder_weights": None, **settings}, model_name)
    return _with_front(_front(settings.get("in_channels", 3)), network)


def _monai(name: str, model_name: str, settings: dict[str, Literal]) -> nn.Module:
    networks = _import("monai.networks.nets", name, extra="monai")
    if not hasattr(networks, model_name):
        _unknown(name, model_name, dir(networks))
    network = _build(name, getattr(networks, model_name), settings)
    return _with_front(_front(settings.get("in_channels", 3)), network)


_LIBRARIES: dict[str, Callable[[str, str, dict[str, Literal]], nn.Module]] = {
    "timm": _timm,
    "smp": _smp,
    "monai": _monai,
}


def _import(module: str, name: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"model {name!r} needs the package {module.partition('.')[0]} ({error}); "
            f"install it with: pip install 'gigagrad[{extra}]'"
        ) from error
    except Exception as error:  # a torchvision built for another PyTorch raises RuntimeError, for one
        reason = " ".join(str(error).split())[:300]
        advice = "; install the torchvision that was built for this PyTorch" if "torchvision" in reason else ""
        raise ModelError(
            f"model {name!r} needs the package {module.partition('.')[0]}, which is installed but fails to import: "
            f"{type(error).__name__}: {reason}{advice}"
        ) from error


def _build(name: str, build: Callable[..., Any], settings: dict[str, Literal], *positional: str) -> Any:
    """Call a network's constructor; whatever it dislikes about the user's settings becomes one line."""
    for key in _WEIGHT_SETTINGS:
        if settings.get(key):
            raise ModelError(
                f"model {name!r} asks for published weights ({key}), but gigagrad downloads nothing; "
                "name a function of your own that loads them: package.module:callable"
            )
    try:
        return build(*positional, **settings)
    except ModelError:
        raise
    except Exception as error:  # third-party constructors raise anything
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"cannot build model {name!r}: {type(error).__name__}: {reason}") from error


def _parse_query(name: str, query: str) -> dict[str, Literal]:
    settings: dict[str, Literal] = {}
    for item in filter(None, query.split("&")):
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise ModelError(f"cannot read {item!r} in model {name!r}; settings are written NAME?key=value&key=value")
        if key in settings:
            raise ModelError(f"model {name!r} sets {key!r} twice")
        settings[key] = _parse_value(unquote(value))
    return settings


def _parse_value(text: str) -> Literal:
    if "," in text:
        return tuple(_parse_value(part) for part in text.split(",") if part)
    word = text.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    if word in ("none", "null"):
        return None
    if re.fullmatch(r"[+-]?\d+", word):
        return int(word)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", word):
        return float(word)
    return text


def _unknown(name: str, wrong: str, known: Iterable[str]) -> NoReturn:
    known = list(known)
    listing = f"; known are {', '.join(known)}" if len(known) <= 20 else ""
    raise ModelError(f"unknown {wrong!r} in model {name!r}{_did_you_mean(wrong, known)}{listing}")


def _did_you_mean(wrong: str, known: Iterable[str]) -> str:
    spellings = {word.lower(): word for word in known}
    close = get_close_matches(wrong.lower(), spellings, n=1)
    return f", did you mean {spellings[close[0]]!r}?" if close else ""
