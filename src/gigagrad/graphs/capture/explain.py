"""Explain the end of a capture: where in the user's code, why, and what mends the commonest mistakes."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gigagrad.errors import CaptureError, ImageError
from gigagrad.graphs.capture.loss_module import is_user_code
from gigagrad.graphs.graph import InputSpec

_OF_BYTES = ("unsigned char", "could not infer output dtype", "torch.uint8", "Byte", "for index, but got")
"""Parts of PyTorch's messages about integers where it expects floats, or small ones where it expects class ids."""
_OF_VALUES = (DataDependentOutputException, GuardOnDataDependentSymNode)
_TO_PYTHON = re.compile(r"\b(float|int|bool|len|str|round|range)\(|\.(item|tolist|numpy)\(|\{.*:.*\}")
"""Code that makes a number of Python of a tensor."""

_ONE_ANSWER = re.compile(
    r"must be the same as input size \(torch\.Size\(\[\d+, \d+\]\)\)|0D or 1D target tensor expected"
)
"""PyTorch's messages about an output `(N, C)` beside a mask."""
_CHANNELS = re.compile(r"to have (\d+) channels, but got (\d+) channels")
"""PyTorch's message about the first convolution: the channels of its weight, and those that arrived."""

_LIMITS: tuple[tuple[str, str, str], ...] = (
    (
        r"_ctc_loss",
        "CTC is computed from values, which are not there while the graph is made",
        "train that model by PyTorch alone, or with a loss of PyTorch's other operators",
    ),
    (
        r"DynamicOutputShape|nonzero|masked_select|_unique|bincount|repeat_interleave",
        "how large the result is depends on values, which are not there while the graph is made",
        "keep every pixel and weigh it: torch.where(mask, x, 0).sum() / mask.sum() in the place of x[mask].mean()",
    ),
    (
        r"numpy\(\) is not supported|FakeTensor\.__format__|Can't pickle",
        "it makes a value of NumPy, a text or a file out of a tensor, whose values are not there yet",
        "compute with PyTorch's operators (torch.quantile, torch.sort, ...), or outside of the model and the loss",
    ),
    (
        r"no_dispatch\(\) before calling",
        "it makes a tensor out of other memory (an array of NumPy, constants of frozen TorchScript)",
        "make it once in __init__ as a buffer (register_buffer), or copy the array by torch.tensor(array)",
    ),
    (
        r"TorchScript interpreter|OrderedDictWrapper|ScriptFunction",
        "it calls TorchScript, whose inside cannot be captured",
        "call the Python function or module itself: take torch.jit.script away, or set PYTORCH_JIT=0 before the start",
    ),
    (
        r"UncapturedHigherOrderOp|higher order operator|unbacked_symbols",
        "torch.cond and the other operators that take functions are not captured",
        "compute both sides and choose with torch.where(condition, a, b), or loop a fixed number of times",
    ),
    (
        r"data pointer of Tensor \(e\.g\.",
        "it asks where a tensor lies in memory (data_ptr, copy.deepcopy, a kernel of its own)",
        "use clone() in the place of a deep copy, and register kernels by torch.library.custom_op",
    ),
    (
        r"data is not allocated yet",
        "it takes numbers out of a tensor, and there are no values yet",
        "give it numbers of Python, as in torch.tensor_split(x, (2, 4))",
    ),
    (
        r"uninitialized parameter",
        "a lazy layer (nn.LazyConv2d, ...) has no weights yet",
        "run the model once before, on a small image of as many channels",
    ),
    (
        r"quantized::",
        "quantised layers have integer weights, of which there is no gradient",
        "use the network as it was before it was quantised",
    ),
    (
        r"Guard failed|Expected input .* to be equal|shape constraint",
        "this exported program takes images of the size with which it was exported",
        "give the torch.nn.Module itself, or export at the size of the image",
    ),
    (
        r"fake tensor in the exported program|doesn't have storage|has no attribute 'constant'",
        "it makes a tensor where PyTorch's tracing cannot follow (torch.vmap, torch.func, TorchScript)",
        "write it with broadcasting, torch.einsum or other operators",
    ),
)
"""PyTorch's messages, their meaning, and a remedy. The first that is found in an error's text counts."""


