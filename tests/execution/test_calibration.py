"""Calibration from end to end: what is measured, what is saved, what planning makes of it."""

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import gigagrad as gg
from gigagrad.cli import main
from gigagrad.devices import Machine
from gigagrad.devices.cpu import Cpu
from gigagrad.devices.machine import Gpu
from gigagrad.errors import ConfigError, StoreError
from gigagrad.events import JobFinished, Notice
from gigagrad.execution import calibration
from gigagrad.execution.calibration import (
    calibrate,
    codec_rates,
    copy_bytes_per_second,
    disk_rates,
    file_bytes_per_second,
)
from gigagrad.losses import bce
from gigagrad.reports.tables import Shown, rates_table

SIZE = 2**24


@pytest.fixture
def profile(monkeypatch, tmp_path):
    """Where the profile goes: a folder of the test's own."""
    path = tmp_path / "cache" / "machine.json"
    for module in ("gigagrad.devices.machine", "gigagrad.execution.calibration"):
        monkeypatch.setattr(f"{module}.profile_path", lambda card="": path.with_name("gpu.json") if card else path)
    monkeypatch.setattr(calibration, "cache_bytes", lambda: 2**22)
    return path


def test_rates_are_saved_and_planning_uses_them(profile, tmp_path):
    events: list[Any] = []
    found = calibrate(scratch=tmp_path, size_bytes=SIZE, listeners=(events.append,))
    assert found.path == profile
    assert isinstance(events[-1], JobFinished)
    assert all(rate > 0 for name, rate in found.machine.rates.items() if "efficiency" not in name)
    assert Machine.detect(found.machine.threads).rates == found.machine.rates
    console = Console(file=io.StringIO(), width=100)
    console.print(Shown(rates_table(found)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("convolutions", "GFLOP/s", "a call of an operator", "disk, write", "fields in files", "codec"):
        assert text in shown


class FakeGpu(Cpu):
    """A GPU whose tensors are the host's; it counts how often it was waited for."""

    is_host = False
    waited = 0

    def machine(self, say=None):
        return Gpu.detected("NVIDIA L4")

    def synchronize(self):
        self.waited += 1


@pytest.fixture
def small_gpu(monkeypatch):
    """Work that a processor does in a second."""
    monkeypatch.setattr(calibration, "_GPU_SIDE_PX", 32)
    monkeypatch.setattr(calibration, "_GPU_VALUES_BYTES", 2**20)
    monkeypatch.setattr(calibration, "_OPERATORS", 8)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@pytest.mark.usefixtures("small_gpu")
def test_the_rates_of_a_gpu_are_saved_for_its_card_and_planning_uses_them(profile, tmp_path):
    device = FakeGpu("cpu")
    found = calibrate(device=device, scratch=tmp_path, size_bytes=SIZE)
    assert found.path == profile.with_name("gpu.json")
    assert not profile.exists()  # the processor's
    assert device.waited > 2 * 6 * 10  # before and after each of six runs of ten things
    assert isinstance(found.machine, Gpu)
    assert found.machine.calibrated
    assert device.machine() == found.machine
    assert found.machine.rates.keys() == Gpu().rates.keys()
    assert not set(found.machine.rates.values()) & (set(Gpu.typical("NVIDIA L4").rates.values()) - {0.9, 1.0})
    assert len(found.copies) == 4
    console = Console(file=io.StringIO(), width=100)
    console.print(Shown(rates_table(found)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (
        "NVIDIA L4",
        "TFLOP/s",
        "16 channels",
        "a tile",
        "pinned, to the GPU",
        "pageable, to the host",
        "disk",
    ):
        assert text in shown


@pytest.mark.usefixtures("profile", "small_gpu")
def test_a_host_s_calls_and_tiles_are_what_plans_count(monkeypatch):
    """Steps that take what their plans predict give back the two numbers that these were predicted by."""
    known: dict[str, Any] = {"seconds_per_operator": 30e-6, "seconds_per_tile": 2e-3, "seconds_per_pass": 25 * 30e-6}
    known["seconds_per_autograd_call"] = known["seconds_per_operator"]
    plans = []

    class Known(FakeGpu):
        def machine(self, say=None):
            free = Gpu(flops_per_second=1e18, few_channels_flops_per_second=1e18, memory_bytes_per_second=1e18)
            return dataclasses.replace(free, **known)

    def compiled(*given, **settings):
        engine = gg.compile(*given, **settings)
        plan = engine.plan

        def kept(*inputs):
            plans.append(plan(*inputs))
            return plans[-1]

        monkeypatch.setattr(engine, "plan", kept)
        return engine

    monkeypatch.setattr(calibration, "compile", compiled)
    monkeypatch.setattr(calibration, "fastest", lambda work, clock: plans[-1].modelled_seconds)
    assert calibration._host_rates(Known("cpu")) == pytest.approx(known, rel=1e-3)
    assert len(plans) == 2


def test_a_device_without_a_profile_is_refused(profile, tmp_path):
    class Other(FakeGpu):
        def machine(self, say=None):
            return Machine()

    with pytest.raises(ConfigError, match="processor"):
        calibrate(device=Other("cpu"), scratch=tmp_path, size_bytes=SIZE)
    assert not profile.parent.exists()


@pytest.mark.cuda
def test_a_real_gpu_is_measured_in_half_a_minute(profile, tmp_path):
    found = calibrate(device="cuda", scratch=tmp_path)
    assert found.seconds < 30
    assert isinstance(found.machine, Gpu)
    assert found.machine.card == torch.cuda.get_device_name()
    rates = found.machine.rates
    assert 1e10 < rates["memory_bytes_per_second"] < 2e13
    assert 1e11 < rates["few_channels_flops_per_second"] < 1.5 * rates["flops_per_second"] < 1e15
    assert 1e-6 < rates["seconds_per_operator"] < 1e-3
    assert rates["seconds_per_tile"] < 0.1
    assert found.copies["pinned, to the GPU"] > 0.8 * found.copies["pageable, to the GPU"]


def test_slower_rates_make_longer_plans(profile):
    def planned():
        image, mask = np.zeros((3, 192, 192), np.uint8), np.zeros((1, 192, 192), np.uint8)
        return gg.compile(gg.models.resolve("paper-unet"), bce, tile=(96, 96)).plan(image, mask).predicted_seconds

    typical = planned()
    rates = Machine().rates
    slower = {name: rates[name] * (10 if name.startswith("seconds") else 0.1) for name in rates}
    calibration.write_profile(profile, Machine().with_rates(slower))  # type: ignore[attr-defined]
    assert planned() > 5 * typical > 0


def test_the_command(profile, monkeypatch, tmp_path, capsys):
    small = calibrate
    monkeypatch.setattr("gigagrad.execution.calibration.calibrate", lambda **given: small(size_bytes=SIZE, **given))
    assert main(["calibrate", "--scratch", str(tmp_path)]) == 0
    assert f"saved in {profile}" in " ".join(capsys.readouterr().out.split())
    assert profile.is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_command_for_a_gpu_that_is_not_here_is_one_line(profile, tmp_path, capsys):
    assert main(["calibrate", "--device", "cuda", "--scratch", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "PyTorch finds no CUDA device here" in error
    assert error.count("\n") == 1
    assert not profile.parent.exists()


def test_a_scratch_folder_that_is_missing_is_one_line(profile, tmp_path, capsys):
    assert main(["calibrate", "--scratch", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not profile.exists()


def test_a_damaged_profile_is_noticed_once_and_planning_goes_on(profile):
    profile.parent.mkdir()
    profile.write_text("{")
    image, mask = np.zeros((3, 192, 192), np.uint8), np.zeros((1, 192, 192), np.uint8)
    engine = gg.compile(gg.models.resolve("paper-unet"), bce)
    events: list[Any] = []
    engine.events.subscribe(events.append)
    assert engine.plan(image, mask).predicted_seconds > 0
    engine.plan(image[:, :160], mask[:, :160])
    (notice,) = (event for event in events if isinstance(event, Notice))
    assert "gigagrad calibrate" in notice.text
    assert notice.warning


def test_rates_are_positive_and_the_file_is_gone(tmp_path):
    write, read, _ = disk_rates(tmp_path, SIZE)
    assert write > 0
    assert read > 0
    assert file_bytes_per_second(tmp_path, SIZE) > 0
    assert list(tmp_path.iterdir()) == []
    assert copy_bytes_per_second(2**20) > 0
    rate, ratio = codec_rates(2**20)
    assert rate > 0
    assert 1 < ratio < 2  # mantissas of noise do not shrink, exponents do


@pytest.mark.usefixtures("no_direct_access")
def test_where_the_cache_cannot_be_bypassed_it_is_used(tmp_path):
    write, _, direct = disk_rates(tmp_path, SIZE)
    assert not direct
    assert write > 0


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--scratch"):
        disk_rates(tmp_path / "missing", SIZE)


def test_what_processors_do_for_files_counts_both_ways(monkeypatch, tmp_path):
    size = 4 * 32 * 512 * 512  # four tiles
    monkeypatch.setattr(calibration, "fastest", lambda work, clock: (work(), 0.5)[1])
    assert file_bytes_per_second(tmp_path, size) == 2 * size / 0.5


def test_a_full_disk_is_an_error_and_leaves_nothing(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibration.os, "pwrite", full)  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match=r"cannot write.*No space left"):
        disk_rates(tmp_path, SIZE)
    assert list(tmp_path.iterdir()) == []
