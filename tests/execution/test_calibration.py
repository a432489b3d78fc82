"""Calibration from end to end: what is measured, what is saved, what planning makes of it."""

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import gigagrad as gg
from gigagrad.cli import main
from gigagrad.devices import Machine
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
        monkeypatch.setattr(f"{module}.profile_path", lambda: path)
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
