"""What only some systems have is needed neither to import the package nor to run it.

A process without these modules and calls stands for such a system; what else differs there, it cannot show.
"""

import subprocess
import sys

PROGRAM = """
import importlib, os, pkgutil, sys

import psutil, torch  # they know what their system has

for name in ("resource", "fcntl"):
    sys.modules[name] = None
calls = "pread preadv pwrite pwritev posix_fallocate posix_fadvise sched_getaffinity O_DIRECT"
for name in calls.split():
    if hasattr(os, name):
        delattr(os, name)

import gigagrad as gg

for module in pkgutil.walk_packages(gg.__path__, "gigagrad."):
    # Those are other people's libraries, and these come with PyTorch for GPUs.
    if not module.name.endswith(("__main__", "few_channels_kernels")) and ".integrations." not in module.name:
        importlib.import_module(module.name)

from pathlib import Path

import numpy as np
import tifffile
from torch import nn
from torch.nn.functional import mse_loss

torch.set_num_threads(1)
torch.manual_seed(0)
folder = Path(sys.argv[1])
rgb = np.random.default_rng(0).integers(0, 256, (70, 86, 3), dtype=np.uint8)
tifffile.imwrite(folder / "slide.tif", rgb, photometric="rgb", tile=(16, 16), compression="deflate", metadata=None)
target = torch.rand(1, 70, 86, dtype=torch.float64)


class Net(nn.Sequential):
    def forward(self, image):
        return super().forward(image.double() / 255)


def net():
    torch.manual_seed(1)
    return Net(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)).double()


plain = net()
mse_loss(plain(torch.from_numpy(rgb).permute(2, 0, 1)[None]), target[None]).backward()
for scratch in (None, folder / "scratch"):
    model = net()
    engine = gg.compile(model, mse_loss, tile=(24, 20), scratch=scratch)
    if scratch is not None:
        engine.plan(folder / "slide.tif", target)
        state = engine.state_dict()
        for choice in state["choices"].values():
            choice["kept"] = [[node, "disk"] for node, _ in choice["kept"]]
        engine.load_state_dict(state)
        assert {field.tier for field in engine.plan(folder / "slide.tif", target).kept} == {"disk"}
    engine.backward(folder / "slide.tif", target)
    assert engine.last_run.peak_bytes > 0
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, expected.grad, rtol=1e-10, atol=1e-14)
out = gg.compile(plain.eval(), tile=(24, 20)).forward(folder / "slide.tif", out=folder / "prediction.tif")
assert tifffile.imread(out).shape[:2] == (70, 86)
assert sorted(path.name for path in folder.iterdir()) == ["prediction.tif", "scratch", "slide.tif"]
assert not list((folder / "scratch").iterdir())
"""


def test_imports_and_steps_without_what_only_linux_has(tmp_path):
    (tmp_path / "scratch").mkdir()
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
