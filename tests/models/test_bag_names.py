"""Names of networks that take bags: what they build, what they may not, and one line for those that do not work."""

import json
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gigagrad as gg
from gigagrad.errors import ModelError
from gigagrad.models import load_model, load_weights_into, resolve, resolve_encoder, save_model
from gigagrad.models.bag_names import BagName, encoder_in
from gigagrad.models.mil import HEADS, Clam, TransMil
from gigagrad.models.networks import Normalise, Preprocess
from gigagrad.models.registry import asks_for_weights, called_path, check_network, is_reloadable

BAG = torch.randint(0, 255, (5, 3, 32, 32), dtype=torch.uint8)
MODULE = "encoders_of_test_bag_names"


@pytest.fixture
def encoders(tmp_path, monkeypatch):
    """A module in the working directory that leaves a file behind when it is imported."""
    (tmp_path / f"{MODULE}.py").write_text(
        "import pathlib, torch\n"
        "from torch import nn\n"
        "pathlib.Path('imported').touch()\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, width=4):\n"
        "        super().__init__(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        "class Fields(nn.Conv2d):\n"
        "    def __init__(self):\n"
        "        super().__init__(3, 4, 3)\n"
        "class Patches(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, 7))\n"
        "def make(width=4):\n"
        "    return Net(width)\n"
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize("head", HEADS)
def test_a_name_with_everything_in_it(head):
    pytest.importorskip("timm")
    small = {"transmil": "&head.width=16&head.heads=2", "mean": "", "max": ""}.get(head, "&head.width=16")
    name = f"mil:encoder=timm:vit_tiny_patch16_224&encoder.img_size=32&encoder.depth=1&head={head}{small}&classes=3"
    model: Any = resolve(name).eval()
    assert [key for key, _ in model.named_children()] == ["preprocess", "network"]
    assert model(BAG).shape == (1, 3)
    assert type(model.network.head) is HEADS[head]
    assert model.network.attention(model.preprocess(BAG)).shape == (5,)


def test_what_is_left_out_has_defaults():
    said = BagName.parse("mil:encoder=timm:resnet10t")
    assert (said.encoder, said.head, said.classes, said.features, said.preprocessing) == (
        "timm:resnet10t",
        "abmil",
        1,
        None,
        {},
    )
    assert BagName.parse("mil:classes=4&head=clam&encoder=a.b:C&head.k=3").of["head"] == {"k": 3}
    model: Any = resolve("mil:encoder=smp:resnet18&head=clam&classes=2")
    assert model.network.head.k == 8
    transmil = TransMil(6, 2)
    assert (transmil.layer1.attn.heads, transmil.layer1.attn.landmarks, transmil.layer1.attn.iterations) == (8, 256, 6)
    clam: Any = Clam(6, 2)
    assert (clam.pool.scores.value.out_features, clam.pool.scores.dropout.p) == (256, 0.25)


@pytest.mark.parametrize(
    ("encoder", "width"),
    [
        ("timm:resnet10t", 512),
        ("timm:mobilenetv3_small_050", 1024),
        ("smp:resnet18", 512),
        ("monai:DenseNet121&encoder.spatial_dims=2&encoder.in_channels=3&encoder.out_channels=24", 24),
    ],
)
def test_encoders_of_the_libraries_give_a_vector_of_each_patch_by_itself(encoder, width):
    for library in ("timm", "segmentation_models_pytorch", "monai"):
        pytest.importorskip(library)
    model: Any = resolve(f"mil:encoder={encoder}&head=mean").eval()
    with torch.no_grad():
        features = model.network.encoder(model.preprocess(BAG))
        assert features.shape == (5, width)
        torch.testing.assert_close(model.network.encoder(model.preprocess(BAG[3:4])), features[3:4])
    assert model.network.head.classifier.in_features == width


@pytest.mark.parametrize(
    "name",
    [
        "timm:vit_tiny_patch16_224&encoder.img_size=32&encoder.depth=2&head=transmil&head.width=16&head.landmarks=4",
        "timm:resnet10t&head=clam&head.dropout=0",
        "smp:resnet18&head=abmil",
    ],
)
def test_a_bag_goes_through_an_encoder_of_a_library_a_few_patches_at_a_time(name):
    pytest.importorskip("timm")
    pytest.importorskip("segmentation_models_pytorch")
    model: Any = resolve(f"mil:encoder={name}&classes=2").double()
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    target, begun = torch.tensor([1]), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    loss = gg.losses.clam(model(BAG), target)
    loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    largest = max(float(gradient.abs().max()) for gradient in expected)
    model.zero_grad()
    model.load_state_dict(begun)
    engine = gg.compile(model, gg.losses.clam, tile=(2, 1))
    assert not [whole for whole in engine.plan(BAG, target).whole_field if "encoder" in whole.module]
    assert engine.backward(BAG, target) == pytest.approx(loss.item(), rel=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-10 * largest)


def test_the_front_is_what_the_encoder_was_made_for_unless_the_name_says():
    pytest.importorskip("timm")
    vit: Any = resolve("mil:encoder=timm:vit_tiny_patch16_224&encoder.depth=1").preprocess
    torch.testing.assert_close(vit.factor.flatten(), torch.full((3,), 1 / (255 * 0.5)))
    named = "mil:encoder=timm:vit_tiny_patch16_224&encoder.depth=1&mean=0.1,0.2,0.3&std=0.4,0.5,0.8"
    model: Any
    for model in (resolve(named), resolve("timm:vit_tiny_patch16_224?depth=1&mean=0.1,0.2,0.3&std=0.4,0.5,0.8")):
        factor = 1 / (255 * torch.tensor([0.4, 0.5, 0.8]))
        torch.testing.assert_close(model.preprocess.factor.flatten(), factor)
        torch.testing.assert_close(model.preprocess.shift.flatten(), torch.tensor([-0.25, -0.4, -0.375]))
    assert resolve("mil:encoder=timm:resnet10t&scale=0,1000").preprocess.scale == (0, 1000)
    assert isinstance(resolve("mil:encoder=timm:resnet10t&encoder.in_chans=1").preprocess, Preprocess)
    grey: Any = resolve("mil:encoder=timm:resnet10t&encoder.in_chans=1&mean=0.5&std=0.25").preprocess
    assert grey.factor.shape == (1, 1, 1, 1)


def test_an_encoder_of_one_s_own(encoders):
    model: Any = resolve(f"mil:encoder={MODULE}:make&encoder.width=9")
    assert [key for key, _ in model.named_children()] == ["network"]
    assert model.network.head.embed[0].in_features == 9
    assert model(BAG.float()).shape == (1, 1)
    fronted: Any = resolve(f"mil:encoder={MODULE}:Net&mean=0.5,0.5,0.5&std=1,1,1")
    assert isinstance(fronted.preprocess, Normalise)
    assert fronted(BAG).shape == (1, 1)
    assert resolve(f"mil:encoder={MODULE}:Patches&features=7")(BAG.float()).shape == (1, 1)
    with pytest.raises(ModelError, match=r"of a patch of 224 px \(RuntimeError.*say it, as in features=512"):
        resolve(f"mil:encoder={MODULE}:Patches")
    with pytest.raises(ModelError, match=r"gives \(2, 4, 222, 222\) for two patches"):
        resolve(f"mil:encoder={MODULE}:Fields")


def test_an_encoder_by_itself(encoders):
    pytest.importorskip("timm")
    model: Any = resolve_encoder("timm:resnet10t?mean=0,0,0&std=1,1,1").eval()
    assert model(BAG).shape == (5, 512)
    assert float(model.preprocess.shift.abs().max()) == 0
    assert resolve_encoder(f"{MODULE}:make?width=9")(BAG.float()).shape == (5, 9)
    with pytest.raises(ModelError, match="unknown encoder 'paper-unet'"):
        resolve_encoder("paper-unet")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mil:", "names no encoder"),
        ("mil:head=abmil", "names no encoder"),
        ("mil:resnet18", "settings are written mil:encoder=NAME"),
        ("mil:encoder=timm:resnet10t&head=abmill", "unknown head 'abmill'"),
        ("mil:encoder=timm:resnet10t&head=abmill", "did you mean 'abmil'"),
        ("mil:encoder=timm:resnet10t&heads=abmil", "no setting 'heads'"),
        ("mil:encoder=timm:resnet10t&clases=2", "did you mean 'classes'"),
        ("mil:encoder=timm:resnet10t&classes=0", "from 1 on, got 0"),
        ("mil:encoder=timm:resnet10t&classes=two", "from 1 on, got 'two'"),
        ("mil:encoder=timm:resnet10t&classes=true", "from 1 on, got True"),
        ("mil:encoder=timm:resnet10t&head.widht=3", "did you mean 'width'"),
        ("mil:encoder=timm:resnet10t&head=mean&head.width=3", "it has none"),
        ("mil:encoder=timm:resnet10t&encodr.depth=3", "did you mean 'encoder'"),
        ("mil:encoder=timm:resnet10t&encoder.a.b=3", "settings are written mil:encoder=NAME"),
        ("mil:encoder=timm:resnet10t?pretrained=true&head=abmil", "settings of an encoder bear its name"),
        ("mil:encoder=timm:resnet10t%3Fpretrained=true", "settings of an encoder bear its name"),
        ("mil:encoder=timm:resnet10", "did you mean 'resnet1"),
        ("mil:encoder=timn:resnet10t", "cannot import 'timn'"),
        ("mil:encoder=smp:resnet", "unknown 'resnet'"),
        ("mil:encoder=smp:tu-resnet10t", "write encoder=timm:resnet10t"),
        ("mil:encoder=resnet10t", "unknown encoder 'resnet10t'"),
        ("mil:encoder=paper-unet", "unknown encoder 'paper-unet'"),
        ("mil:encoder=mil:encoder%3Dsmp:resnet18", "unknown encoder 'mil:encoder=smp:resnet18'"),
        ("mil:encoder=timm:resnet10t&encoder.checkpoint_path=a.pt", "--weights FILE"),
        ("mil:encoder=timm:resnet10t&head=clam", "two classes or more"),
        ("mil:encoder=timm:resnet10t&head=transmil&head.width=30", "a width that its heads divide"),
        ("mil:encoder=timm:resnet10t&mean=a", "mean and std take numbers"),
        ("mil:encoder=timm:resnet10t&head=mean&head=max", "sets 'head' twice"),
    ],
)
def test_a_name_that_does_not_work_gets_one_clear_line(name, words):
    pytest.importorskip("timm")
    pytest.importorskip("segmentation_models_pytorch")
    with pytest.raises(ModelError) as caught:
        resolve(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


HUB = {
    "architecture": "vit_tiny_patch16_224",
    "num_classes": 0,
    "model_args": {"img_size": 32, "depth": 1, "init_values": 1e-05, "dynamic_img_size": True},
    "pretrained_cfg": {"mean": [0.7, 0.6, 0.5], "std": [0.2, 0.3, 0.4], "custom_load": False},
}


def test_a_folder_of_the_hub_says_what_to_write_and_fills_the_encoder(tmp_path):
    pytest.importorskip("timm")
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    with pytest.raises(ModelError, match=rf"and --weights {tmp_path}") as caught:
        resolve(f"mil:encoder={tmp_path}&head=mean")
    written = encoder_in(tmp_path)
    assert f"write encoder={written}," in str(caught.value)
    model: Any = resolve(f"mil:encoder={written}&head=mean")
    torch.testing.assert_close(model.preprocess.factor.flatten(), 1 / (255 * torch.tensor([0.2, 0.3, 0.4])))
    source: Any = resolve(f"mil:encoder={written}&head=mean").network.encoder
    assert source.blocks[0].ls1.gamma.shape == (192,)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    report = load_weights_into(model, tmp_path)
    assert report.missing == ("network.head.classifier.weight", "network.head.classifier.bias")
    assert not report.unexpected
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.network.encoder.state_dict()[name], tensor)


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"architecture": 3, "model_args": 4}', '{"model_type": "vit"}']
)
def test_any_other_folder_says_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert encoder_in(tmp_path) is None


