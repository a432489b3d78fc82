"""The module inside of what PyTorch wraps around one, and what is refused because nobody can look inside."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from gigagrad.errors import ConfigError, ModelError

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
