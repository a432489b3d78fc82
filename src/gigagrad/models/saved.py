"""A trained model as one file, or as a folder of safetensors and JSON: the name it was made from and its weights.

Loading either runs no code of its choice and downloads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from gigagrad.errors import ModelError
from gigagrad.files import (
    read_record,
    read_safetensors,
    read_tensors,
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
    """`path` where it is a file, else the weights in that folder of a run or of a model."""
    inner = path / SAFETENSORS if (path / CONFIG).is_file() and not (path / BEST).is_file() else path / BEST
    return inner if path.is_dir() else path


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
    try:
        if file.suffix == ".safetensors":
            payload = {**read_record(file.with_name(CONFIG), _KIND), "state_dict": read_safetensors(file)}
        else:
            payload = read_tensors(file, _KIND)
    except ValueError as error:
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
