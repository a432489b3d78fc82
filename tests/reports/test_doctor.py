"""Every check reports; a broken one is a finding, never an exception."""

import importlib.metadata
import importlib.resources
import importlib.util
import io
import os
import re
import subprocess
import sys
import tomllib

import pytest
import torch
from rich.console import Console

from gigagrad.devices import machine
from gigagrad.reports import doctor
from gigagrad.reports.doctor import EXTRAS, Check, diagnose, doctor_table
from tests.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_this_machine_is_well(tmp_path):
    checks = {check.name: check for check in diagnose(tmp_path)}
    assert {"Python", "PyTorch", "Threads", "Memory", "Disk", "Codecs", "Readers", "Page", "CUDA", "Extras"} <= set(
        checks
    )
    assert [check for check in checks.values() if check.status == "failed"] == []
    assert "JPEG 2000" in checks["Codecs"].detail


def test_a_broken_installation_is_a_finding(monkeypatch, tmp_path):
    def broken(_):
        raise ImportError("libopenjp2.so: cannot open shared object file\nmore")

    monkeypatch.setattr(doctor, "CHECKS", {"Codecs": broken})
    (check,) = (check for check in diagnose(tmp_path) if check.name == "Codecs")
    assert check.status == "failed"
    assert check.detail == "ImportError: libopenjp2.so: cannot open shared object file"
    assert check.remedy


def test_little_memory_and_disk_are_noted(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_container_limit_bytes", lambda: 512 << 20)
    monkeypatch.setattr(doctor, "_LEAST_DISK_BYTES", 1 << 60)
    checks = {check.name: check for check in diagnose(tmp_path)}
    assert checks["Memory"].status == checks["Disk"].status == "warning"
    assert "capped at 512 MiB" in checks["Memory"].detail


@pytest.mark.parametrize(
    ("modes", "asked", "status", "text"),
    [
        ("always [madvise] never", "1", "ok", "used"),
        ("[always] madvise never", "1", "ok", "used"),
        ("always madvise [never]", "1", "warning", "in the kernel"),
        ("always [madvise] never", "0", "warning", "THP_MEM_ALLOC_ENABLE"),
        (None, "1", "ok", "not on this system"),
    ],
)
def test_huge_pages(monkeypatch, tmp_path, modes, asked, status, text):
    file = tmp_path / "enabled"
    if modes is not None:
        file.write_text(f"{modes}\n")
    monkeypatch.setattr(doctor, "_HUGE_PAGES", file)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", asked)
    monkeypatch.setattr(doctor, "CHECKS", {"Huge pages": doctor.CHECKS["Huge pages"]})
    monkeypatch.setattr(doctor, "EXTRAS", {})
    (check,) = diagnose(tmp_path)
    assert check.status == status
    assert text in check.detail
    assert bool(check.remedy) == (status == "warning")


def test_a_gpu_says_whether_its_rates_are_measured(monkeypatch, tmp_path):
    path = tmp_path / "gpu.json"
    monkeypatch.setattr(machine, "profile_path", lambda card: path if card == "NVIDIA L4" else tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")

    monkeypatch.setattr(doctor, "CHECKS", {"CUDA": doctor.CHECKS["CUDA"]})
    monkeypatch.setattr(doctor, "EXTRAS", {})

    def found():
        (check,) = diagnose(tmp_path)
        return check

    before = found()
    assert (before.status, before.remedy) == ("ok", "gigagrad calibrate --device cuda")
    assert "NVIDIA L4, 20 GiB free of 24 GiB" in before.detail
    assert "not calibrated" in before.detail
    machine.write_profile(path, machine.Gpu.typical("NVIDIA L4"))
    assert (found().status, found().remedy) == ("ok", "")
    assert str(path) in found().detail
    path.write_text("{")
    assert (found().status, found().remedy) == ("warning", "gigagrad calibrate --device cuda")


def test_importing_the_package_asks_for_huge_pages_unless_told_otherwise():
    code = "import gigagrad, os; print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    for given, expected in ((None, "1"), ("0", "0")):
        environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
        environment |= {} if given is None else {"THP_MEM_ALLOC_ENABLE": given}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == expected


def test_extras_that_are_there_and_those_that_are_not(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {})
    one, none = ("rich", "yaml"), ("rich", "no_such_module_anywhere")
    monkeypatch.setattr(doctor, "EXTRAS", {"one": (one, "much"), "none": (none, "nothing"), "two": (one[:1], "more")})
    found, missing = doctor.diagnose()
    versions = {package: importlib.metadata.version(package) for package in ("rich", "PyYAML")}
    assert found == Check("Extras", "ok", f"rich {versions['rich']}, PyYAML {versions['PyYAML']}")
    assert missing == Check("none", "absent", "", "pip install 'gigagrad[none]' for nothing")


def test_an_extra_that_cannot_be_imported_is_noted(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {})
    monkeypatch.setattr(doctor, "EXTRAS", {"one": (("rich", "yaml"), "much")})
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    monkeypatch.setitem(sys.modules, "yaml", None)
    (broken,) = doctor.diagnose()
    assert (broken.name, broken.status) == ("one", "warning")
    assert "cannot be imported" in broken.detail


def test_extras_are_those_that_can_be_installed():
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"docs", "dev"}
    packages = importlib.metadata.packages_distributions()
    for name, (modules, _) in EXTRAS.items():
        required = {re.split(r"[^\w-]", line)[0].lower() for line in extras[name]} | {"mlflow-skinny"}
        known = [package.replace("_", "-").lower() for module in modules for package in packages.get(module, [])[:1]]
        assert set(known) <= required, name


def test_a_page_that_is_not_built_is_told_with_what_builds_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(doctor, "CHECKS", {"Page": doctor.CHECKS["Page"]})
    monkeypatch.setattr(doctor, "EXTRAS", {})
    (check,) = diagnose(tmp_path)
    assert (check.status, "make page" in check.remedy) == ("absent", True)
    (tmp_path / "view" / "page").mkdir(parents=True)
    (tmp_path / "view" / "page" / "page.js").touch()
    assert diagnose(tmp_path) == [Check("Page", "ok", "the page of 'gigagrad view' and of reports is built")]


@pytest.mark.parametrize("status", ["ok", "absent", "warning", "failed"])
def test_the_table_shows_everything_as_it_is(status):
    """Commands are on lines of their own, not folded, where a terminal has 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    command = "pip install 'gigagrad[lightning]' for its Trainer"
    console.print(doctor_table([Check("Disk [x]", status, "5 GiB [free]", command), Check("Huge pages", "ok", "used")]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("Disk [x]", "5 GiB [free]", f"to do: {command}"):
        assert text in shown


@pytest.mark.parametrize("extra", ["smp", "train"])
def test_what_works_here_is_said_to_work(extra):
    """In a process of its own: nothing has prepared torchvision there."""
    code = (
        "from gigagrad.reports import doctor\n"
        f"doctor.CHECKS, doctor.EXTRAS = {{}}, {{{extra!r}: doctor.EXTRAS[{extra!r}]}}\n"
        "(check,) = doctor.diagnose()\n"
        "print(check.status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ok"
