"""Compute the exact loss and gradients of any PyTorch module on a gigapixel image, in the memory you name.

engine = gigagrad.compile(model, loss, memory="2 GiB")
value = engine.backward(gigagrad.open_image("slide.svs"), gigagrad.open_image("mask.tif"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gigagrad.devices import heap

if TYPE_CHECKING:
    from gigagrad import images as images
    from gigagrad import losses as losses
    from gigagrad import masks as masks
    from gigagrad import models as models
    from gigagrad.errors import GigagradError as GigagradError
    from gigagrad.execution import Engine as Engine
    from gigagrad.execution import compile as compile
    from gigagrad.images import Image as Image
    from gigagrad.images import open_image as open_image
    from gigagrad.masks import open_bag as open_bag
    from gigagrad.masks import open_mask as open_mask
    from gigagrad.prediction import embed as embed
    from gigagrad.prediction import open_features as open_features
    from gigagrad.prediction import predict as predict
    from gigagrad.training import fit as fit

__all__ = [
    "Engine",
    "GigagradError",
    "Image",
    "compile",
    "embed",
    "fit",
    "losses",
    "models",
    "open_bag",
    "open_features",
    "open_image",
    "open_mask",
    "predict",
]
__version__ = "0.1.0"

heap.before_pytorch()

_HOMES = {
    "Engine": "gigagrad.execution",
    "GigagradError": "gigagrad.errors",
    "Image": "gigagrad.images",
    "compile": "gigagrad.execution",
    "embed": "gigagrad.prediction",
    "fit": "gigagrad.training",
    "open_bag": "gigagrad.masks",
    "open_features": "gigagrad.prediction",
    "open_image": "gigagrad.images",
    "open_mask": "gigagrad.masks",
    "predict": "gigagrad.prediction",
}


def __dir__() -> list[str]:
    """List what one may use, rooms that nobody has entered yet included."""
    import pkgutil

    rooms = (room.name for room in pkgutil.iter_modules(__path__) if not room.name.startswith("_"))
    return sorted({*__all__, "__version__", *rooms})


def __getattr__(name: str) -> Any:
    """Import rooms when their names are used: reading a slide's size need not load PyTorch."""
    import importlib.util

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'gigagrad' has no attribute {name!r}")
