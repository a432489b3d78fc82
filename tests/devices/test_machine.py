"""The machine's profile: saved and read back as it was, or refused with a reason; nothing changes without one."""

import dataclasses
import importlib
import json
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gigagrad.devices import Machine, machine
from gigagrad.devices.gpus import CARDS, MIDDLING
from gigagrad.devices.machine import (
    Gpu,
    ProfileError,
    machine_key,
    profile_path,
    read_profile,
    write_profile,
)
from gigagrad.work import Work

CALIBRATED = Machine(threads=2).with_rates({name: 1.1 * rate for name, rate in Machine().rates.items()})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "machine.json"


@pytest.fixture
def home(monkeypatch, path):
    """Where this machine's profile is looked for."""
    monkeypatch.setattr("gigagrad.devices.machine.profile_path", lambda card="": path)
    return path


def test_a_profile_comes_back_as_it_was(home):
    write_profile(home, CALIBRATED)
    found = Machine.detect(2)
    assert found == dataclasses.replace(CALIBRATED, cache_bytes=found.cache_bytes)


def test_no_profile_is_no_fault(home):
    said: list[Any] = []
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
        (lambda c: c["rates"].update(flops_per_second=0.0), "damaged"),
        (lambda c: c["rates"].update(flops_per_second=10**400), "damaged"),
        (lambda c: c["rates"].update(flops_per_second=1e-300), "damaged"),
        (lambda c: c["rates"].update(flops_per_second=True), "damaged"),
        (lambda c: c["rates"].update(shared_efficiency=-1.0), "damaged"),
        (lambda c: c["rates"].update(shared_efficiency=float("nan")), "damaged"),
        (lambda c: c["rates"].update(locks=1.0), "damaged"),
    ],
)
def test_a_damaged_or_foreign_profile_is_refused_in_one_sentence(home, damage, reason):
    broken(home, damage)
    said: list[Any] = []
    assert not Machine.detect(2, said.append).calibrated
    (text,) = said
    assert reason in text
    assert "gigagrad calibrate" in text
    assert "\n" not in text


def test_a_profile_of_another_machine_is_that_machine_for_whoever_asks(path):
    def elsewhere(content):
        content["machine"] = {"processor": "another", "threads": 48, "torch": "2.0"}

    broken(path, elsewhere)
    found = Machine.from_profile(path)
    assert (found.threads, found.rates, found.calibrated) == (48, CALIBRATED.rates, True)
    with pytest.raises(ProfileError, match="belongs to"):
        read_profile(path)


@pytest.mark.parametrize(
    "machine", [None, [], {}, {"threads": 0}, {"threads": True}, {"threads": 2.5}, {"threads": 1e9}]
)
def test_a_profile_without_its_threads_is_no_machine(path, machine):
    broken(path, lambda content: content.update(machine=machine))
    with pytest.raises(ProfileError, match=r"how many threads.*'gigagrad calibrate' saved"):
        Machine.from_profile(path)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", "!!python/object/apply:os.abort []", '{"format": "other"}'])
def test_what_is_no_profile_is_refused_with_a_remedy(path, text):
    if text is not None:
        path.parent.mkdir()
        path.write_text(text)
    with pytest.raises(ProfileError, match="name a file that this version's 'gigagrad calibrate' saved") as refused:
        Machine.from_profile(path)
    assert str(path) in str(refused.value)


@given(st.binary(max_size=200))
@example(b"[" * 100_000)
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
    for name in ("rates", "machine", "format"):
        path.write_text(json.dumps(content | {name: value}))
        with pytest.raises(ProfileError):
            read_profile(path)