def test_a_saved_model_is_loaded_again_and_a_stranger_s_encoder_is_not_called(encoders):
    pytest.importorskip("timm")
    model: Any = resolve("mil:encoder=timm:resnet10t&head=clam&head.width=8&classes=2").eval()
    save_model("best.pt", "mil:encoder=timm:resnet10t&encoder.pretrained=true&head=clam&head.width=8&classes=2", model)
    torch.testing.assert_close(load_model("best.pt")[1](BAG), model(BAG))  # pretrained: nothing is downloaded
    own = f"mil:encoder={MODULE}:Net&encoder.width=5&head=mean"
    save_model("own.pt", own, nn.Identity())
    with pytest.raises(ModelError, match=rf"--trust {MODULE}:Net "):
        load_model("own.pt")
    assert not (encoders / "imported").exists()
    save_model("own.pt", own, resolve(own))
    assert load_model("own.pt", [f"{MODULE}:Net"])[0] == own
    with pytest.raises(ModelError, match=r"no subclass of torch\.nn\.Module; it was not called"):
        check_network(f"mil:encoder={MODULE}:make", "run.yaml", [f"{MODULE}:make"])
    assert called_path(own) == called_path(f"{MODULE}:Net?width=5") == f"{MODULE}:Net"
    assert is_reloadable(own)
    assert not is_reloadable(f"mil:encoder={MODULE}:make")
    assert is_reloadable("mil:encoder=timm:resnet10t")


