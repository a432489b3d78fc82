"""A trained model as one file: the name it was made from and its weights. Loading it runs no code from the file."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from gigagrad.errors import ModelError
from gigagrad.files import read_tensors, write_tensors
from gigagrad.models.registry import resolve

_KIND = "gigagrad model"


def save_model(path: str | Path, spec: str, model: nn.Module) -> None:
    """Write `model`, made by `resolve(spec)`, to `path`, atomically. Raises `WriteError`."""
    write_tensors(Path(path), {"format": _KIND, "version": 1, "spec": spec, "state_dict": model.state_dict()})


def load_model(path: str | Path) -> tuple[str, nn.Module]:
    """The spec and the model in a file of `save_model`, on the CPU, in eval mode.

    Raises `ModelError` when the file is missing or damaged, or when the spec now builds a different model.
    """
    try:
        payload = read_tensors(Path(path), _KIND)
    except ValueError as error:
        raise ModelError(f"cannot load the model: {error}; train it again or name another file") from error
    spec = str(payload["spec"])
    model = resolve(spec)
    try:
        model.load_state_dict(payload["state_dict"])
    except RuntimeError as error:
        raise ModelError(
            f"cannot load the model: the weights in {path} do not fit what {spec!r} builds now "
            f"({str(error).splitlines()[-1].strip()}); install the versions it was trained with"
        ) from error
    return spec, model.eval()
