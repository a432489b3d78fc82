"""GPUs by name: a card is found by the names that PyTorch and people give it, and nothing else is taken for one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gigagrad.devices.gpus import CARDS, MIDDLING, find_card


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("Quadro RTX 6000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("AMD Instinct MI300X", None),
        ("", None),
    ],
)
def test_a_card_is_found_by_the_words_of_its_name(given: str, name: str | None) -> None:
    found = find_card(given)
    assert (found and found.name) == name


def test_every_card_is_found_by_its_own_name() -> None:
    assert [find_card(card.name) for card in CARDS] == list(CARDS)
    assert [card.name for card in CARDS if card.measured] == ["H200"]


def test_an_unknown_card_is_taken_for_one_in_the_middle() -> None:
    by_bandwidth = sorted(CARDS, key=lambda card: card.memory_bytes_per_second)
    assert all(a.memory_bytes_per_second <= b.memory_bytes_per_second for a, b in pairwise(by_bandwidth))
    assert by_bandwidth.index(MIDDLING) in range(len(CARDS) // 3, 2 * len(CARDS) // 3 + 1)
