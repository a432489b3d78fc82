"""A trained model as one file, or as a folder of safetensors and JSON: the name it was made from and its weights; and
weights to begin with: tensors out of a file of anybody's, into a network that has tensors of these names and shapes.

Loading any of them runs no code of its choice and downloads nothing. Files name the same tensor differently, because a
network was wrapped when it was saved: `module.conv1.weight` of a parallel one, `model.conv1.weight` of a training
framework's, `network.conv1.weight` behind our preprocessing. So one wrapper is taken off all names of the file, and one
off all names of the network: those two with which most match.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from gigagrad.errors import ModelError
from gigagrad.files import (
    read_json,
    read_record,
    read_safetensors,
    read_tensors,
    read_torch,
    write_json,
    write_safetensors,
    write_tensors,
    write_text,
)
from gigagrad.models.registry import check_network, resolve

_KIND = "gigagrad model"
BEST: Final = "best.pt"
CONFIG: Final = "config.json"
SAFETENSORS: Final = "model.safetensors"
"""The files of a run's folder and of a model's: what `save_model` wrote, and `save_folder`."""
ONNX: Final = "model.onnx"
"""The network in the folder of one that was exported."""


def save_model(path: str | Path, spec: str, model: nn.Module) -> None:
    """Write `model`, made by `resolve(spec)`, to `path`, atomically. Raises `WriteError`."""
    write_tensors(Path(path), {"format": _KIND, "version": 1, "spec": spec, "state_dict": model.state_dict()})


def save_folder(folder: Path, spec: str, model: nn.Module, settings: Mapping[str, Any], card: str) -> None:
    """Write `model`, made by `resolve(spec)`, with plain `settings` of what it takes, and `card`, in Markdown, as
    `config.json`, `model.safetensors` and `README.md`. Raises `WriteError`, and `ModelError` for a model that is more
    than tensors.
    """
    write_safetensors(folder / SAFETENSORS, model.state_dict())
    write_json(folder / CONFIG, {"format": _KIND, "version": 1, "spec": spec, **settings})
    write_text(folder / "README.md", card)


def load(path: str | Path, trust: Collection[str] = ()) -> nn.Module:
    """The plain module that `load_model` finds in a file, a run's folder or a model's: on the CPU, in eval mode."""
    return load_model(path, trust)[1]


def model_file(path: Path) -> Path:
    """`path` where it is a file, else the weights in that folder of a run or of a model, or an exported network."""
    if not path.is_dir():
        return path
    if (path / BEST).is_file() or not (path / CONFIG).is_file():
        return path / BEST
    return path / ONNX if (path / ONNX).is_file() else path / SAFETENSORS


def run_inside(folder: Path) -> Path | None:
    """Return the first run that lies in `folder`, None where there is none."""
    return next(iter(sorted(found.parent for found in folder.glob("*/config.yaml"))), None)


def load_model(path: str | Path, trust: Collection[str] = ()) -> tuple[str, nn.Module]:
    """The spec and the model in a file of `save_model` or a folder of `save_folder`, or the best one in a run's folder,
    on the CPU, in eval mode.

    Published weights that the spec began with are not asked for again. `trust` lists what the file may import beside
    the project's and the libraries' networks, each as `package.module:class`, a subclass of `nn.Module`.

    Raises `ModelError` when the file is missing or damaged, asks for code that is not trusted, or when the spec now
    builds a different model.
    """
    spec, weights = _read(path)
    check_network(spec, path, trust)
    return spec, _filled(resolve(spec, published=False), path, spec, weights)


def load_weights(path: str | Path, model: nn.Module) -> nn.Module:
    """`model` with the weights in a file of `save_model`, in eval mode; the file's own spec is not built.

    Raises `ModelError` when the file is missing or damaged, or its weights are another model's.
    """
    return _filled(model, path, *_read(path))


def _read(path: str | Path) -> tuple[str, Any]:
    path = Path(path)
    file = model_file(path)
    if file.name == BEST and not file.exists() and (run := run_inside(file.parent)) is not None:
        raise ModelError(f"{file.parent} holds runs and is none itself; name one of them, such as {run}")
    if file.suffix == Path(ONNX).suffix:
        raise ModelError(f"{path} is an exported network, which 'predict' runs alone; name the run it was made of")
    try:
        if file.suffix == ".safetensors":
            payload = {**read_record(file.with_name(CONFIG), _KIND), "state_dict": read_safetensors(file)}
        else:
            payload = read_tensors(file, _KIND)
    except ValueError as error:
        if (path.parent / BEST).is_file() and path.suffix not in (".pt", ".pth", ".safetensors"):
            raise ModelError(f"{path} is no model; name the run's folder, {path.parent}") from error
        raise ModelError(f"cannot load the model: {error}; train it again or name another file") from error
    spec = payload.get("spec")
    if not isinstance(spec, str) or not spec.isprintable() or "state_dict" not in payload:
        raise ModelError(f"cannot load the model: {path} is damaged; train it again or name another file")
    return spec, payload["state_dict"]


def _filled(model: nn.Module, path: str | Path, spec: str, weights: Any) -> nn.Module:
    try:
        model.load_state_dict(weights)
    except Exception as error:  # whatever lies in the place of tensors
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise ModelError(
            f"cannot load the model: the weights in {path} do not fit what {spec!r} builds now "
            f"({reason}); install the versions it was trained with"
        ) from error
    return model.eval()


_WRAPPERS: Final = frozenset({"_orig_mod", "backbone", "encoder", "model", "module", "net", "network"})
_INSIDE: Final = ("state_dict", "model_state_dict", "model")
"""Keys under which a checkpoint keeps the tensors of the network beside those of the optimizer."""
_SHARDS: Final = f"{SAFETENSORS}.index.json"
"""Which of several files holds which tensor, as the Hugging Face Hub has it."""
_IN_FOLDERS: Final = (BEST, SAFETENSORS, _SHARDS, "pytorch_model.bin")
_ADAPTED: Final = ".base_layer."
"""Name under which `peft` keeps a layer that has adapters."""
_NAMED: Final = 5
"""So many tensors are named in a message; the others are counted."""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Hold what became of the tensors of a file and of those of a network, by name.

    `loaded`, `missing` (nothing in the file is called so) and the keys of `skipped`, whose shapes there and here
    differ, are all tensors of the network; what is missing or skipped stays as it was initialised. `unexpected` are
    those of the file that the network has no place for.
    """

    source: Path
    loaded: tuple[str, ...]
    skipped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Say whether every tensor was of use, and every one of the network was found."""
        return not (self.skipped or self.missing or self.unexpected)

    def __str__(self) -> str:
        count = len(self.loaded) + len(self.skipped) + len(self.missing)
        shapes = [f"{name} ({_by(there)} there, {_by(here)} here)" for name, (there, here) in self.skipped.items()]
        parts = [
            f"{len(self.loaded)} of {count} tensors begin as in {self.source}",
            _listed("of another shape, so left as initialised", shapes),
            _listed("not in it, so left as initialised", self.missing),
            _listed("in it, but not in the network", self.unexpected),
        ]
        return "; ".join(filter(None, parts))


def load_weights_into(model: nn.Module, path: str | Path) -> WeightsReport:
    """Fill `model` with those tensors of `path` that match its own in name and shape; the others stay as they are.

    `path` is a file of PyTorch's (tensors by name, by themselves or in a checkpoint), a `.safetensors` file, the index
    of several (`model.safetensors.index.json`), or a folder that holds one: a run's, a model's, one of the Hugging Face
    Hub. Nothing in it is executed. Raises `ModelError` when it is missing or damaged, or none of its tensors matches.
    """
    path = Path(path)
    there, here = _read_any(path), dict(model.state_dict())
    here = {name: tensor for name, tensor in here.items() if isinstance(tensor, Tensor)}
    names = _matched(there, here)
    fitting = {name: there[other] for name, other in names.items() if there[other].shape == here[name].shape}
    if not fitting:
        raise ModelError(f"no tensor in {path} fits the network{_nearest(there, here)}; name weights of this network")
    try:
        model.load_state_dict(fitting, strict=False)
    except Exception as error:  # tensors that cannot be copied: quantised, sparse
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"cannot take the weights in {path}: {reason}; save them as plain tensors") from error
    used = set(names.values())
    return WeightsReport(
        source=path,
        loaded=tuple(fitting),
        skipped={
            name: (tuple(there[other].shape), tuple(here[name].shape))
            for name, other in names.items()
            if name not in fitting
        },
        missing=tuple(name for name in here if name not in names),
        unexpected=tuple(name for name in there if name not in used),
    )


def _read_any(path: Path) -> dict[str, Tensor]:
    """The tensors of a file or folder by name, in the file's order."""
    file = path
    if path.is_dir():
        inside = [path / name for name in _IN_FOLDERS if (path / name).is_file()]
        if not inside:
            raise ModelError(f"{path} holds no weights, neither {' nor '.join(_IN_FOLDERS)}; name the file")
        file = inside[0]
    content: Any
    try:
        if file.suffix == ".safetensors":
            content = read_safetensors(file)
        elif file.suffix == ".json":
            content = _read_shards(file)
        else:
            content = read_torch(file, "file of tensors alone")
    except ValueError as error:
        raise ModelError(
            f"cannot read the weights: {error}; name another file, or save the tensors alone: "
            "torch.save(network.state_dict(), 'weights.pt')"
        ) from error
    for key in _INSIDE * 2:  # a checkpoint in a checkpoint
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    found = _tensors(content)
    if not found:
        raise ModelError(f"{file} holds no tensors by name; name a file that torch.save(network.state_dict()) wrote")
    return found


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Raises `ValueError`."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a file is in another folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files ({error})") from error
    return {key: tensor for name in names for key, tensor in read_safetensors(index.with_name(name)).items()}


