"""The code of docs/in-other-programs.md, as it stands there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from monai.bundle import ConfigParser
from torch.utils.data import DataLoader

from gigagrad.integrations.monai import WholeImageInferer

PAGE = (Path(__file__).parents[2] / "docs" / "in-other-programs.md").read_text(encoding="utf-8")
CODE = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def test_a_process_of_its_own_imports_them():
    """Where tests did not import something before, a torchvision for another PyTorch for one."""
    code = "import gigagrad.integrations.lightning, gigagrad.integrations.monai"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_has_its_four_programs():
    assert list(CODE) == ["A plain loop", "Accelerate", "Lightning", "MONAI"]


@pytest.mark.parametrize("name", CODE)
def test_its_code_trains(name, model, pairs, paths, bce, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batches: DataLoader[object] = DataLoader([{"image": image, "label": mask} for image, mask in pairs])  # type: ignore[arg-type]
    names = {"model": model, "loss": bce, "pairs": pairs if name == "Lightning" else paths, "batches": batches}
    exec(compile(CODE[name], name, "exec"), names)
    assert all(bool((now != then).any()) for now, then in zip(model.parameters(), before, strict=True))


def test_its_bundle_names_the_inferer():
    (text,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert isinstance(ConfigParser(json.loads(text)).get_parsed_content("inferer"), WholeImageInferer)
