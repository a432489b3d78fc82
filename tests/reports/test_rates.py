"""What a processor could do by what Linux says of it, and what bounds the founding step, from the parts of a plan."""

import pytest

from gigagrad.cli import main
from gigagrad.devices import machine
from gigagrad.devices.machine import Machine, peak_flops_per_second
from gigagrad.plans.description import Table
from gigagrad.reports import rates
from gigagrad.reports.rates import founding_parts, rates_tables

INTEL = {"vendor_id": "GenuineIntel", "cpu family": "6", "cpu MHz": "2000.0", "flags": "fma avx avx2 avx512f"}
ZEN4 = {"vendor_id": "AuthenticAMD", "cpu family": "25", "cpu MHz": "2600.0", "flags": "fma avx avx2 avx512f"}
HASWELL = {"vendor_id": "GenuineIntel", "cpu MHz": "3000", "flags": "fma avx avx2"}
NEOVERSE = {"CPU implementer": "0x41", "Features": "fp asimd"}


@pytest.mark.parametrize(
    ("fields", "hertz", "expected"),
    [
        (INTEL, None, 128e9),
        (INTEL, "3500000\n", 224e9),
        (ZEN4, None, 83.2e9),
        (HASWELL, None, 96e9),
        (NEOVERSE, "2500000", 40e9),
        (NEOVERSE, None, None),
        ({}, None, None),
    ],
)
def test_peak_by_clock_lanes_and_units(fields, hertz, expected, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo_max_freq"
    if hertz is not None:
        path.write_text(hertz)
    monkeypatch.setattr(machine, "_FASTEST", path)
    assert peak_flops_per_second(fields) == (None if expected is None else pytest.approx(expected))


@pytest.fixture
def smaller(monkeypatch):
    monkeypatch.setattr(rates, "_SIZE", (1600, 3200))
    monkeypatch.setattr(rates, "moved_per_second", lambda nbytes, clock: 20e9)


@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize(
    ("slow", "part"),
    [
        ({"flops_per_second": 1e9}, "products"),
        ({"memory_bytes_per_second": 1e8, "cached_bytes_per_second": 1e8}, "bytes between cache and memory"),
        ({"seconds_per_operator": 1.0}, "calls of operators"),
    ],
)
def test_what_is_slow_bounds_the_step(slow, part):
    parts = founding_parts(Machine(threads=2, **slow))
    assert max(parts, key=lambda one: parts[one]) == part
    assert all(seconds > 0 for seconds in parts.values())
    title = rates_tables(Machine(threads=2, **slow))[1].title
    assert title.endswith(f": {part}")


@pytest.mark.usefixtures("smaller")
def test_tables_say_what_is_measured_and_what_is_not(monkeypatch, capsys):
    monkeypatch.setattr(rates, "processor_fields", dict)
    typical, measured = (rates_tables(Machine(threads=2, calibrated=known))[0] for known in (False, True))
    assert isinstance(typical, Table)
    assert (typical.columns[1], measured.columns[1]) == ("typical", "measured")
    assert typical.rows[0][2:4] == ("-", "-")
    assert typical.rows[1][3] == "120 %"
    assert "'gigagrad calibrate' measures" in typical.note
    assert main(["doctor", "--rates"]) == 0
    assert "What bounds a step of paper-unet" in capsys.readouterr().out
