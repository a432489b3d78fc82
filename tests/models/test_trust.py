"""Names that come from a file: what they can reach, what must be said to allow more, and that nothing runs before."""

import sys
from types import ModuleType

import pytest
import torch

from gigagrad.errors import ModelError
from gigagrad.models import load_model, resolve
from gigagrad.models.registry import check_network, check_trusted, import_callable

MODULE = "marker_of_test_trust"
PROBES = [
    "subprocess:getoutput?cmd=touch+ran",
    f"{MODULE}:make",
    f"{MODULE}:Net",
    f"{MODULE}:os.system?command=touch+ran",
    "torch.nn:Conv2d?in_channels=3&out_channels=1&kernel_size=1",
    "builtins:exec",
    " timm:resnet18",
    "Timm:resnet18",
    "gigagrad.models:resolve?name=subprocess:getoutput",
]


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A module in the working directory that leaves a file behind when it is imported, and one when it is called."""
    (tmp_path / f"{MODULE}.py").write_text(
        "import os, pathlib, torch\n"
        "pathlib.Path('imported').touch()\n"
        "def make(**settings):\n"
        "    pathlib.Path('called').touch()\n"
        "    return torch.nn.Conv2d(3, 1, 1)\n"
        "class Net(torch.nn.Conv2d):\n"
        "    def __init__(self, width=1):\n"
        "        super().__init__(3, width, 1)\n"
        "class NoNet:\n"
        "    def __init__(self, **settings):\n"
        "        pathlib.Path('called').touch()\n"
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop(MODULE, None)


def saved(path, spec, model=None):
    state = {} if model is None else model.state_dict()
    torch.save({"format": "gigagrad model", "version": 1, "spec": spec, "state_dict": state}, path)
    return path


def untouched(folder):
    return {path.name for path in folder.iterdir()} <= {f"{MODULE}.py", "best.pt"}


@pytest.mark.parametrize("spec", PROBES)
def test_a_saved_model_imports_nothing_by_itself(marker, spec):
    with pytest.raises(ModelError, match="import") as caught:
        load_model(saved(marker / "best.pt", spec))
    assert untouched(marker)
    assert MODULE not in sys.modules
    assert "best.pt" in str(caught.value)
    assert spec.partition("?")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_message_says_what_would_allow_it_and_only_that_does(marker):
    model = torch.nn.Conv2d(3, 2, 1)
    path = saved(marker / "best.pt", f"{MODULE}:Net?width=2", model)
    with pytest.raises(ModelError, match=rf"--trust {MODULE}:Net .*trust=\['{MODULE}:Net'\]"):
        load_model(path)
    for other in ((), (f"{MODULE}:make",), (MODULE,), f"{MODULE}:NetNet", ("*",), ("",)):
        with pytest.raises(ModelError, match="not imported"):
            load_model(path, other)
    assert untouched(marker)
    spec, loaded = load_model(path, (f"{MODULE}:Net",))
    assert spec == f"{MODULE}:Net?width=2"
    assert torch.equal(loaded.weight, model.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [f"{MODULE}:make", f"{MODULE}:NoNet", f"{MODULE}:os.system", "subprocess:getoutput"])
def test_what_is_trusted_must_be_a_network_before_it_is_called(marker, path):
    with pytest.raises(ModelError, match=r"no subclass of torch\.nn\.Module; it was not called"):
        load_model(saved(marker / "best.pt", f"{path}?cmd=touch+called"), [path])
    assert not (marker / "called").exists()


@pytest.mark.parametrize(
    "path", ["a:b; touch ran", "a:b$(id)", "a b:c", "a:b\u2024c", "a:", "../a:b", "a:b:c", "\uff41:b"]
)
def test_a_name_that_a_shell_could_read_otherwise_is_never_offered(path):
    with pytest.raises(ModelError) as caught:
        check_trusted(path, "best.pt", (path,))
    assert "--trust" not in str(caught.value)


@pytest.mark.parametrize(
    "spec", ["paper-unet", "multi-stain?stains=2", "timm:resnet18?num_classes=2", "smp:Unet", "monai:UNet"]
)
def test_what_the_project_and_its_libraries_offer_needs_no_word(spec):
    check_network(spec, "best.pt", ())


def test_a_file_named_like_a_library_is_not_found_for_a_saved_model(marker, monkeypatch):
    """Only what the user names is looked for in the working directory."""
    (marker / "monai.py").write_text("import pathlib; pathlib.Path('imported').touch()\n")
    monkeypatch.delitem(sys.modules, "monai", raising=False)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(marker))])
    with pytest.raises(ModelError):
        load_model(saved(marker / "best.pt", "monai:UNet"))
    assert not (marker / "imported").exists()


@pytest.mark.parametrize(
    "spec",
    [
        "timm:hf-hub:owner/name",
        "timm:local-dir:.",
        "timm:resnet10t.a/../b",
        "timm:resnet10t?checkpoint_path=secret.pt",
        "timm:resnet10t?pretrained_cfg=other",
        "timm:resnet10t?pretrained=1",
        "timm:resnet10t?cache_dir=.",
        "smp:Unet?encoder_name=tu-hf-hub:owner/name",
        "smp:Unet?encoder_name=tu-local-dir:.",
        "smp:Unet?encoder_name=tu-resnet10t&checkpoint_path=secret.pt",
        "smp:Unet?encoder_name=tu-resnet10t&encoder_weights=",
        "smp:Unet?encoder_weights=imagenet",
    ],
)
def test_no_saved_model_makes_a_library_download_or_open_a_file(tmp_path, monkeypatch, spec):
    timm = pytest.importorskip("timm")
    smp = pytest.importorskip("segmentation_models_pytorch")

    def opened(*args, **settings):
        raise AssertionError("a file was opened, or asked for")

    for name in ("load_checkpoint", "load_model_config_from_hf", "load_model_config_from_path"):
        monkeypatch.setattr(timm.models._factory, name, opened)
    monkeypatch.setattr(timm.models._builder, "load_pretrained", opened)
    monkeypatch.setattr(smp.encoders, "hf_hub_download", opened)
    with pytest.raises(ModelError) as caught:
        load_model(saved(tmp_path / "best.pt", spec))
    assert "AssertionError" not in str(caught.value)


@pytest.mark.parametrize("off", ["false", "0", "none"])
def test_no_weights_means_no_weights(monkeypatch, off):
    """To smp, an encoder of timm is pretrained unless `encoder_weights` is None."""
    timm = pytest.importorskip("timm")
    pytest.importorskip("segmentation_models_pytorch")
    monkeypatch.setattr(timm.models._builder, "load_pretrained", lambda *args, **settings: pytest.fail("downloaded"))
    resolve(f"smp:Unet?encoder_name=tu-resnet10t&decoder_channels=8,8,8,8,8&encoder_weights={off}")


class _Network(torch.nn.Module):
    def __init__(self, pretrained=True, in_channels=3):
        super().__init__()
        assert not pretrained


class _Hungry(torch.nn.Module):
    def __init__(self, path_or_repo_id="bert", in_channels=3):
        super().__init__()


def _network(pretrained=False) -> "_Network":
    return _Network(pretrained)


def _tool(depth=1):
    raise AssertionError("called")


@pytest.fixture
def nets(monkeypatch):
    """A stand-in for `monai.networks.nets`, which has imported modules, helpers and downloads beside its networks."""
    nets = ModuleType("monai.networks.nets")
    for name, found in {"Net": _Network, "Hungry": _Hungry, "make": _network, "tool": _tool}.items():
        setattr(nets, name, found)
        monkeypatch.setattr(found, "__module__", "monai.networks.nets.some")
    nets.os, nets.nn, nets.Conv2d = __import__("os"), torch.nn, torch.nn.Conv2d  # type: ignore[attr-defined]
    for name in ("monai", "monai.networks", "monai.networks.nets"):
        monkeypatch.setitem(sys.modules, name, nets)


@pytest.mark.parametrize("name", ["os", "nn", "tool", "Conv2d", "os.system", "__loader__", "nothing"])
def test_of_monai_only_its_networks(nets, name):
    with pytest.raises(ModelError, match="unknown"):
        resolve(f"monai:{name}")


def test_a_network_of_monai_starts_from_random_weights(nets):
    assert isinstance(resolve("monai:Net").network, _Network)
    assert isinstance(resolve("monai:make").network, _Network)
    for name in ("monai:Hungry", "monai:Hungry?path_or_repo_id=x"):
        with pytest.raises(ModelError, match="opens no file"):
            resolve(name)
    with pytest.raises(ModelError, match="AssertionError"):  # which is what these stand-ins do where they are asked
        resolve("monai:Net?pretrained=true")
    assert isinstance(resolve("monai:Net?pretrained=true", published=False).network, _Network)


def test_what_is_typed_may_be_anything(marker):
    """`resolve` and the command line's own words are the user's: a function of theirs is called as it ever was."""
    assert isinstance(resolve(f"{MODULE}:make"), torch.nn.Conv2d)
    assert import_callable(f"{MODULE}:os.path.join")("a", "b") == "a/b"


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": 3},
        {"spec": None},
        {"spec": "paper-unet\x1b[2J"},
        {"state_dict": [1]},
        {"state_dict": {"a": "b"}},
        {"state_dict": None},
    ],
)
def test_other_things_in_the_place_of_name_and_weights_are_one_line(tmp_path, changes):
    payload = {"format": "gigagrad model", "version": 1, "spec": "paper-unet", "state_dict": {}}
    torch.save(payload | changes, tmp_path / "best.pt")
    with pytest.raises(ModelError, match=r"best\.pt") as caught:
        load_model(tmp_path / "best.pt")
    assert str(caught.value).isprintable()
    torch.save({"format": "gigagrad model"}, tmp_path / "best.pt")
    with pytest.raises(ModelError, match=r"best\.pt"):
        load_model(tmp_path / "best.pt")