@pytest.mark.parametrize(
    "encoder",
    [
        "subprocess:getoutput&encoder.cmd=touch+ran",
        "builtins%3Aexec",
        " timm:resnet10t",
        "timm:hf-hub:owner/name",
        "timm:local-dir:.",
        "timm:resnet10t&encoder.checkpoint_path=secret.pt",
        "timm:resnet10t&encoder.pretrained_cfg=other",
        "timm:resnet10t&encoder.cache_dir=.",
        "smp:tu-hf-hub:owner/name",
        "smp:resnet18&encoder.checkpoint_path=secret.pt",
        ".",
        "mil:encoder%3Dos:system",
    ],
)
def test_what_a_stranger_s_name_may_not_do(encoders, monkeypatch, encoder):
    timm, smp = pytest.importorskip("timm"), pytest.importorskip("segmentation_models_pytorch")

    def opened(*args, **settings):
        raise AssertionError("a file was opened, or asked for")

    for name in ("load_checkpoint", "load_model_config_from_hf", "load_model_config_from_path"):
        monkeypatch.setattr(timm.models._factory, name, opened)
    monkeypatch.setattr(timm.models._builder, "load_pretrained", opened)
    monkeypatch.setattr(smp.encoders, "hf_hub_download", opened)
    monkeypatch.setattr("gigagrad.models.registry.encoder_in", opened)
    if encoder == ".":  # settings, unlike saved models, may ask for published weights, but not for a folder
        with pytest.raises(ModelError, match=r"unknown encoder '\.'"):
            check_network(f"mil:encoder={encoder}", "run.yaml", ())
    save_model("best.pt", f"mil:encoder={encoder}&head=mean", nn.Identity())
    with pytest.raises(ModelError) as caught:
        load_model("best.pt")
    assert "AssertionError" not in str(caught.value)
    assert {path.name for path in encoders.iterdir()} == {f"{MODULE}.py", "best.pt"}


def test_weights_that_a_name_asks_for(monkeypatch):
    timm, smp = pytest.importorskip("timm"), pytest.importorskip("segmentation_models_pytorch")
    assert asks_for_weights("mil:encoder=timm:resnet10t&encoder.pretrained=true") == "pretrained"
    assert asks_for_weights("mil:encoder=timm:resnet10t&encoder.pretrained=false") is None
    assert asks_for_weights("mil:encoder=a.b:C&encoder.pretrained=true") is None
    asked: list[str] = []

    def download(*args, **settings):
        asked.append("smp")
        raise OSError("no connection")

    monkeypatch.setattr(timm.models._builder, "load_pretrained", lambda *args, **settings: asked.append("timm"))
    monkeypatch.setattr(smp.encoders, "hf_hub_download", download)
    for published in (False, True):
        resolve("mil:encoder=timm:resnet10t&encoder.pretrained=true", published=published)
    with pytest.raises(ModelError, match="cannot get the published weights"):
        resolve("mil:encoder=smp:resnet18&encoder.weights=imagenet")
    resolve("mil:encoder=smp:resnet18&encoder.weights=imagenet", published=False)
    assert asked == ["timm", "smp"]
