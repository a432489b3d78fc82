"""From a model's name, as written on the command line or in a run's configuration, to a module that takes slides.

    paper-unet                          the founding experiment's network with its preprocessing
    multi-stain?stains=2&classes=1      several registered stains into one segmentation: model(he, ihc)
    timm:NAME?key=value&key=value       a network of timm (pretrained=true: with its published weights)
    smp:NAME?key=value                  a network of segmentation-models-pytorch (encoder_weights=imagenet ...)
    monai:NAME?key=value                a network of monai.networks.nets
    package.module:callable?key=value   whatever that callable returns, unchanged

Values are read as literals (`named.parse_named`). The first and the libraries' also take `scale=LOW,HIGH`: which values
of a slide are the intensities 0 and 1, for all channels or, in further pairs, for each (`networks.Normalise`).
Networks of the libraries start from random weights unless the name asks for published ones, which the library then
downloads and caches as it always does; a setting that would open any other file is refused. A name may come from a
file, a saved model's for one: such names go through `check_network` first, and a saved model is built without published
weights. What the user types may be any code at all; what a file says, only code that the user names as well
(`check_trusted`).
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import nn

from gigagrad.errors import ConfigError, ModelError, did_you_mean
from gigagrad.models.networks import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MultiStainNet,
    Normalise,
    PaperUNet,
    Preprocess,
)
from gigagrad.named import Literal, parse_named

# The message below is made to be copied into a shell, so nothing that a shell reads otherwise may stand in a name.
_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def check_trusted(path: str, origin: str | Path, trust: Collection[str]) -> None:
    """Raises `ModelError` unless `path`, which the file `origin` wants imported, is one of `trust`. Imports nothing."""
    if _PATH.fullmatch(path) is None:
        raise ModelError(f"{origin} names {path!r}, which is no package.module:callable; nothing was imported")
    if path not in ((trust,) if isinstance(trust, str) else trust):
        raise ModelError(
            f"{origin} asks to import {path!r}, which is part of neither gigagrad nor timm, smp or monai; it was not "
            f"imported: if you know and trust that code, allow it with --trust {path} (in Python trust=[{path!r}])"
        )


def import_callable(path: str) -> Callable[..., Any]:
    """The object at `package.module:callable`; modules in the working directory are found too. Raises `ModelError`.

    Importing runs code: a path that was read in a file has to pass `check_trusted` first.
    """
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
            raise ModelError(f"{module_name!r} has no {attribute!r}{did_you_mean(attribute, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ModelError(f"{path!r} is a {type(found).__name__}; expected something to call")
    return found  # type: ignore[no-any-return]


_FORMS = "paper-unet, multi-stain, timm:NAME, smp:NAME?key=value, monai:NAME?key=value or package.module:callable"
_WEIGHTS: Final = {"pretrained", "encoder_weights", "weights"}
"""Settings that ask a library for published weights."""
_CENTRED: Final = {"inceptionresnetv2", "inceptionv4", "xception"}
"""Encoders of smp whose published weights take intensities of -1..1; smp keeps this in files that it downloads."""
_PLACES: Final = {"checkpoint", "dir", "file", "filename", "hub", "path", "pretrained", "repo", "url", "weights"}
"""Words in the names of settings that say, as text, what a library is to load: `checkpoint_path`, `pretrained_url`."""


def resolve(name: str, *, published: bool = True) -> nn.Module:
    """The model that `name` stands for (see the module's text), in training mode, on the CPU.

    The built-in and the library models take uint8 `(N, 3, H, W)`, `multi-stain` one such image for each stain; their
    preprocessing is the first child. Without `published` the weights that the name asks a library for are left out, and
    nothing is downloaded: for names from files, and for networks that are filled or only looked at afterwards.
    Raises `ModelError` for a malformed or unknown name, a missing package, settings the network does not take, or
    weights that cannot be had.
    """
    path, settings = _parsed(name)
    source, _, model_name = path.partition(":")
    if source in _LIBRARIES and model_name:
        _check_opens_nothing(name, {key: value for key, value in settings.items() if key not in _WEIGHTS})
        scale = settings.pop("scale", ())
        return _fronted(name, scale, *_LIBRARIES[source](name, model_name, settings, published))
    if _is_imported(path):
        model = _build(name, import_callable(path), settings)
        if not isinstance(model, nn.Module):
            raise ModelError(f"model {name!r} gave a {type(model).__name__}; expected a torch.nn.Module")
        return model
    if path == "paper-unet":
        if settings.keys() - {"scale"}:
            raise ModelError(f"model {name!r} has settings, but paper-unet takes none but scale=LOW,HIGH")
        return _fronted(name, settings.get("scale", ()), PaperUNet(), 1)
    if path == "multi-stain":
        network: nn.Module = _build(name, MultiStainNet, settings)
        return network
    hint = did_you_mean(path, ("paper-unet", "multi-stain", *_LIBRARIES))
    raise ModelError(f"unknown model {name!r}{hint}; a model is {_FORMS}")


def check_network(name: str, origin: str | Path, trust: Collection[str]) -> None:
    """See that the network `name`, as the file `origin` has it, may be built by `resolve`.

    The project's own networks and the libraries' may; any other has to be a subclass of `nn.Module` whose
    `package.module:class` is in `trust`. Raises `ModelError`, before anything else is imported or called.
    """
    path = name.partition("?")[0]
    if not _is_imported(path):
        return
    check_trusted(path, origin, trust)
    if not is_reloadable(name):
        raise ModelError(
            f"{origin} asks to call {path!r}, which is no subclass of torch.nn.Module; it was not called: "
            "a network that a file names must be a class"
        )


def asks_for_weights(name: str) -> str | None:
    """The setting by which the network of a library starts from published weights, None where there is none."""
    path, settings = _parsed(name)
    asked = [] if _is_imported(path) else _asked(settings)
    return asked[0] if asked else None


def is_reloadable(name: str) -> bool:
    """Say whether a saved model of this name can be loaded; one that a function of the user's own makes cannot."""
    path = name.partition("?")[0]
    if not _is_imported(path):
        return True
    found = import_callable(path)
    return isinstance(found, type) and issubclass(found, nn.Module)


def _is_imported(path: str) -> bool:
    source, _, rest = path.partition(":")
    return bool(source and rest) and source not in _LIBRARIES


def _fronted(
    name: str,
    scale: Any,
    network: nn.Module,
    channels: object,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> nn.Module:
    """`network`, which takes so many channels, behind what turns a slide into its input, with the `scale` of its name.

    Grey of three channels or one where it takes one; otherwise channels beyond the third are normalised like the first,
    the second and so on, as timm repeats weights.
    """
    count = channels if isinstance(channels, int) else len(mean)
    scale = scale if isinstance(scale, tuple) else (scale,)
    try:
        if channels == 1:
            front: nn.Module = Preprocess(scale=scale)
        else:
            means, stds = ([each[k % len(each)] for k in range(count)] for each in (mean, std))
            front = Normalise(means, stds, scale)
    except ValueError as error:
        raise ModelError(f"cannot build model {name!r}: {error}") from error
    return nn.Sequential(OrderedDict(preprocess=front, network=network))


_Plain: TypeAlias = tuple[nn.Module, object, Sequence[float], Sequence[float]]
"""A network of a library, its channels, and the mean and the standard deviation that each of these is to have."""


def _timm(name: str, model_name: str, settings: dict[str, Literal], published: bool) -> _Plain:
    timm = _import("timm", name, extra="timm")
    if not timm.is_model(model_name):
        _unknown(name, model_name, timm.list_models())
    settings = {"pretrained": False, **(settings if published else _without_weights(settings))}
    network = _build(name, timm.create_model, settings, model_name)
    known = network.pretrained_cfg or {}
    mean, std = known.get("mean", IMAGENET_MEAN), known.get("std", IMAGENET_STD)
    return network, settings.get("in_chans", 3), mean, std


def _smp(name: str, model_name: str, settings: dict[str, Literal], published: bool) -> _Plain:
    smp = _import("segmentation_models_pytorch", name, extra="smp")
    if model_name.lower() not in smp.MODEL_ARCHITECTURES_MAPPING:
        _unknown(name, model_name, smp.MODEL_ARCHITECTURES_MAPPING)
    encoder = str(settings.get("encoder_name", "resnet34"))
    timm = _import("timm", name, extra="timm") if encoder.startswith("tu-") else None
    if not (timm and timm.is_model(encoder[3:])) and encoder not in smp.encoders.get_encoder_names():
        _unknown(name, encoder, smp.encoders.get_encoder_names())
    # To smp only None means random weights: False and 0 download. Of an encoder of timm, its name says which weights.
    weights = settings.get("encoder_weights") or None
    wanted = None if not published or weights is None else True if timm else weights
    network = _build(name, smp.create_model, {**_without_weights(settings), "encoder_weights": wanted}, model_name)
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    # What the weights were made for, also where a file fills a network that began with them.
    if weights is not None and timm is not None:
        known = timm.models.get_pretrained_cfg(encoder[3:])
        mean, std = getattr(known, "mean", None) or mean, getattr(known, "std", None) or std
    elif weights is not None and encoder in _CENTRED:
        mean = std = (0.5,) * 3
    return network, settings.get("in_channels", 3), mean, std


def _monai(name: str, model_name: str, settings: dict[str, Literal], published: bool) -> _Plain:
    networks = _import("monai.networks.nets", name, extra="monai")
    offered = {key: value for key, value in vars(networks).items() if _makes_network(value, networks.__name__)}
    if model_name not in offered:
        _unknown(name, model_name, offered)
    build = offered[model_name]
    defaults = {key: parameter.default for key, parameter in inspect.signature(build).parameters.items()}
    settings = settings if published else _without_weights(settings)
    if defaults.get("pretrained") is True:
        defaults["pretrained"] = False
        settings = {"pretrained": False, **settings}
    _check_opens_nothing(name, defaults)
    return _build(name, build, settings), settings.get("in_channels", 3), IMAGENET_MEAN, IMAGENET_STD


def _makes_network(found: object, package: str) -> bool:
    """Say whether `found` is a network class of `package`, or a function of it that says it returns one."""
    made = found
    if inspect.isfunction(found):
        made = found.__annotations__.get("return")
        made = found.__globals__.get(made) if isinstance(made, str) else made
    of_package = str(getattr(found, "__module__", "")).startswith(f"{package}.")
    return of_package and isinstance(made, type) and issubclass(made, nn.Module)


_LIBRARIES = {"timm": _timm, "smp": _smp, "monai": _monai}


def _import(module: str, name: str, *, extra: str) -> Any:
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


def _asked(settings: Mapping[str, object]) -> list[str]:
    """The settings that ask for published weights."""
    return [key for key, value in settings.items() if key in _WEIGHTS and value]


def _without_weights(settings: Mapping[str, Literal]) -> dict[str, Literal]:
    return {key: value for key, value in settings.items() if key not in _WEIGHTS}


def _check_opens_nothing(name: str, settings: Mapping[str, object]) -> None:
    """Raises `ModelError` for a setting that makes a library open a file or download one."""
    asked = _asked(settings)
    for key, value in settings.items():
        place = isinstance(value, str) and not _PLACES.isdisjoint(key.split("_"))
        if place or key in asked:
            raise ModelError(
                f"model {name!r} names what the library is to open ({key}), but a name opens no file; "
                "leave it out, and give the weights as --weights FILE"
            )


def _build(name: str, build: Callable[..., Any], settings: dict[str, Literal], *positional: str) -> Any:
    """Call a network's constructor; whatever it dislikes about the user's settings becomes one line."""
    try:
        return build(*positional, **settings)
    except ModelError:
        raise
    except Exception as error:  # third-party constructors raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        # Wrong settings are TypeError, KeyError, RuntimeError and the like; what fails on the way is not.
        if (asked := _asked(settings)) and (isinstance(error, OSError) or type(error).__module__ != "builtins"):
            raise ModelError(
                f"cannot get the published weights of model {name!r}: {reason}; check the connection, or leave "
                f"{asked[0]} out and give a file with --weights"
            ) from error
        raise ModelError(f"cannot build model {name!r}: {reason}") from error


def _parsed(name: str) -> tuple[str, dict[str, Literal]]:
    try:
        return parse_named(name)
    except ConfigError as error:
        raise ModelError(f"model {name!r}: {error}") from error


def _unknown(name: str, wrong: str, known: Iterable[str]) -> NoReturn:
    known = list(known)
    listing = f"; known are {', '.join(known)}" if len(known) <= 20 else ""
    raise ModelError(f"unknown {wrong!r} in model {name!r}{did_you_mean(wrong, known)}{listing}")


_INSIDE: Final = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Attributes that hold the wrapped module, by the names of classes, which would load a compiler if imported."""
_SHARDED: Final = {"FullyShardedDataParallel", "FSDPModule"}
_BLIND: Final = "whose inside cannot be captured"


def unwrapped(given: Any, what: str) -> Any:
    """The module in the wrappers of `torch.compile`, `DataParallel` and `DistributedDataParallel`, whose parameters are
    the same; anything else as it is. `what` is "model" or "loss".

    Raises ModelError for what holds parameters where no engine can use them: TorchScript, FSDP, quantised layers.
    """
    while (inside := next((_INSIDE[name] for name in _classes(given) if name in _INSIDE), None)) is not None:
        if "DistributedDataParallel" in _classes(given) and given.process_group.size() > 1:
            raise ModelError(
                f"the {what} is in DistributedDataParallel, which averages gradients behind autograd's own backward "
                f"only; write gg.compile({what}.module, ...), and after backward for every parameter "
                "torch.distributed.all_reduce(p.grad, torch.distributed.ReduceOp.AVG)"
            )
        given = getattr(given, inside)
    if "ExportedProgram" in _classes(given):
        raise ConfigError(f"the {what} is an ExportedProgram; give its module: gg.compile(program.module(), ...)")
    if isinstance(given, torch.jit.ScriptFunction):
        raise ModelError(f"the {what} is a function of TorchScript, {_BLIND}; give the Python function itself")
    if isinstance(given, nn.Module):
        _check_parts(given, what)
    return given


def _check_parts(module: nn.Module, what: str) -> None:
    for name, part in module.named_modules():
        path = ".".join(filter(None, (what, name)))
        classes = _classes(part)
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                f"'{path}' is TorchScript, {_BLIND}; make the module in Python, with the weights of this one: "
                "module.load_state_dict(scripted.state_dict())"
            )
        if not _SHARDED.isdisjoint(classes) or any(type(p).__name__ == "DTensor" for p in part._parameters.values()):
            raise ModelError(
                f"'{path}' is sharded (FSDP, DTensor), so that no rank has all of its weights; give gg.compile the "
                "module without that, and mesh= for ranks that compute one image together"
            )
        if "DistributedDataParallel" in classes or ("DataParallel" in classes and part.device_ids):
            raise ModelError(
                f"'{path}' is in {type(part).__name__}, which no engine can look through; put what is inside of it "
                "(its attribute `module`) in its place"
            )
        if ".quantized" in type(part).__module__ and type(part).__module__.startswith("torch."):
            raise ModelError(
                f"'{path}' is a quantised layer ({type(part).__name__}), which has no gradient and runs on quantised "
                "tensors only; use the network as it was before it was quantised"
            )


def _classes(given: Any) -> set[str]:
    return {kind.__name__ for kind in type(given).__mro__ if kind.__module__.startswith("torch")}
