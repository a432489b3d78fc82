"""Kinds of work of convolutions, and which of their fields fill no whole vectors."""

import pytest

from gigagrad.work import Work, is_ragged, unfolded_flops


@pytest.mark.parametrize(
    ("weight", "groups", "forward", "of_weight"),
    [
        ((64, 3, 7, 7), 1, Work.REORDERED, Work.REORDERED),
        ((96, 1, 3, 3), 96, Work.REORDERED, Work.REORDERED),
        ((96, 1, 5, 5), 96, Work.REORDERED, Work.UNFOLDED),
        ((192, 1, 3, 3), 96, Work.UNFOLDED, Work.UNFOLDED),
        ((96, 3, 3, 3), 32, Work.UNFOLDED, Work.UNFOLDED),
        ((96, 4, 3, 3), 24, Work.REORDERED, Work.UNFOLDED),
        ((96, 8, 3, 3), 12, Work.REORDERED, Work.REORDERED),
    ],
)
def test_convolutions_without_a_kernel_of_their_own_unfold_windows(weight, groups, forward, of_weight):
    assert Work.of_convolution(weight, groups) is forward
    assert Work.of_convolution(weight, groups, of_weight=True) is of_weight


def test_unfolded_windows_take_as_long_for_many_channels_a_group_as_for_one():
    assert unfolded_flops(100, (96, 1, 5, 5), 96) == unfolded_flops(100, (96, 4, 5, 5), 24) == 2 * 100 * 96 * 25


@pytest.mark.parametrize(
    ("channels", "groups", "ragged"),
    [(3, 1, False), (20, 1, True), (32, 1, False), (96, 96, False), (100, 100, True), (96, 24, False), (96, 8, True)],
)
def test_vectors_of_channels_are_full_or_not(channels, groups, ragged):
    assert is_ragged(channels, groups) == ragged