def test_the_profile_is_kept_by_machine_in_the_users_cache(monkeypatch, tmp_path):
    machine = importlib.import_module("gigagrad.devices.machine")
    monkeypatch.setattr(machine, "profile_path", profile_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = machine.profile_path()
    assert path.parent == tmp_path / "gigagrad"
    assert len({path, machine.profile_path("NVIDIA L4"), machine.profile_path("NVIDIA L40S")}) == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert machine.profile_path() != path
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    assert machine.profile_path().is_absolute()
    assert machine_key()["threads"] == 4096


def test_an_operator_takes_its_call_its_bytes_and_its_products():
    machine = Machine(cache_bytes=1000, seconds_per_operator=1, cached_bytes_per_second=100, memory_bytes_per_second=10)
    assert machine.operator_seconds(400, 0) == 1 + 4
    assert machine.operator_seconds(600, 0) == 1 + 60
    assert machine.operator_seconds(0, 2 * machine.flops_per_second) == 1 + 2


def test_threads_share_out_whole_tiles_and_wait_for_the_first_and_the_last():
    plain, seconds = Machine(threads=2), 12.0
    assert plain.wall_seconds(seconds, 0, 2, 8) == 6 + 0.5 * 12 / 8
    assert plain.wall_seconds(seconds, 0, 2, 1) == 12  # one of them has nothing to do
    assert plain.wall_seconds(seconds, 0, 2, 3) == 8  # two rounds
    slower = dataclasses.replace(plain, side_by_side_efficiency=0.8)
    assert slower.wall_seconds(seconds, 0, 2, 8) == pytest.approx(12 / 1.8 + 0.75)


def test_pythons_lock_lets_threads_call_one_at_a_time():
    machine = Machine(threads=4, seconds_per_operator=1e-3)
    assert machine.wall_seconds(12.0, 9000, 4, 1000) == 9
    assert machine.wall_seconds(12.0, 1000, 4, 1000) == pytest.approx(3 + 0.5 * 12 / 1000)


def test_threads_of_one_tile_share_the_work_of_operators_that_have_enough_and_not_the_calls():
    machine = Machine(threads=4, seconds_per_operator=1e-3, shared_efficiency=0.5)
    assert machine.wall_seconds(12.0, 0, 1, 8) == pytest.approx(12 / 2.5)
    assert machine.wall_seconds(12.0, 2000, 1, 8) == pytest.approx(2 + 10 / 2.5)
    # 30 us of work each: one and a half thread's.
    assert machine.wall_seconds(1.03, 1000, 1, 8) == pytest.approx(1 + 0.03 / 1.25)
    assert machine.wall_seconds(1.01, 1000, 1, 8) == pytest.approx(1.01)


@pytest.mark.parametrize(
    ("reported", "mebibytes"), [(["48K", "2048K", "491520K"], 32), (["48K", "1M", "16384K"], 16), ([], 32)]
)
def test_a_cache_that_a_whole_server_shares_is_not_counted_on(reported, mebibytes, monkeypatch, tmp_path):
    for index, size in enumerate(reported):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(machine, "_CACHES", tmp_path)
    assert machine.cache_bytes() == mebibytes * 2**20


CARD = "NVIDIA L4"
MEASURED = Gpu.typical(CARD).with_rates({name: 1.1 * rate for name, rate in Gpu().rates.items()})


def test_profiles_of_processors_hold_these_rates():
    assert Machine.profile_format == "gigagrad machine profile 11"
    assert set(machine_key()) == {"processor", "threads", "torch"}
    assert set(Machine().rates) == {
        *("flops_per_second", "cached_bytes_per_second", "memory_bytes_per_second", "seconds_per_operator"),
        *("shared_efficiency", "side_by_side_efficiency", "copy_bytes_per_second", "file_bytes_per_second"),
        *("reordered_bytes_per_second", "unfolded_flops_per_second", "statistics_bytes_per_second"),
        *("reordered_memory_bytes_per_second", "ragged_bytes_per_second", "seconds_per_autograd_call"),
        *("window_bytes_per_second", "new_bytes_per_second", "seconds_per_tile", "seconds_per_pass"),
        *("disk_write_bytes_per_second", "disk_read_bytes_per_second", "codec_bytes_per_second", "codec_ratio"),
    }


def test_a_gpu_s_profile_comes_back_as_it_was_for_that_card_alone(home):
    assert Gpu.detected(CARD) == Gpu.typical(CARD)
    write_profile(home, MEASURED)
    assert Gpu.detected(CARD) == Gpu.from_profile(home) == MEASURED
    assert machine_key(CARD)["card"] == CARD
    assert {"processor", "torch", "cuda"} <= set(machine_key(CARD))
    said: list[Any] = []
    assert Gpu.detected("NVIDIA L40S", said.append) == Gpu.typical("NVIDIA L40S")
    (text,) = said
    assert "belongs to" in text
    assert "run 'gigagrad calibrate --device cuda'" in text


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: c["machine"].pop("card"), "which card"),
        (lambda c: c["machine"].update(card=4), "which card"),
        (lambda c: c.update(machine=[]), "which card"),
        (lambda c: c["rates"].pop("seconds_per_tile"), "lacks a rate"),
        (lambda c: c["rates"].update(seconds_per_tile=-1.0), "lacks a rate"),
        (lambda c: c.update(format=Machine.profile_format), "not in the format"),
    ],
)
def test_a_gpu_s_profile_without_its_card_or_a_rate_is_refused(path, damage, reason):
    write_profile(path, MEASURED)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=rf"{reason}.*'gigagrad calibrate --device cuda' saved"):
        Gpu.from_profile(path)


