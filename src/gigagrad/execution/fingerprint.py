"""Noticing that a model has changed in a way that capture could see."""

from __future__ import annotations

from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str)


def fingerprint(module: nn.Module) -> int:
    """Changes whenever capture could: module types, modes and settings; shapes, dtypes, ties and `requires_grad`."""
    modules = tuple((name, type(m), _settings(m)) for name, m in module.named_modules())
    number: dict[int, int] = {}  # tied tensors have one number
    parameters = tuple(
        (name, number.setdefault(id(p), len(number)), tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in module.named_parameters(remove_duplicate=False)
    )
    buffers = tuple(
        (name, number.setdefault(id(b), len(number)), tuple(b.shape), b.dtype)
        for name, b in module.named_buffers(remove_duplicate=False)
    )
    return hash((modules, parameters, buffers))


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """What a forward may read of its module besides tensors: plain values (`training` among them) and functions."""
    settings: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if value is None or isinstance(value, _PLAIN):
            settings.append((name, value))
        elif isinstance(value, tuple | list) and all(isinstance(item, _PLAIN) for item in value):
            settings.append((name, tuple(value)))
        elif callable(value):
            settings.append((name, id(value)))
    return tuple(settings)
