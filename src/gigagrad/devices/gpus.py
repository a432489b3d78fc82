"""List GPUs with the rates of their data sheets.

Sources: NVIDIA's data sheets of H200, H100, A100, L40S, L4, A10, T4, V100, RTX 6000 Ada and RTX A6000, and its white
papers on the architectures of GeForce cards (Ampere GA102, Ada, RTX Blackwell). Sheets count tensor cores with
sparsity; here they are dense.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU by its data sheet."""

    name: str
    """All of its words are in the name that PyTorch gives it."""
    memory_bytes_per_second: float
    flops_per_second: float
    """The rate of tensor cores in TF32; of float32 where they have none."""
    measured: bool = False
    """True where rates that networks get were measured on one."""


CARDS: Final = (
    Card("H200", 4.8e12, 494.7e12, measured=True),
    Card("H200 NVL", 4.8e12, 417.5e12),
    Card("H100", 3.35e12, 494.7e12),
    Card("H100 PCIe", 2.0e12, 378e12),
    Card("H100 NVL", 3.9e12, 417.5e12),
    Card("A100", 1.555e12, 156e12),
    Card("A100 80GB", 2.039e12, 156e12),
    Card("A100 80GB PCIe", 1.935e12, 156e12),
    Card("L40S", 0.864e12, 183e12),
    Card("L4", 0.3e12, 60e12),
    Card("A10", 0.6e12, 62.5e12),
    Card("T4", 0.32e12, 8.1e12),
    Card("V100", 0.9e12, 15.7e12),
    Card("V100 PCIe", 0.9e12, 14e12),
    Card("RTX 3090", 0.936e12, 35.6e12),
    Card("RTX 4090", 1.008e12, 82.6e12),
    Card("RTX 5090", 1.792e12, 104.8e12),
    Card("RTX 6000 Ada", 0.96e12, 182.1e12),
    Card("RTX A6000", 0.768e12, 77.4e12),
)
MIDDLING: Final = next(card for card in CARDS if card.name == "RTX 4090")
"""The card that an unknown one is taken for: half of these have more memory bandwidth, half less."""
_OTHERS: Final = frozenset({"laptop", "mig"})
"""Words in names of cards that have less than their names' other words promise."""


def find_card(name: str) -> Card | None:
    """Find a card by the name that PyTorch or a person gives it; None for one that is not listed."""
    words = _parts_of(name)
    fitting = [card for card in CARDS if _parts_of(card.name) <= words]
    if not fitting or words & _OTHERS:
        return None
    return max(fitting, key=lambda card: len(_parts_of(card.name)))


def _parts_of(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))