def test_a_processor_s_profile_is_no_gpu_s_nor_the_other_way_round(path):
    write_profile(path, CALIBRATED)
    with pytest.raises(ProfileError, match="gigagrad GPU profile"):
        Gpu.from_profile(path)
    write_profile(path, MEASURED)
    with pytest.raises(ProfileError, match="gigagrad machine profile"):
        Machine.from_profile(path)


def test_it_says_where_rates_are_from():
    assert MEASURED.basis == "measured rates of NVIDIA L4"
    assert "typical rates of L4 (data sheet)" in Gpu.typical(CARD).basis
    assert "typical rates of H200 (measured on one)" in Gpu.typical("NVIDIA H200").basis
    assert "'gigagrad calibrate --device cuda' measures" in Gpu.typical(CARD).basis
    assert "MI300X is not listed" in Gpu.typical("AMD Instinct MI300X").basis
    assert "no card is named" in Gpu.typical("").basis


@pytest.mark.parametrize("card", [card.name for card in CARDS])
def test_typical_rates_are_below_those_of_the_data_sheet(card):
    found, sheet = Gpu.typical(card), next(each for each in CARDS if each.name == card)
    assert 0.3 * sheet.memory_bytes_per_second < found.memory_bytes_per_second < sheet.memory_bytes_per_second
    assert 0.2 * sheet.flops_per_second < found.flops_per_second < sheet.flops_per_second
    assert found.few_channels_flops_per_second <= found.flops_per_second
    assert not found.calibrated


def test_the_card_that_was_measured_has_the_rates_that_were_measured():
    found, default = Gpu.typical("NVIDIA H200"), Gpu()
    assert {name: pytest.approx(rate, rel=0.02) for name, rate in found.rates.items()} == default.rates


def test_unknown_cards_have_the_rates_of_a_middling_one():
    unknown, middling = Gpu.typical("a card of next year"), Gpu.typical(MIDDLING.name)
    assert unknown == dataclasses.replace(middling, card="a card of next year")


def convolution(channels: int, side: int) -> tuple[float, float]:
    """Bytes moved by a 3 x 3 convolution, and its operations."""
    return 2.0 * 4 * channels * side**2, 2.0 * 9 * channels**2 * side**2


