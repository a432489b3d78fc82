"""Low-rank adapters of an encoder (LoRA, Hu et al., 2021), by `peft`: `W x + (alpha / rank) B A x`, `B` zero at first.

Everything else of the encoder is frozen.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from torch import nn

from gigagrad.errors import ModelError, did_you_mean
from gigagrad.models.libraries import import_library


def add_adapters(
    name: str,
    encoder: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: str | Sequence[str] = (),
) -> None:
    """Put adapters on the linear layers of `encoder`, or on its linear and 2-D convolutional layers that match a
    pattern of `targets` or lie inside a module that does. `alpha` is `rank` where it is not given.

    `name` is the model's, for messages. Raises `ModelError`.
    """
    layers = {key: type(part) for key, part in encoder.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
    patterns = (targets,) if isinstance(targets, str) else tuple(targets)
    chosen = [key for key, kind in layers.items() if not patterns and issubclass(kind, nn.Linear)]
    for pattern in patterns:
        found = [key for key in layers if any(fnmatch.fnmatchcase(key, each) for each in (pattern, f"{pattern}.*"))]
        if not found:
            raise ModelError(
                f"model {name!r}: no layer of the encoder matches {pattern!r}{did_you_mean(pattern, layers)}"
            )
        chosen += found
    if not chosen:
        raise ModelError(
            f"model {name!r}: the encoder has no linear layer; name others, as in "
            f"lora.targets={next(iter(layers), '*')}"
        )
    peft = import_library("peft", name, extra="lora")
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules="|".join(map(re.escape, dict.fromkeys(chosen))),  # an expression of whole names
    )
    peft.inject_adapter_in_model(settings, encoder)