def _tensors(content: Any) -> dict[str, Tensor]:
    items = content.items() if isinstance(content, Mapping) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, Tensor)}


def _matched(there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> dict[str, str]:
    """The file's name of each tensor of the network that it has, by the two wrappers with which most match in shape
    too, then most in name alone.
    """

    def matched(off: str, on: str) -> dict[str, str]:
        both = {name: off + name.removeprefix(on) for name in here if name.startswith(on)}
        # The weights of a layer with adapters, in a file of the network without.
        both |= {name: other.replace(_ADAPTED, ".") for name, other in both.items() if other not in there}
        return {name: other for name, other in both.items() if other in there}

    def worth(names: Mapping[str, str]) -> tuple[int, int]:
        return sum(there[other].shape == here[name].shape for name, other in names.items()), len(names)

    return max((matched(off, on) for off in _wrappers(there) for on in _wrappers(here)), key=worth)


def _wrappers(names: Iterable[str]) -> list[str]:
    """Return the prefixes of names that only say how a network was wrapped, from nothing on: `["", "module."]`."""
    found = {""}
    for name in names:
        start = ""
        for part in name.split(".")[:-1]:
            if part not in _WRAPPERS:
                break
            start += f"{part}."
            found.add(start)
    return sorted(found, key=lambda start: (len(start), start))


def _nearest(there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> str:
    """For a message: a tensor of the file and the one of the network that is called most like it."""
    for name in there:
        if close := get_close_matches(name, here, n=1):
            break
    else:
        name, close = next(iter(there)), list(here)[:1]
    network = f"{close[0]!r} ({_by(here[close[0]].shape)})" if close else "no tensors"
    return f": nearest are {name!r} ({_by(there[name].shape)}) in the file and {network} in the network"


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _listed(what: str, names: Iterable[str]) -> str:
    """`what: a, b and 3 more`, or nothing."""
    names = list(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what}: {', '.join(names[:_NAMED])}{more}" if names else ""