def test_convolutions_of_few_channels_are_as_slow_on_a_gpu_as_they_are():
    gpu = dataclasses.replace(Gpu(), memory_bytes_per_second=1e18)
    seconds = {channels: gpu.operator_seconds(*convolution(channels, 4096)) for channels in (4, 16, 32, 64, 256)}
    rate = {channels: convolution(channels, 4096)[1] / seconds[channels] for channels in seconds}
    assert rate[16] == pytest.approx(25e12, rel=1e-3)
    assert [rate[64], rate[256]] == pytest.approx([210e12, 210e12], rel=1e-3)
    assert rate[32] == pytest.approx((25e12 * 210e12) ** 0.5, rel=1e-3)
    assert seconds[4] == pytest.approx(seconds[16] / 4, rel=1e-3)  # as its bytes


def test_a_gpu_takes_a_host_s_call_at_least_and_a_host_s_part_of_each_tile():
    gpu = Gpu(memory_bytes_per_second=1e12, seconds_per_operator=1e-3, seconds_per_tile=0.5, seconds_per_pass=0.25)
    assert gpu.operator_seconds(1e6, 0) == 1e-3
    assert gpu.operator_seconds(1e10, 0) == pytest.approx(1e-2)
    assert gpu.host_seconds(4) == 2.25


@pytest.mark.parametrize(
    ("work", "rate"),
    [
        (Work.VALUES, "cached_bytes_per_second"),
        (Work.REORDERED, "reordered_bytes_per_second"),
        (Work.UNFOLDED, "reordered_bytes_per_second"),
        (Work.STATISTICS, "statistics_bytes_per_second"),
        (Work.WINDOWS, "window_bytes_per_second"),
    ],
)
def test_each_kind_of_work_has_its_rate(work, rate):
    slow = Machine(seconds_per_operator=0.0).with_rates({rate: 1e3})
    assert slow.operator_seconds(1e6, 0.0, work) == pytest.approx(1e3)
    products = "unfolded_flops_per_second" if work is Work.UNFOLDED else "flops_per_second"
    slow = Machine(seconds_per_operator=0.0).with_rates({products: 1e3})
    assert slow.operator_seconds(0.0, 1e6, work) == pytest.approx(1e3)


def test_what_a_convolution_moves_takes_longer_from_memory_and_where_vectors_are_not_full():
    rates = {
        "reordered_bytes_per_second": 1e3,
        "reordered_memory_bytes_per_second": 1e2,
        "ragged_bytes_per_second": 1e1,
    }
    slow = Machine(seconds_per_operator=0.0, cache_bytes=4000).with_rates(rates)
    whole: dict[str, Any] = {"work": Work.REORDERED, "cached": False}
    assert slow.operator_seconds(1000, 0.0, **whole) == pytest.approx(1)  # two copies are half of the cache
    assert slow.operator_seconds(1001, 0.0, **whole) == pytest.approx(10.01)
    assert slow.operator_seconds(1001, 0.0, Work.REORDERED) == pytest.approx(1.001)  # on a tile
    assert slow.operator_seconds(1000, 0.0, Work.REORDERED, ragged=500) == pytest.approx(0.5 + 50)
    assert (
        slow.with_rates({"ragged_bytes_per_second": 1e9}).operator_seconds(1000, 0.0, Work.REORDERED, ragged=500) == 1
    )


def test_calls_of_autograd_have_a_cost_of_their_own():
    machine = Machine(seconds_per_operator=1.0, seconds_per_autograd_call=3.0)
    assert machine.by_autograd().operator_seconds(0.0, 0.0) == 3
    assert Gpu().by_autograd().operator_seconds(0.0, 0.0) == Gpu().operator_seconds(0.0, 0.0)


def test_values_that_are_not_cached_move_at_the_memory_s_rate():
    slow = Machine(seconds_per_operator=0.0, memory_bytes_per_second=1e3)
    assert slow.operator_seconds(1e6, 0.0) < slow.operator_seconds(1e6, 0.0, cached=False) == pytest.approx(1e3)
