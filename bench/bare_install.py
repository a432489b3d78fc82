"""What `pip install gigagrad` brings: an sdist and the wheel made of it, installed bare in an environment of its own.

    python bench/bare_install.py [--constraint constraints.txt] [--python python3.13]

There it imports, checks the machine, and takes a step of the paper's network; none of the libraries that extras bring
may be there. The page has to be built (`make page`). `--python` names another Python than this one to install for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("cv2", "lightning", "matplotlib", "mlflow", "monai", "scipy", "tensorboard", "timm", "torchmetrics", "wandb")
SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
STEP = f"""
import importlib.util, json, platform, time
began = time.perf_counter()
import gigagrad as gg
imported = time.perf_counter() - began
import torch
model = gg.models.resolve("paper-unet").double()
image, target = torch.randint(256, (3, 480, 640), dtype=torch.uint8), torch.rand(1, 480, 640, dtype=torch.float64)
criterion = torch.nn.functional.binary_cross_entropy_with_logits
loss = gg.compile(model, criterion, tile=(160, 160)).backward(image, target)
plain = criterion(model(image[None]), target[None])
expected = torch.autograd.grad(plain, list(model.parameters()))
print(json.dumps({{
    "python": platform.python_version(),
    "import_seconds": round(imported, 3),
    "torch": torch.__version__,
    "loss_error": abs(float(loss) - float(plain)),
    "gradient_error": max(float((p.grad - g).abs().max()) for p, g in zip(model.parameters(), expected)),
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
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        output_of(sys.executable, "-c", SDIST, here, cwd=ROOT)
        (sdist,) = here.glob("*.tar.gz")
        output_of(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", sdist, cwd=here)
        (wheel,) = here.glob("*.whl")
        files = zipfile.ZipFile(wheel).namelist()
        output_of(args.python, "-m", "venv", here / "env", cwd=here)
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
            "page": "gigagrad/view/page/page.js" in files,
            "packages": len(packages),
            **step,
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
