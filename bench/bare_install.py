"""What `pip install gigagrad` brings: an sdist and the wheel made of it, installed bare in an environment of its own.

    python bench/bare_install.py [--constraint constraints.txt]

There it imports, checks the machine, and takes a step; none of the libraries that extras bring may be there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("cv2", "lightning", "matplotlib", "mlflow", "monai", "scipy", "tensorboard", "timm", "torchmetrics", "wandb")
SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
STEP = f"""
import importlib.util, json, time
began = time.perf_counter()
import gigagrad as gg
imported = time.perf_counter() - began
import torch
model = torch.nn.Conv2d(3, 1, 3, padding=1)
image, target = torch.rand(3, 90, 70), torch.rand(1, 90, 70)
loss = gg.compile(model, torch.nn.functional.mse_loss, tile=(32, 32)).backward(image, target)
plain = torch.nn.functional.mse_loss(model(image[None]), target[None])
print(json.dumps({{
    "import_seconds": round(imported, 3),
    "torch": torch.__version__,
    "loss_error": abs(float(loss) - float(plain)),
    "gradient_error": float((model.weight.grad - torch.autograd.grad(plain, model.weight)[0]).abs().max()),
    "optional_libraries": [name for name in {EXTRAS} if importlib.util.find_spec(name)],
}}))
"""


def output_of(*command: str | Path, cwd: Path) -> str:
    ended = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(map(str, command))[:200]} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraint", type=Path, default=ROOT / "constraints.txt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        output_of(sys.executable, "-c", SDIST, here, cwd=ROOT)
        (sdist,) = here.glob("*.tar.gz")
        output_of(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", sdist, cwd=here)
        (wheel,) = here.glob("*.whl")
        files = zipfile.ZipFile(wheel).namelist()
        venv.create(here / "env", with_pip=True)
        bin_ = here / "env" / "bin"
        output_of(bin_ / "pip", "install", "--constraint", args.constraint.resolve(), wheel, cwd=here)
        packages = json.loads(output_of(bin_ / "pip", "list", "--format", "json", cwd=here))
        output_of(bin_ / "pip", "check", cwd=here)
        step = json.loads(output_of(bin_ / "python", "-c", STEP, cwd=here))
        output_of(bin_ / "gigagrad", "doctor", cwd=here)
        result = {
            "sdist_bytes": sdist.stat().st_size,
            "wheel_bytes": wheel.stat().st_size,
            "typed": "gigagrad/py.typed" in files,
            "template": any(name.endswith(".j2") for name in files),
            "packages": len(packages),
            **step,
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
