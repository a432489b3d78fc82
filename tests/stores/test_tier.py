"""What several ranks may take in a tier."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from gigagrad.allowances import FREE_SHARE
from gigagrad.boxes import Box
from gigagrad.devices import Machine
from gigagrad.errors import StoreError
from gigagrad.stores import DiskTier, FieldSpec, HostTier, MemoryTier, PlannedDiskTier
from gigagrad.stores.store import least_room
from tests.stores.test_own_tier import Bucket

HERE, THERE = ("here", 100), ("there", 90)


@pytest.mark.parametrize(
    ("rooms", "least"),
    [
        ([(100, HERE)], 100),
        ([(100, None), (90, None), (95, None)], 90),
        ([(100, HERE), (90, THERE)], 90),
        ([(100, HERE), (100, HERE)], 50),
        ([(100, HERE), (90, THERE), (99, ("here", 99))], 49),
        ([(30, HERE), (100, HERE)], 30),
        ([(100, HERE), (100, HERE), (20, None)], 20),
    ],
    ids=["alone", "nothing shared", "own disks", "one disk", "one disk and another", "a limit", "one apart"],
)
def test_what_is_shared_is_divided_and_the_least_counts(rooms, least):
    assert least_room(rooms) == least


def test_folders_of_one_disk_share_it_whatever_each_may_take(tmp_path):
    (tmp_path / "more").mkdir()
    one, two = DiskTier(tmp_path, 5).shared_room(), DiskTier(tmp_path / "more").shared_room()
    assert one is not None
    assert two is not None
    assert one[0] == two[0]
    assert one[1] > 5 == DiskTier(tmp_path, 5).room_bytes()


def test_another_disk_is_another_room(tmp_path, monkeypatch):
    names = []
    for device in (1, 2):
        monkeypatch.setattr(Path, "stat", lambda path, device=device: SimpleNamespace(st_dev=device))
        names.append(DiskTier(tmp_path)._disk()[0])
    monkeypatch.undo()
    assert names[0] != names[1]
    with pytest.raises(StoreError, match="no-such-folder"):
        DiskTier(tmp_path / "no-such-folder").shared_room()


def test_memory_of_the_host_is_shared_unless_each_was_given_some(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    shared = HostTier().shared_room()
    assert shared is not None
    assert shared[1] == HostTier().room_bytes() == int(1000 * FREE_SHARE)
    assert HostTier(5000).shared_room() is None


def test_fields_in_host_memory_lie_where_those_of_the_last_step_did(monkeypatch):
    tier, field = HostTier(), FieldSpec("field", (1, 1, 2048, 1024), torch.float32, (-2, -1))
    free = tier.room_bytes()
    store = tier.open(field.nbytes, Machine()).open_store(field)
    store.write(Box.whole(2048, 1024), torch.ones(field.shape))
    at = store.read(Box.whole(2048, 1024)).data_ptr()
    store.retire()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    assert tier.room_bytes() == field.nbytes < free
    again = tier.open(field.nbytes, Machine()).open_store(field)
    assert again.read(Box.whole(2048, 1024)).data_ptr() == at
    assert not again.read(Box.whole(2048, 1024)).any()
    again.retire()
    half = dataclasses.replace(field, shape=(1, 1, 1024, 1024))
    other = tier.open(half.nbytes, Machine()).open_store(half)
    assert tier.room_bytes() == 0, "nothing of another plan is held"
    other.retire()


def test_what_is_planned_for_without_being_here_is_shared_by_nobody():
    assert [tier.shared_room() for tier in (PlannedDiskTier(5), MemoryTier(), Bucket("here", None))] == [None] * 3
