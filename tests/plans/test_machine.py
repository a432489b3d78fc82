"""The machine's profile: saved and read back as it was, or refused with a reason; nothing changes without one."""

import dataclasses
import importlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigagrad.plans import Machine, machine
from gigagrad.plans.machine import (
    ProfileError,
    Seconds,
    Sharing,
    TimeModel,
    machine_key,
    profile_path,
    read_profile,
    typical_rate,
    write_profile,
)
from tests.plans.networks import plan_of

MODEL = TimeModel({"dense.f.flops": 1e-11, "tile.calls": 3e-4}, 0.12)
CALIBRATED = Machine(
    threads=2,
    spinning=Sharing(0.4, 0.9, 0.3),
    passive=Sharing(0.2, 0.8, 0.6),
    copy_bytes_per_second=9e9,
    disk_write_bytes_per_second=4e8,
    disk_read_bytes_per_second=2e9,
    file_bytes_per_second=1.2e9,
    codec_bytes_per_second=3e8,
    codec_ratio=1.1,
    model=MODEL,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "machine.json"


@pytest.fixture
def home(monkeypatch, path):
    """Where this machine's profile is looked for."""
    monkeypatch.setattr("gigagrad.plans.machine.profile_path", lambda: path)
    return path


def test_a_profile_comes_back_as_it_was(home):
    write_profile(home, CALIBRATED)
    found = Machine.detect(2)
    assert found == dataclasses.replace(CALIBRATED, cache_bytes=found.cache_bytes)
    assert found.model.error == 0.12


def test_no_profile_is_no_fault(home):
    said = []
    assert Machine.detect(3, said.append) == Machine(threads=3, cache_bytes=Machine.detect(1).cache_bytes)
    assert said == []


def broken(path, damage):
    write_profile(path, CALIBRATED)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: c.update(format="something else"), "not in the format of this version"),
        (lambda c: c["machine"].update(threads=4096), "belongs to"),
        (lambda c: c.pop("rates"), "damaged"),
        (lambda c: c["rates"].pop("copy_bytes_per_second"), "damaged"),
        (lambda c: c["rates"].update(copy_bytes_per_second="fast"), "damaged"),
        (lambda c: c["sharing"]["passive"].update(shared_efficiency="fast"), "damaged"),
        (lambda c: c["sharing"]["spinning"].update(shared_efficiency=True), "damaged"),
        (lambda c: c["sharing"]["spinning"].update(locks=1.0), "damaged"),
        (lambda c: c["sharing"].pop("passive"), "damaged"),
        (lambda c: c.pop("sharing"), "damaged"),
        (lambda c: c.update(seconds_per_unit=[1, 2]), "damaged"),
        (lambda c: c["seconds_per_unit"].update({"dense.f.flops": -1.0}), "damaged"),
        (lambda c: c["seconds_per_unit"].update({"dense.f.flops": float("nan")}), "damaged"),
        (lambda c: c.pop("error"), "damaged"),
    ],
)
def test_a_damaged_or_foreign_profile_is_refused_in_one_sentence(home, damage, reason):
    broken(home, damage)
    said = []
    assert Machine.detect(2, said.append).model is None
    (text,) = said
    assert reason in text
    assert "gigagrad calibrate" in text
    assert "\n" not in text


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("bytes") / "machine.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError):
        read_profile(path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_no_json_crashes_the_reader(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "machine.json"
    write_profile(path, CALIBRATED)
    content = json.loads(path.read_text())
    for name in ("rates", "seconds_per_unit", "error", "machine"):
        path.write_text(json.dumps(content | {name: value}))
        try:
            read_profile(path)
        except ProfileError:
            continue
        assert name in ("seconds_per_unit", "error")  # an empty table, a number


def test_the_profile_is_kept_by_machine_in_the_users_cache(monkeypatch, tmp_path):
    machine = importlib.import_module("gigagrad.plans.machine")
    monkeypatch.setattr(machine, "profile_path", profile_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = machine.profile_path()
    assert path.parent == tmp_path / "gigagrad"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert machine.profile_path() != path
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    assert machine.profile_path().is_absolute()
    assert machine_key()["threads"] == 4096


def test_a_model_is_a_sum_and_what_it_has_not_met_is_typical():
    work = {"dense.f.flops": 2e9, "tile.calls": 10.0, "norm.f.cold": 1e6}
    assert MODEL.seconds(work) == pytest.approx(2e-2 + 3e-3 + 1e6 * typical_rate("norm.f.cold"))


@pytest.fixture(autouse=True)
def usual_waiting(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)


def test_threads_share_out_whole_tiles_and_wait_for_the_first_and_the_last():
    plain, seconds = Machine(threads=2, spinning=Sharing(0.5, 1.0, 0.5)), Seconds(12.0)
    assert plain.wall_seconds(seconds, 2, 8) == 6 + 0.5 * 12 / 8
    assert plain.wall_seconds(seconds, 2, 1) == 12  # one of them has nothing to do
    assert plain.wall_seconds(seconds, 2, 3) == 8  # two rounds
    assert plain.wall_seconds(seconds, 1, 8) == 8
    slower = dataclasses.replace(plain, spinning=Sharing(0.1, 0.8, 0.5))
    assert slower.wall_seconds(seconds, 2, 8) == pytest.approx(12 / 1.8 + 0.75)
    assert slower.wall_seconds(seconds, 1, 8) == pytest.approx(12 / 1.1)


@pytest.mark.parametrize(("policy", "expected"), [("passive", 10), ("PASSIVE", 10), ("active", 6), ("", 6)])
def test_planning_takes_how_threads_wait_in_its_process(monkeypatch, policy, expected):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    machine = Machine(threads=2, spinning=Sharing(1.0, 1.0, 0.0), passive=Sharing(0.2, 0.2, 0.0))
    assert machine.wall_seconds(Seconds(12.0), 1, 8) == machine.wall_seconds(Seconds(12.0), 2, 8) == expected


def test_threads_that_share_operators_do_not_share_the_calls():
    plain = Machine(threads=2)
    assert plain.wall_seconds(Seconds(12.0, 3.0), 1, 8) == 8 + 3
    parts = MODEL.split({"dense.f.flops": 2e9, "tile.calls": 10.0, "dense.f.calls": 5.0})
    assert parts.kernels == pytest.approx(2e-2)
    assert parts.calls == pytest.approx(3e-3 + 5 * typical_rate("dense.f.calls"))
    assert parts.total == MODEL.seconds({"dense.f.flops": 2e9, "tile.calls": 10.0, "dense.f.calls": 5.0})


def test_only_a_calibrated_machine_promises_seconds(unet, gate):
    for graph in (unet, gate):
        bare = plan_of(graph, machine=Machine())
        assert bare.predicted_seconds is None
        assert [stage.seconds for stage in bare.stages] == [None] * len(bare.stages)
        for backward in (True, False):
            plan = plan_of(graph, machine=dataclasses.replace(Machine(), model=MODEL), backward=backward)
            assert plan.predicted_seconds == pytest.approx(sum(stage.seconds for stage in plan.stages))
            assert plan.predicted_seconds > 0


def test_a_backward_takes_longer_and_two_threads_less(unet):
    one = dataclasses.replace(Machine(), model=MODEL)
    tiles = ((40, 40),)
    full = plan_of(unet, machine=one, tiles=tiles).predicted_seconds
    assert plan_of(unet, machine=one, backward=False, tiles=tiles).predicted_seconds < full
    assert plan_of(unet, machine=dataclasses.replace(one, threads=2), tiles=tiles).predicted_seconds < full


def test_dearer_tiles_are_larger(unet):
    """What the model says decides: where every tile costs a fortune, there are few of them."""
    cheap = plan_of(unet, machine=dataclasses.replace(Machine(), model=TimeModel({"tile.calls": 0.0}, 0.1)))
    dear = plan_of(unet, machine=dataclasses.replace(Machine(), model=TimeModel({"tile.calls": 10.0}, 0.1)))
    assert dear.tile_count <= cheap.tile_count
    assert dear.tile_count == 1


@pytest.mark.parametrize(
    ("reported", "mebibytes"), [(["48K", "2048K", "491520K"], 32), (["48K", "1M", "16384K"], 16), ([], 32)]
)
def test_a_cache_that_a_whole_server_shares_is_not_counted_on(reported, mebibytes, monkeypatch, tmp_path):
    for index, size in enumerate(reported):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(machine, "_CACHES", tmp_path)
    assert machine.cache_bytes() == mebibytes * 2**20
