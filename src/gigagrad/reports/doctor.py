"""Is this machine ready? One check per thing that can be missing, each with what to do about it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import os
import platform
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gigagrad.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["ok", "absent", "warning", "failed"]
_Finding = tuple[Status, str] | tuple[Status, str, str]
"""Status, detail and, where there is something to do, remedy."""
_Check = Callable[[Path], _Finding]

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LEAST_MEMORY_BYTES = 2 << 30
_LEAST_DISK_BYTES = 4 << 30
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "train": (("tensorboard", "torchmetrics"), "curves and scores of slide classifiers"),
    "report": (("matplotlib",), "pictures of plans"),
    "demo": (("cv2",), "synthetic slides"),
    "view": (("starlette", "uvicorn"), "slides in a web page"),
    "geo": (("rasterio",), "COGs and coordinates on earth"),
    "bags": (("h5py",), "patches in .h5"),
    "timm": (("timm",), "its models"),
    "smp": (("segmentation_models_pytorch",), "its models"),
    "monai": (("monai", "ignite"), "its models and workflows"),
    "lora": (("peft",), "adapters of encoders"),
    "optimizers": (("pytorch_optimizer",), "a hundred more optimizers"),
    "mix": (("scipy",), "the cheapest machines for a cohort"),
    "export": (("onnx", "onnxruntime", "onnxscript"), "trained networks as ONNX"),
    "lightning": (("lightning",), "its Trainer"),
    "mlflow": (("mlflow",), "--trackers mlflow"),
    "wandb": (("wandb",), "--trackers wandb"),
    "trackio": (("trackio",), "--trackers trackio"),
}
"""The modules that each extra brings, and what they are for."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `remedy` is empty where there is nothing to do; `warning` means something works less well, and
    `absent` that it is optional and not installed.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def diagnose(folder: str | Path = ".") -> list[Check]:
    """Check Python, PyTorch, the machine's profile, memory, huge pages, the disk under `folder`, CUDA, codecs, readers
    of slides, the page of `gigagrad view` and what the extras bring.

    A check that breaks is itself a failed check; nothing is raised.
    """
    checks: list[Check] = []
    for name, check in CHECKS.items():
        try:
            checks.append(Check(name, *check(Path(folder))))
        except Exception as error:  # a broken installation fails in ways of its own; that is the finding
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            checks.append(Check(name, "failed", reason, "reinstall gigagrad in a fresh environment"))
    extras = [Check(name, *_extra(name, *brought)) for name, brought in EXTRAS.items()]
    found = dict.fromkeys(version for extra in extras if extra.status == "ok" for version in extra.detail.split(", "))
    if found:
        checks.append(Check("Extras", "ok", ", ".join(found)))
    return checks + [extra for extra in extras if extra.status != "ok"]


def doctor_table(checks: list[Check]) -> Table:
    """Tabulate the findings for a rich console of 80 columns or more: what is to be done has lines of its own."""
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("ok", "green"), "absent": ("-", "dim"), "warning": ("note", "yellow"), "failed": ("FAILED", "red")}
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        found = Text(check.detail)
        if check.remedy and check.detail:
            found.append("\nto do: ")
        found.append(check.remedy, "bold")
        word, style = marks[check.status]
        table.add_row(Text(word, style), Text(check.name), found)
    return table


def _python(_: Path) -> _Finding:
    return "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _torch(_: Path) -> _Finding:
    import torch

    total = torch.ones(8, 8).matmul(torch.ones(8, 8)).sum().item()
    assert total == 512, f"8 x 8 ones times itself sums to {total}"
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return "ok", f"{torch.__version__}, oneDNN {'on' if onednn else 'off'}"


def _threads(_: Path) -> _Finding:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    used = torch.get_num_threads()
    detail = f"PyTorch uses {used} of {usable} usable cores"
    if used > usable:
        return "warning", detail, f"set OMP_NUM_THREADS={usable}"
    return "ok", detail


def _rates(name: str, card: str = "") -> tuple[Status, str, str]:
    """Say whether there are measured rates of this machine, or of a card in it."""
    from gigagrad.devices.machine import Gpu, Machine, ProfileError, profile_path, read_profile

    path = profile_path(card)
    remedy = (Gpu if card else Machine).calibrate_command
    if not os.path.exists(path):
        return "ok", f"{name} is not calibrated (optional)", remedy
    try:
        read_profile(path, card)
    except ProfileError as reason:
        return "warning", str(reason), remedy
    return "ok", f"rates of {name} are measured; {path}", ""


