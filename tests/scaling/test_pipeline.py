"""The best split of a chain, against all of them."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gigagrad.errors import ConfigError
from gigagrad.scaling import Layer, Link, replicated, split

LINK = Link(1e9, 1e-3)
layers = st.lists(
    st.builds(
        Layer,
        st.sampled_from([0.0, 1.0, 2.0, 3.0, 6.0]),
        st.sampled_from([0, 4 * 10**8, 10**9, 3 * 10**9]),
        st.sampled_from([0, 10**9, 5 * 10**9]),
    ),
    min_size=1,
    max_size=5,
)
"""Few values, so that stages and cuts are often equally slow."""


def all_splits(count: int, ranks: int, first: int = 0) -> Iterator[list[tuple[int, int, int]]]:
    """Every way to cut layers `first` to `count` into stages `(first, stop, ranks)` on at most so many ranks."""
    if first == count:
        yield []
    for stop in range(first + 1, count + 1):
        for own in range(1, ranks + 1):
            for rest in all_splits(count, ranks - own, stop):
                yield [(first, stop, own), *rest]


def slowest(chain: Sequence[Layer], stages: list[tuple[int, int, int]]) -> float:
    cuts = [2 * (1e-3 + chain[first - 1].cut_bytes / 1e9) for first, _, _ in stages if first]
    sums = [
        max(
            sum(layer.seconds for layer in chain[first:stop]),
            2 * (own - 1) * (1e-3 + sum(layer.parameter_bytes for layer in chain[first:stop]) / own / 1e9),
        )
        / own
        for first, stop, own in stages
    ]
    return max(*cuts, *sums, 0)


@given(layers, st.integers(1, 5))
@example([Layer(3.0, 10**9, 5 * 10**9), Layer(2.0, 4 * 10**8, 10**9), Layer(3.0, 0, 5 * 10**9)], 4)  # 1-3, not 1-1-1
@example([Layer(0.0, 10**9, 5 * 10**9), Layer(2.0, 10**9, 10**9), Layer(2.0, 0, 10**9)], 5)  # 1-1, not 1-2
def test_no_split_is_faster_and_no_smaller_one_as_fast(chain, ranks):
    found = split(chain, ranks, LINK)
    stages = [(stage.first, stage.stop, stage.ranks) for stage in found.stages]
    every = list(all_splits(len(chain), ranks))
    assert stages in every
    assert found.seconds == pytest.approx(slowest(chain, stages)) == min(slowest(chain, some) for some in every)
    sizes = [
        (len(some), sum(own for _, _, own in some))
        for some in every
        if slowest(chain, some) <= found.seconds * (1 + 1e-12)
    ]
    assert (len(stages), sum(own for _, _, own in stages)) == min(sizes)


def test_few_parameters_are_copied_and_many_are_not():
    convolutions, dense = Layer(15.0, 10**6, 10**6), Layer(1.0, 0, 10**12)
    found = split([convolutions, dense], 16, LINK)
    assert str(found) == "15-1"
    assert found.seconds == pytest.approx(1.0)
    assert str(split([convolutions, convolutions], 16, LINK)) == "16"


def test_ranks_that_would_wait_for_a_cut_are_left_out():
    found = split([Layer(6.0, 10**9, 10**6), Layer(1.0, 0, 10**12)], 16, LINK)
    assert str(found) == "3-1"
    assert found.seconds == pytest.approx(2.002)


def test_a_wide_cut_is_not_worth_its_bytes():
    halves = [Layer(1.0, 12 * 10**8, 0), Layer(1.0, 0, 0)]
    no_copies = split(halves, 2, LINK, lambda stage, ranks, link: replicated(stage, 1, link))
    assert str(no_copies) == "1"
    assert no_copies.seconds == 2.0


@pytest.mark.parametrize(("chain", "ranks"), [([], 4), ([Layer(1.0, 1, 1)], 0)])
def test_a_pipeline_of_nothing_is_refused(chain, ranks):
    with pytest.raises(ConfigError, match="a layer and a rank at least"):
        split(chain, ranks, LINK)
