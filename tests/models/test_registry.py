"""From names to models, and the one line a user gets for a name that does not work."""

import subprocess
import sys

import pytest
import torch

from gigagrad.errors import ImageError, ModelError
from gigagrad.models import Normalise, PaperUNet, Preprocess, resolve
from gigagrad.models.registry import import_callable


def test_paper_unet_takes_bytes_and_gives_logits():
    model = resolve("paper-unet")
    assert isinstance(model.network, PaperUNet)
    assert sum(p.numel() for p in model.parameters()) == 4492
    assert model(torch.zeros(1, 3, 161, 170, dtype=torch.uint8)).shape == (1, 1, 161, 170)


def test_smp_model_takes_bytes_without_downloading():
    pytest.importorskip("segmentation_models_pytorch")
    model = resolve("smp:Unet?encoder_name=resnet18&classes=2&decoder_channels=32,16,8,8,4").eval()
    assert isinstance(model.preprocess, Normalise)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 96, dtype=torch.uint8)).shape == (1, 2, 64, 96)


def test_timm_model_takes_bytes_and_keeps_its_own_normalisation():
    pytest.importorskip("timm")
    model = resolve("timm:resnet10t?num_classes=5").eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64, dtype=torch.uint8)).shape == (1, 5)
    assert isinstance(resolve("timm:resnet10t?in_chans=1").preprocess, Preprocess)


def test_callable_of_the_users_own_gets_its_settings_as_literals(tmp_path, monkeypatch):
    (tmp_path / "my_networks_of_this_test.py").write_text(
        "import torch\n"
        "seen = {}\n"
        "def make(**settings):\n"
        "    seen.update(settings)\n"
        "    return torch.nn.Conv2d(3, 1, 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    path_before = list(sys.path)
    model = resolve("my_networks_of_this_test:make?a=3&b=1e-3&c=true&d=none&e=16,32&f=same&g=.5&h=-2&i=a%26b")
    assert isinstance(model, torch.nn.Conv2d)
    seen = sys.modules["my_networks_of_this_test"].seen
    assert seen == {
        "a": 3, "b": 1e-3, "c": True, "d": None, "e": (16, 32), "f": "same", "g": 0.5, "h": -2, "i": "a&b"
    }  # fmt: skip
    assert {key: type(value) for key, value in seen.items()}["b"] is float
    assert sys.path == path_before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("paper-unett", "did you mean 'paper-unet'"),
        ("tim:resnet18", "cannot import 'tim'"),
        ("timm:resnet188", "did you mean 'resnet18"),
        ("timm:resnet18?num_clases=3", "num_clases"),
        ("timm:resnet18?checkpoint_path=a.pt", "--weights FILE"),
        ("smp:Unet&encoder_name=resnet18", "settings begin with a question mark: smp:Unet?encoder_name=resnet18"),
        ("monai:UNet?spatial_dims=2&in_channels=3&out_channels=1&channels=4,8&strides=2", "as in strides=2,"),
        ("smp:Unett", "did you mean 'unet'"),
        ("smp:Unet?encoder_name=resnet35", "did you mean 'resnet"),
        ("smp:Unet?encoder=resnet50", "has no setting 'encoder', did you mean 'encoder_name'?"),
        ("smp:Unet?encoder_weights=imagenette", "Available options are: ['imagenet'"),
        ("paper-unet?width=4", "takes none"),
        ("timm:", "a model is paper-unet"),
        ("", "unknown model ''"),
        ("torch.nn:Conv2", "has no 'Conv2'"),
        ("torch.nn:Conv2d?in_channels=3", "cannot build model"),
        ("collections:OrderedDict", "expected a torch.nn.Module"),
        ("math:pi", "expected something to call"),
        ("timm:resnet18?num_classes", "NAME?key=value"),
        ("timm:resnet18?num_classes=1&num_classes=2", "twice"),
    ],
)
def test_a_name_that_does_not_work_gets_one_clear_line(name, words):
    if name.startswith(("timm:r", "smp:")):
        pytest.importorskip("timm")
        pytest.importorskip("segmentation_models_pytorch")
    if name.startswith("monai:"):
        pytest.importorskip("monai")
    with pytest.raises(ModelError) as caught:
        resolve(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_are_refused_where_weights_are_left_out_too():
    """As `plan` does."""
    pytest.importorskip("segmentation_models_pytorch")
    with pytest.raises(ModelError, match="has no setting 'encoder'"):
        resolve("smp:Unet?encoder=resnet50", published=False)


@pytest.mark.parametrize(("name", "extra"), [("monai:UNet", "monai"), ("timm:resnet18", "timm"), ("smp:Unet", "smp")])
def test_a_missing_package_is_named_with_the_way_to_get_it(name, extra, monkeypatch):
    for module in ("monai", "monai.networks.nets", "timm", "segmentation_models_pytorch"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModelError, match=rf"pip install 'gigagrad\[{extra}\]'"):
        resolve(name)


def test_a_package_that_fails_to_import_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"fails to import: RuntimeError.* install the torchvision") as caught:
        resolve("timm:resnet18")
    assert "pip install" not in str(caught.value)


def test_a_module_that_fails_to_import_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_module_of_this_test.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        resolve("broken_module_of_this_test:make")


def test_dotted_attributes_are_followed():
    assert import_callable("torch.nn:functional.relu") is torch.nn.functional.relu


def test_importing_the_package_loads_no_optional_library():
    import subprocess

    code = (
        "import sys, gigagrad.models; print({'timm', 'segmentation_models_pytorch', 'monai', 'cv2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_library_networks_are_made_beside_any_build_of_pytorch():
    """A torchvision built for another PyTorch cannot import by itself; nothing but `resolve` is to be called."""
    script = "import gigagrad as gg; print(type(gg.models.resolve('timm:resnet10t')).__name__)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["Sequential"], done.stderr


def test_a_network_of_other_than_three_channels_has_a_front_of_as_many():
    model = resolve("smp:Unet?encoder_name=resnet18&in_channels=5").eval()
    assert model(torch.zeros(1, 5, 64, 64, dtype=torch.uint8)).shape == (1, 1, 64, 64)
    assert dict(model.named_buffers())["preprocess.factor"].shape[1] == 5
    with pytest.raises(ImageError, match="in_channels=4"):
        model(torch.zeros(1, 4, 64, 64, dtype=torch.uint8))
