"""Whose slides are whose, what the environment says of it, and who is let in beside whom."""

import json
import os
import platform

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.errors import ConfigError
from gigagrad.shares import Share, claimed, share_from


@given(st.lists(st.integers(0, 10**9), max_size=30), st.integers(1, 12))
def test_every_item_is_in_one_share_in_its_order_and_shares_are_alike(sizes, count):
    items = list(range(len(sizes)))
    parts = [Share(number, count).deal(items, sizes) for number in range(1, count + 1)]
    assert sorted(item for part in parts for item in part) == items
    assert all(list(part) == sorted(part) for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    largest = max(sizes, default=0)
    of_shares = [sum(sizes[item] for item in part) for part in parts]
    assert max(of_shares) - min(of_shares) <= largest


def test_the_largest_are_dealt_out_first_to_and_fro():
    sizes = [1, 2, 30, 20, 10, 9]
    assert Share(1, 2).deal("abcdef", sizes) == ("b", "c", "f")
    assert Share(2, 2).deal("abcdef", sizes) == ("a", "d", "e")
    assert Share(1, 1).deal("abcdef", sizes) == tuple("abcdef")


@pytest.mark.parametrize("text", ["0/4", "5/4", "x", "1/0", "1", "1/2/3", "-1/4", " 1/2", "1/2\n", "٣/4"])
def test_an_odd_share_is_said_in_one_line(text):
    with pytest.raises(ConfigError, match="I/N with I from 1 to N, as 2/4"):
        Share.parse(text)


def array(**values):
    return {f"SLURM_ARRAY_TASK_{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("environment", "share", "said_by"),
    [
        ({}, "1/1", ""),
        ({"RANK": "1"}, "1/1", ""),
        (array(ID="3", MIN="0", MAX="3", COUNT="4"), "4/4", "SLURM_ARRAY_TASK_ID"),
        (array(ID="1", MIN="1", MAX="4", COUNT="4"), "1/4", "SLURM_ARRAY_TASK_ID"),
        (array(ID="20", MIN="10", MAX="30", COUNT="3", STEP="10"), "2/3", "SLURM_ARRAY_TASK_ID"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "1/2", "RANK"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", **array(ID="2", MIN="1", MAX="3", COUNT="3")},
            "4/6",
            "SLURM_ARRAY_TASK_ID and RANK",
        ),
    ],
)
def test_slurm_and_torchrun_say_which_share(environment, share, said_by):
    assert share_from(environment) == (share, said_by)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (array(ID="7", MIN="1", MAX="7", COUNT="3"), "the 3 tasks of the Slurm array from 1 to 7 have gaps"),
        (array(ID="7"), "SLURM_ARRAY_TASK_MIN is None"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', expected a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "no share 3/2"),
    ],
)
def test_an_environment_that_says_no_share(environment, said):
    with pytest.raises(ConfigError, match=said) as told:
        share_from(environment)
    assert "I/N" in str(told.value)


def claim_of(folder, process, slides, *, host=None, later=0.0):
    path = folder / f".claim-other-{process.pid}.json"
    host = platform.node() if host is None else host
    started = process.create_time() + later
    told = {"share": "2/4", "host": host, "pid": process.pid, "started": started, "slides": slides}
    path.write_text(json.dumps(told))
    return path


def test_who_is_at_work_on_the_same_slides_is_named(tmp_path):
    parent = psutil.Process(os.getppid())
    theirs = claim_of(tmp_path, parent, ["b", "c"])
    with claimed(tmp_path, Share(1, 4), ["a"]):
        (own,) = set(tmp_path.iterdir()) - {theirs}
        assert json.loads(own.read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == [theirs]
    with (
        pytest.raises(ConfigError, match=rf"process {parent.pid}, started .*, is at work on c in .* \(share 2/4\)"),
        claimed(tmp_path, Share(1, 1), ["a", "c"]),
    ):
        pytest.fail("two would do the same")
    assert list(tmp_path.iterdir()) == [theirs]


def test_claims_of_the_dead_and_of_other_machines_hold_nobody_up(tmp_path):
    parent = psutil.Process(os.getppid())
    for settings in ({"later": 5.0}, {"host": "elsewhere"}):
        theirs = claim_of(tmp_path, parent, ["a"], **settings)
        with claimed(tmp_path, Share(2, 4), ["a"]):
            assert not theirs.exists()
    theirs = claim_of(tmp_path, parent, ["b"], host="elsewhere")
    (tmp_path / ".claim-odd.json").write_text('{"slides": [')
    with pytest.raises(KeyError), claimed(tmp_path, Share(2, 4), ["a"]):
        raise KeyError
    assert list(tmp_path.iterdir()) == [theirs]