def _memory(_: Path) -> _Finding:
    import psutil

    memory = psutil.virtual_memory()
    limit = _container_limit_bytes()
    free = min(memory.available, limit) if limit else memory.available
    capped = f", capped at {format_bytes(limit)} for this container" if limit and limit < memory.total else ""
    detail = f"{format_bytes(free)} free of {format_bytes(memory.total)}{capped}"
    if free < _LEAST_MEMORY_BYTES:
        return "warning", detail, "close other programs; 1 GiB is the least for a 16000 x 64000 slide"
    return "ok", detail


def _huge_pages(_: Path) -> _Finding:
    try:
        modes = _HUGE_PAGES.read_text(encoding="ascii").strip()
    except OSError:
        return "ok", "not on this system (they are Linux's)"
    if "[never]" in modes:
        remedy = f"echo madvise | sudo tee {_HUGE_PAGES}; steps of thin networks then take about half the time"
        return "warning", "switched off in the kernel", remedy
    if os.environ.get("THP_MEM_ALLOC_ENABLE") != "1":
        return "warning", "switched off by THP_MEM_ALLOC_ENABLE", "unset THP_MEM_ALLOC_ENABLE"
    return "ok", "used for large blocks of memory"


def _container_limit_bytes() -> int | None:
    """Return the memory limit of the control group this process is in, if there is one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _disk(folder: Path) -> _Finding:
    usage = shutil.disk_usage(folder)
    detail = f"{format_bytes(usage.free)} free in {folder.resolve()}"
    if not os.access(folder, os.W_OK):
        return "failed", f"{folder.resolve()} cannot be written", "choose another folder for --out"
    if usage.free < _LEAST_DISK_BYTES:
        return "warning", detail, "free some space; a gigapixel slide and its masks take 1 to 2 GB"
    return "ok", detail


def _codecs(_: Path) -> _Finding:
    import imagecodecs
    import numpy as np

    pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    missing = []
    for name, codec in {"JPEG": "jpeg8", "JPEG 2000": "jpeg2k", "deflate": "zlib", "LZW": "lzw"}.items():
        try:
            getattr(imagecodecs, f"{codec}_decode")(getattr(imagecodecs, f"{codec}_encode")(pixels))
        except Exception:  # imagecodecs raises its own kinds for codecs it was built without
            missing.append(name)
    version = f"imagecodecs {imagecodecs.__version__}"
    if missing:
        return "failed", f"{version} lacks {', '.join(missing)}", "pip install --force-reinstall imagecodecs"
    return "ok", f"JPEG, JPEG 2000, deflate and LZW work ({version})"


def _readers(_: Path) -> _Finding:
    import openslide
    import tifffile
    import zarr

    library = f"OpenSlide {openslide.__library_version__}"
    return "ok", f"tifffile {tifffile.__version__}, {library}, Zarr {zarr.__version__}"


def _page(_: Path) -> _Finding:
    if (importlib.resources.files("gigagrad") / "view" / "page" / "page.js").is_file():
        return "ok", "the page of 'gigagrad view' and of reports is built"
    return (
        "absent",
        "the page of 'gigagrad view' and of reports is not built",
        "in a checkout: make page, which needs Node.js 20",
    )


def _cuda(_: Path) -> _Finding:
    import torch

    if not torch.cuda.is_available():
        return "ok", "no device; everything runs on the CPU"
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    status, rates, remedy = _rates("the card", name)
    found = f"{name}, {format_bytes(free)} free of {format_bytes(total)}, CUDA {torch.version.cuda}; {rates}"
    return status, found, remedy


def _extra(name: str, modules: tuple[str, ...], used_for: str) -> _Finding:
    """Check by importing, as what uses the modules imports them."""
    if not all(map(importlib.util.find_spec, modules)):
        return "absent", "", f"pip install 'gigagrad[{name}]' for {used_for}"
    packages = importlib.metadata.packages_distributions()
    found = [packages.get(module, [module])[0] for module in modules]
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in found)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("gigagrad.models.torchvision_operators")
            for module in modules:
                importlib.import_module(module)
    except Exception as error:  # whatever its own dependencies raise
        reason = f"{versions} cannot be imported: {error}".splitlines()[0]
        return "warning", reason, "install the torchvision that was built for this PyTorch"
    return "ok", versions


CHECKS: dict[str, _Check] = {
    "Python": _python,
    "PyTorch": _torch,
    "Threads": _threads,
    "Profile": lambda _: _rates("this machine"),
    "Memory": _memory,
    "Huge pages": _huge_pages,
    "Disk": _disk,
    "CUDA": _cuda,
    "Codecs": _codecs,
    "Readers": _readers,
    "Page": _page,
}
