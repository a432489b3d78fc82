"""One image by several ranks: everybody gets the bits that one process gets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.exactness import generated, networks, test_bags
from tests.ranks.bits import bits_by_ranks

# A seed of tests/exactness/generated.py and a number of ranks; bench/hashes.py and bench/virtual_ranks.py have more.
CASES = (3, 2), (8, 3), (14, 5), (20, 3), (21, 4)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("seed", "ranks"), CASES)
def test_a_generated_network(seed: int, ranks: int) -> None:
    case = generated.make_case(seed)
    alone, by_ranks = bits_by_ranks(case.model, case.loss, case.image, case.target, ranks=(ranks,), tile=case.tile)
    assert by_ranks == alone, case.description


def test_norms_in_training_mode() -> None:
    node = networks.Node
    recipe = networks.Recipe(
        (2, 24, 30),
        (
            node("conv", (0,), {"out": 4, "kernel_size": 3}),
            node("norm", (1,), {"kind": "batch"}),
            node("conv", (2,), {"out": 1, "kernel_size": 3}),
        ),
        (3,),
        loss="mse",
        loss_options={},
        tile=(7, 9),
    )
    case = networks.make_case(recipe)
    alone, by_ranks = bits_by_ranks(case.model, case.loss, case.image, case.target, ranks=(4,), tile=case.tile)
    assert by_ranks == alone


@pytest.mark.parametrize(
    ("encoder", "head", "ranks"), [("batch norms", "attention", (2, 3)), ("windows", "transformer", (1, 4))]
)
def test_patches_of_a_bag(encoder: str, head: str, ranks: tuple[int, ...]) -> None:
    """Patches are dealt out in chunks, as tiles of an image are."""
    model, bag = test_bags.model_of(encoder, head, training=True), test_bags.bag_of(37)
    alone, *by_ranks = bits_by_ranks(model, F.cross_entropy, bag, torch.tensor([1]), ranks=ranks, tile=(3, 1), seed=0)
    assert by_ranks == [alone] * 2


def test_patches_of_an_image() -> None:
    model = test_bags.Cut(test_bags.model_of("batch norms", "attention", training=True), "reshape")
    image = torch.randint(0, 256, (3, 4 * test_bags.SIDE, 5 * test_bags.SIDE), dtype=torch.uint8)
    alone, by_ranks = bits_by_ranks(model, F.cross_entropy, image, torch.tensor([1]), ranks=(3,), tile=(1, 2))
    assert by_ranks == alone
