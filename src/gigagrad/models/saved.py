"""A trained model as one file: the name it was made from and its weights. Loading it runs no code of its choice."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from gigagrad.errors import ModelError
from gigagrad.files import read_tensors, write_tensors
from gigagrad.models.registry import check_network, resolve

_KIND = "gigagrad model"


def save_model(path: str | Path, spec: str, model: nn.Module) -> None:
    """Write `model`, made by `resolve(spec)`, to `path`, atomically. Raises `WriteError`."""
    write_tensors(Path(path), {"format": _KIND, "version": 1, "spec": spec, "state_dict": model.state_dict()})


def load_model(path: str | Path, trust: Collection[str] = ()) -> tuple[str, nn.Module]:
    """The spec and the model in a file of `save_model`, or the best one in a run's folder, on the CPU, in eval mode.

    `trust` lists what the file may import beside the project's and the libraries' networks, each as
    `package.module:class`, a subclass of `nn.Module`.

    Raises `ModelError` when the file is missing or damaged, asks for code that is not trusted, or when the spec now
    builds a different model.
    """
    spec, weights = _read(path)
    check_network(spec, path, trust)
    return spec, _filled(resolve(spec), path, spec, weights)


def load_weights(path: str | Path, model: nn.Module) -> nn.Module:
    """`model` with the weights in a file of `save_model`, in eval mode; the file's own spec is not built.

    Raises `ModelError` when the file is missing or damaged, or its weights are another model's.
    """
    return _filled(model, path, *_read(path))


def _read(path: str | Path) -> tuple[str, Any]:
    path = Path(path)
    try:
        payload = read_tensors(path / "best.pt" if path.is_dir() else path, _KIND)
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
