"""Rates of memory and disk: numbers above zero, and nothing left behind."""

import pytest

from gigagrad.errors import ConfigError, StoreError
from gigagrad.execution.calibration import tiers
from gigagrad.execution.calibration.tiers import (
    codec_rates,
    copy_bytes_per_second,
    disk_rates,
    file_bytes_per_second,
)

SIZE = 16 * 2**20


def test_rates_are_positive_and_the_file_is_gone(tmp_path):
    rates = disk_rates(tmp_path, SIZE)
    assert rates.write > 0
    assert rates.read > 0
    assert file_bytes_per_second(tmp_path, SIZE) > 0
    assert list(tmp_path.iterdir()) == []
    assert copy_bytes_per_second(2**20) > 0
    rate, ratio = codec_rates(2**20)
    assert rate > 0
    assert 1 < ratio < 2  # mantissas of noise do not shrink, exponents do


@pytest.mark.usefixtures("no_direct_access")
def test_where_the_cache_cannot_be_bypassed_it_is_used(tmp_path):
    rates = disk_rates(tmp_path, SIZE)
    assert not rates.direct
    assert rates.write > 0


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--scratch"):
        disk_rates(tmp_path / "missing", SIZE)


def test_what_processors_do_for_files_counts_both_ways(monkeypatch, tmp_path):
    size = 4 * 32 * 512 * 512  # four tiles
    monkeypatch.setattr(tiers, "fastest", lambda work, clock: (work(), 0.5)[1])
    assert file_bytes_per_second(tmp_path, size) == 2 * size / 0.5


def test_a_full_disk_is_an_error_and_leaves_nothing(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiers.os, "pwrite", full)  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match=r"cannot write.*No space left"):
        disk_rates(tmp_path, SIZE)
    assert list(tmp_path.iterdir()) == []