def explained(error: Exception, image: InputSpec, targets: tuple[InputSpec, ...]) -> CaptureError:
    """Name the module and the line of the user's code in which `error` was raised, its reason, and what mends it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if (uncopied := re.match(r"cannot (?:pickle|copy|deepcopy) .*", str(error))) is not None:
        keys = [str(f.f_locals.get("key")) for f in frames if f.f_code.co_name == "_deepcopy_dict"]
        name = ".".join(key for key in keys if key != "_modules") or "it"
        return CaptureError(
            f"the model and the loss are traced on a copy, and '{name}' cannot be copied ({uncopied[0]}); hold it "
            "outside of both, or give its class a __deepcopy__ that returns self"
        )
    lines = [f for f in traceback.extract_tb(error.__traceback__) if is_user_code(f.filename)]
    modules = [found for frame in frames if isinstance(found := frame.f_locals.get("self"), nn.Module)]
    names = {id(module): name for name, module in modules[0].named_modules()} if modules else {}
    inside = [names[id(module)] for module in modules if names.get(id(module))]
    where = f" in module '{inside[-1].removeprefix('_export_root.').removeprefix('model.')}'" if inside else ""
    where += f" at {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
    in_loss = not any(name.partition(".")[0] == "model" for name in inside)
    target = targets[0] if in_loss and targets else None
    what, remedy = _fault_and_remedy(error, traceback.extract_tb(error.__traceback__), image, target)
    return CaptureError(f"cannot capture the model or the loss{where}: {what}{remedy}")


def _fault_and_remedy(
    error: Exception, stack: traceback.StackSummary, image: InputSpec, target: InputSpec | None
) -> tuple[str, str]:
    """Return the fault and a remedy. `target` is given where the loss failed rather than the model."""
    said = str(error).strip()
    if isinstance(error, _OF_VALUES):
        return _of_values(stack)
    for pattern, reason, remedy in _LIMITS:
        if re.search(pattern, f"{type(error).__name__}: {said}"):
            return reason, f"; {remedy}"
    if isinstance(error.__cause__ or error.__context__, _OF_VALUES):
        return _of_values(stack)
    reason = said.splitlines()[0] if said else type(error).__name__
    what = reason if isinstance(error, ImageError) else f"{type(error).__name__}: {reason}"
    return what, _remedy(error, image, target)


def _of_values(stack: traceback.StackSummary) -> tuple[str, str]:
    """Return fault and remedy of code that asks for a value: a branch, a check of PyTorch's, a number of a tensor."""
    names = [frame.name for frame in stack]
    if "gaussian_nll_loss" in names:
        return "gaussian_nll_loss looks whether any variance is negative, and there are no values yet", (
            "; write it out: v = var.clamp(min=1e-6), then 0.5 * (v.log() + (output - target) ** 2 / v).mean()"
        )
    if any(Path(frame.filename).parts[-3:] == ("torch", "jit", "_trace.py") for frame in stack):
        return "it traces with torch.jit, whose inside cannot be captured", "; call the Python function itself"
    if any("distributions" in Path(frame.filename).parts for frame in stack):
        return "torch.distributions checks its arguments, and there are no values yet", "; say validate_args=False"
    if "one_hot" in (stack[-1].line or "") or any("one_hot(" in (frame.line or "") for frame in stack):
        return "F.one_hot looks for the largest class, and there are no values yet", (
            "; say how many there are: F.one_hot(ids, num_classes)"
        )
    line = next((frame.line or "" for frame in reversed(stack) if is_user_code(frame.filename)), "")
    if _TO_PYTHON.search(line):
        return "it takes a number out of a tensor, and there are no values yet", (
            "; keep it a tensor: x.mean() in the place of float(x.mean()); what branches on it chooses with "
            "torch.where(condition, a, b)"
        )
    return "it branches on a computed value, and there are no values yet", (
        "; compute both sides and choose with torch.where(condition, a, b)"
    )


def _remedy(error: Exception, image: InputSpec, target: InputSpec | None) -> str:
    """Return a remedy for the commonest mistakes: bytes in the place of floats, class ids under a binary loss."""
    said = str(error)
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
    if target is not None and target.field and _ONE_ANSWER.search(said):
        return (
            "; the model gives one answer for the whole image, and the target has a value for each pixel: use a "
            "segmentation model (paper-unet, smp:Unet), or a label for each image"
        )
    if (channels := _CHANNELS.search(said)) is not None and target is None and image.shape[1:2] == (int(channels[2]),):
        return (
            f"; the image has {channels[2]} channels, and the model is made for {channels[1]}: convert the image, "
            f"choose bands of it, or make the model for so many (in_channels={channels[2]} of smp, in_chans of timm)"
        )
    if target is not None and target.field and "must be the same as input size" in said:
        return (
            f"; the target is {target.shape}: where the model's output has a channel for each class, use the loss ce "
            "(gg.losses.ce, --loss ce); otherwise both need one size"
        )
    if target is not None and "required positional argument" in said:
        return "; a loss is called as loss(output, target): bind what else it takes with functools.partial"
    return ""
