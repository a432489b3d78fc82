"""What ended a capture, in words: where in the user's code, why, and what mends the commonest mistakes."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gigagrad.errors import CaptureError, ImageError
from gigagrad.graphs.composite import is_user_code

if TYPE_CHECKING:
    from gigagrad.graphs.capture import InputSpec

_OF_BYTES = ("unsigned char", "could not infer output dtype", "torch.uint8", "Byte", "for index, but got")
"""In what PyTorch says of integers where it expects floats, or of small ones where it expects class ids."""


def explained(error: Exception, image: InputSpec, targets: tuple[InputSpec, ...]) -> CaptureError:
    """The module and the line of the user's code in which `error` was raised, its reason, and what mends it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [f for f in traceback.extract_tb(error.__traceback__) if is_user_code(f.filename)]
    modules = [found for frame in frames if isinstance(found := frame.f_locals.get("self"), nn.Module)]
    names = {id(module): name for name, module in modules[0].named_modules()} if modules else {}
    inside = [names[id(module)] for module in modules if names.get(id(module))]
    where = f" in module '{inside[-1].removeprefix('model.')}'" if inside else ""
    where += f" at {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    what = reason if isinstance(error, ImageError) else f"{type(error).__name__}: {reason}"
    in_loss = not any(name.partition(".")[0] == "model" for name in inside)
    remedy = _remedy(error, image, targets[0] if in_loss and targets else None)
    return CaptureError(f"cannot capture the model or the loss{where}: {what}{remedy}")


def _remedy(error: Exception, image: InputSpec, target: InputSpec | None) -> str:
    """What mends the commonest mistakes: bytes where floats are expected, class ids under a binary loss, branches.

    `target` is given where the loss failed rather than the model.
    """
    said = str(error)
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        return "; it branches on a computed value: compute both sides and choose with torch.where(condition, a, b)"
    if any(word in said for word in _OF_BYTES):
        if target is None:
            return (
                f"; the image arrives as {image.dtype} of shape {image.shape}: put torch.nn.Sequential("
                "gg.models.Normalise(), model) before the engine, or begin forward with x = x.float() / 255"
            )
        return (
            f"; the target arrives as {target.dtype} of shape {target.shape}: use a loss of gg.losses, or cast it: "
            "lambda output, target: loss(output, target.float()), with target[:, 0].long() for class ids"
        )
    if target is not None and target.field and "must be the same as input size" in said:
        return (
            f"; the target is {target.shape}: where the model's output has a channel for each class, use the loss ce "
            "(gg.losses.ce, --loss ce); otherwise both need one size"
        )
    return ""
