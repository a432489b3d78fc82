"""From a model's name, as written on the command line or in a run's configuration, to a module that takes slides.

    paper-unet                          the founding experiment's network with its preprocessing
    multi-stain?stains=2&classes=1      several registered stains into one segmentation: model(he, ihc)
    timm:NAME?key=value&key=value       a network of timm (pretrained=true: with its published weights)
    smp:NAME?key=value                  a network of segmentation-models-pytorch (encoder_weights=imagenet ...)
    monai:NAME?key=value                a network of monai.networks.nets
    package.module:callable?key=value   whatever that callable returns, unchanged
    mil:encoder=NAME&head=NAME          an encoder of patches and a head over all of a bag (`bag_names`, `mil`)

Values are read as literals (`named.parse_named`). The first and the libraries' also take `scale=LOW,HIGH`: which values
of a slide are the intensities 0 and 1, for all channels or, in further pairs, for each (`networks.Normalise`); the
libraries' and `mil` take `mean` and `std` in the place of those that their weights were made for.
Networks of the libraries start from random weights unless the name asks for published ones, which the library then
downloads and caches as it always does; a setting that would open any other file is refused. A name may come from a
file, a saved model's for one: such names go through `check_network` first, and a saved model is built without published
weights. What the user types may be any code at all; what a file says, only code that the user names as well
(`check_trusted`).
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from gigagrad.errors import ConfigError, ModelError, did_you_mean
from gigagrad.models.adapters import add_adapters
from gigagrad.models.bag_names import PREPROCESSING, BagName, encoder_in, is_bag_name
from gigagrad.models.libraries import (
    ENCODERS,
    LIBRARIES,
    WEIGHTS,
    asked,
    build_network,
    check_opens_nothing,
)
from gigagrad.models.mil import HEADS, BagNetwork
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


_FORMS = "paper-unet, multi-stain, timm:NAME, smp:NAME?key=value, monai:NAME?key=value, package.module:callable "
_FORMS += "or mil:encoder=NAME&head=NAME"


def resolve(name: str, *, published: bool = True) -> nn.Module:
    """The model that `name` stands for (see the module's text), in training mode, on the CPU.

    The built-in and the library models take uint8 `(N, 3, H, W)`, `multi-stain` one such image for each stain, `mil`
    the `N` patches of a bag; their preprocessing is the first child. Without `published` the weights that the name asks
    a library for are left out, and nothing is downloaded: for names from files, and for networks that are filled or
    only looked at afterwards.
    Raises `ModelError` for a malformed or unknown name, a missing package, settings the network does not take, or
    weights that cannot be had.
    """
    if is_bag_name(name):
        return _bag_network(BagName.parse(name), published)
    path, settings = _parsed(name)
    source, _, model_name = path.partition(":")
    if source in LIBRARIES and model_name:
        check_opens_nothing(name, {key: value for key, value in settings.items() if key not in WEIGHTS})
        given = {key: settings.pop(key) for key in PREPROCESSING if key in settings}
        plain, channels, mean, std = LIBRARIES[source](name, model_name, settings, published)
        return _fronted(plain, _preprocessing(name, given, channels, mean, std))
    if _is_imported(path):
        return _imported(name, path, settings)
    if path == "paper-unet":
        if settings.keys() - {"scale"}:
            raise ModelError(f"model {name!r} has settings, but paper-unet takes none but scale=LOW,HIGH")
        return _fronted(PaperUNet(), _preprocessing(name, settings, 1))
    if path == "multi-stain":
        network: nn.Module = build_network(name, MultiStainNet, settings)
        return network
    hint = did_you_mean(path, ("paper-unet", "multi-stain", "mil", *LIBRARIES))
    raise ModelError(f"unknown model {name!r}{hint}; a model is {_FORMS}")


def resolve_encoder(name: str, *, published: bool = True) -> nn.Module:
    """The encoder that a name of `timm`, `smp` (one of its encoders), `monai` or `package.module:callable` stands for.

    It takes uint8 `(N, C, h, w)` and gives `(N, D)`; preprocessing is the first child, the encoder is called `network`.
    Of a callable's own there is none unless the name has `mean`, `std` or `scale`. Raises as `resolve` does.
    """
    path, settings = _parsed(name)
    given = {key: settings.pop(key) for key in PREPROCESSING if key in settings}
    encoder, front, _ = _encoder(name, path, settings, given, published)
    return _fronted(encoder, front)


def check_network(name: str, origin: str | Path, trust: Collection[str]) -> None:
    """See that the network `name`, as the file `origin` has it, may be built by `resolve`.

    The project's own networks and the libraries' may; any other, an encoder of `mil` too, has to be a subclass of
    `nn.Module` whose `package.module:class` is in `trust`. Raises `ModelError`, before anything else is imported or
    called, or a folder looked at.
    """
    path = called_path(name)
    if not _is_imported(path):
        if is_bag_name(name) and path.partition(":")[0] not in ENCODERS:
            raise _unknown_encoder(name, path)
        return
    check_trusted(path, origin, trust)
    if not is_reloadable(name):
        raise ModelError(
            f"{origin} asks to call {path!r}, which is no subclass of torch.nn.Module; it was not called: "
            "a network that a file names must be a class"
        )


def asks_for_weights(name: str) -> str | None:
    """The setting by which the network of a library starts from published weights, None where there is none."""
    path, settings = (called_path(name), BagName.parse(name).of["encoder"]) if is_bag_name(name) else _parsed(name)
    found = [] if _is_imported(path) else asked(settings)
    return found[0] if found else None


def is_reloadable(name: str) -> bool:
    """Say whether a saved model of this name can be loaded; one that a function of the user's own makes cannot."""
    path = called_path(name)
    if not _is_imported(path):
        return True
    found = import_callable(path)
    return isinstance(found, type) and issubclass(found, nn.Module)


def called_path(name: str) -> str:
    """Return what is called to make the network, or its encoder: a library's name or `package.module:callable`."""
    return BagName.parse(name).encoder if is_bag_name(name) else name.partition("?")[0]


def _is_imported(path: str) -> bool:
    source, _, rest = path.partition(":")
    return bool(source and rest) and source not in LIBRARIES and not is_bag_name(path)


def _imported(name: str, path: str, settings: dict[str, Literal]) -> nn.Module:
    model = build_network(name, import_callable(path), settings)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model {name!r} gave a {type(model).__name__}; expected a torch.nn.Module")
    return model


def _bag_network(said: BagName, published: bool) -> nn.Module:
    encoder, front, width = _encoder(
        said.name, said.encoder, dict(said.of["encoder"]), said.preprocessing, published, said.features
    )
    if said.lora is not None:
        build_network(said.name, partial(add_adapters, said.name, encoder, said.lora), said.of["lora"])
    head = build_network(said.name, partial(HEADS[said.head], width, said.classes), said.of["head"])
    return _fronted(BagNetwork(encoder, head), front)


def _encoder(
    name: str,
    path: str,
    settings: dict[str, Literal],
    given: dict[str, Literal],
    published: bool,
    features: int | None = None,
) -> tuple[nn.Module, nn.Module | None, int]:
    """Make an encoder, what stands in front of it, and say how many features it gives where `features` does not."""
    source, _, model_name = path.partition(":")
    if source in ENCODERS and model_name:
        check_opens_nothing(name, {key: value for key, value in settings.items() if key not in WEIGHTS})
        encoder, channels, mean, std, found = ENCODERS[source](name, model_name, settings, published)
        front: nn.Module | None = _preprocessing(name, given, channels, mean, std)
        features = features or found
    elif _is_imported(path):
        encoder, channels = _imported(name, path, settings), 3
        front = _preprocessing(name, given, None) if given else None
    else:
        raise _unknown_encoder(name, path, looked_at=True)
    if isinstance(front, Normalise):
        channels = front.factor.shape[1]
    return encoder, front, features or _width(name, encoder, channels)


def _width(name: str, encoder: nn.Module, channels: object) -> int:
    """Count the features that an encoder makes of a patch, by its output for two without a pixel."""
    try:
        with torch.no_grad():
            two = torch.empty((2, channels if isinstance(channels, int) else 3, _PROBED, _PROBED), device="meta")
            output = copy.deepcopy(encoder).eval().to("meta")(two)
    except Exception as error:  # of any network's own
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelError(
            f"cannot tell how many features the encoder of {name!r} makes of a patch of {_PROBED} px ({reason}); say "
            "it, as in features=512"
        ) from error
    if not isinstance(output, torch.Tensor) or output.ndim != 2:
        got = tuple(output.shape) if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
        raise ModelError(f"the encoder of {name!r} gives {got} for two patches; expected one vector each, (2, D)")
    return output.shape[1]


_PROBED: Final = 224
"""Pixels a side."""


def _unknown_encoder(name: str, path: str, *, looked_at: bool = False) -> ModelError:
    """Say which encoders there are; of a folder in the Hub's form, where it may be `looked_at`, what to write."""
    text = f"unknown encoder {path!r} in model {name!r}"
    if looked_at and (written := encoder_in(Path(path))) is not None:
        return ModelError(f"{text}; for what is in that folder write encoder={written}, and --weights {path}")
    return ModelError(
        f"{text}; an encoder is timm:NAME, smp:NAME of its encoders, monai:NAME or package.module:callable"
    )


def _preprocessing(
    name: str,
    given: dict[str, Literal],
    channels: object,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> nn.Module:
    """Make what turns a slide into the input of a network of so many channels; `scale`, `mean` and `std` are `given`.

    Grey of three channels or one where it takes one; otherwise channels beyond the third are normalised like the first,
    the second and so on, as timm repeats weights.
    """
    known: dict[str, Any] = {"scale": (), "mean": tuple(mean), "std": tuple(std), **given}
    scale, mean, std = (
        known[key] if isinstance(known[key], tuple) else (known[key],) for key in ("scale", "mean", "std")
    )
    count = channels if isinstance(channels, int) else len(mean)
    try:
        if channels == 1 and "mean" not in given:
            return Preprocess(scale=scale)
        if not all(isinstance(value, int | float) for value in (*mean, *std)):
            raise ValueError(f"mean and std take numbers; got {mean} and {std}")
        means, stds = ([each[k % len(each)] for k in range(count)] for each in (mean, std))
        return Normalise(means, stds, scale)
    except ValueError as error:
        raise ModelError(f"cannot build model {name!r}: {error}") from error


def _fronted(network: nn.Module, front: nn.Module | None) -> nn.Module:
    return nn.Sequential(OrderedDict(([] if front is None else [("preprocess", front)]) + [("network", network)]))


def _parsed(name: str) -> tuple[str, dict[str, Literal]]:
    try:
        return parse_named(name)
    except ConfigError as error:
        raise ModelError(f"model {name!r}: {error}") from error


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
