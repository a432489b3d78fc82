"""Weights to begin with: a file's into any network that has their names, and published ones for who types the name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gigagrad.errors import ModelError
from gigagrad.models import load, load_model, load_weights_into, resolve, save_model
from gigagrad.models.registry import asks_for_weights
from gigagrad.models.saved import save_folder


def network(classes=2, width=3):
    """Names as a library's: `preprocess`, which has no tensors, then `network`."""
    inner = nn.Sequential()
    inner.add_module("conv1", nn.Conv2d(3, width, 3))
    inner.add_module("norm1", nn.BatchNorm2d(width))
    inner.add_module("head", nn.Conv2d(width, classes, 1))
    outer = nn.Sequential()
    outer.add_module("network", inner)
    return outer


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def bare(model):
    return {name.removeprefix("network."): tensor for name, tensor in model.state_dict().items()}


def renamed(start):
    """Makes of a network its tensors as a file has them whose names all begin with `start`."""
    return lambda model: {start + name: tensor for name, tensor in bare(model).items()}


@pytest.mark.parametrize(
    "content",
    [
        bare,
        renamed("network."),
        renamed("module."),
        renamed("model."),
        renamed("net."),
        renamed("module.model."),
        renamed("_orig_mod.network."),
        lambda model: {"state_dict": renamed("model.")(model), "epoch": 3},
        lambda model: {"model": bare(model), "optimizer": {"state": {}}},
        lambda model: {"model": {"state_dict": bare(model)}},
    ],
)
def test_the_wrapper_of_a_file_s_names_is_found(tmp_path, content):
    source, model = network(), network()
    torch.save(content(source), tmp_path / "weights.pth")
    report = load_weights_into(model, tmp_path / "weights.pth")
    assert same(model, source)
    assert report.complete
    assert set(report.loaded) == set(model.state_dict())
    assert str(report) == f"9 of 9 tensors begin as in {tmp_path / 'weights.pth'}"


@pytest.mark.parametrize("name", ["weights.pt", "best.pt", "run", "hub", "model", "model/model.safetensors"])
def test_a_file_or_folder_of_any_kind(tmp_path, name):
    source, model = network(), network()
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    save_model(tmp_path / "best.pt", "paper-unet", source)
    for folder in ("run", "hub"):
        (tmp_path / folder).mkdir()
    save_model(tmp_path / "run" / "best.pt", "paper-unet", source)
    save_file(bare(source), tmp_path / "hub" / "model.safetensors")
    (tmp_path / "hub" / "config.json").write_text(json.dumps({"architecture": "resnet18"}))
    save_folder(tmp_path / "model", "paper-unet", source, {}, "")
    assert load_weights_into(model, str(tmp_path / name)).complete
    assert same(model, source)


def test_several_files_with_an_index(tmp_path):
    source, target = network(), network()
    tensors = bare(source)
    weight_map = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for path in (index, tmp_path):
        assert load_weights_into(target, path).complete
        assert same(source, target)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ModelError, match=r"no index of safetensors files \(a file is in another folder"):
        load_weights_into(target, index)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        load_weights_into(target, index)


def test_other_shapes_and_names_stay_as_initialised_and_are_told(tmp_path):
    source, model = network(classes=2), network(classes=5)
    model.network.add_module("extra", nn.Conv2d(5, 5, 1, bias=False))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save({**bare(source), "fc.weight": torch.zeros(3)}, tmp_path / "weights.pt")
    report = load_weights_into(model, tmp_path / "weights.pt")
    assert not report.complete
    assert report.skipped == {
        "network.head.weight": ((2, 3, 1, 1), (5, 3, 1, 1)),
        "network.head.bias": ((2,), (5,)),
    }
    assert report.missing == ("network.extra.weight",)
    assert report.unexpected == ("fc.weight",)
    after = model.state_dict()
    for name in (*report.skipped, *report.missing):
        assert torch.equal(after[name], before[name])
    for name in report.loaded:
        assert torch.equal(after[name], source.state_dict()[name])
    assert len(report.loaded) == 7
    assert str(report) == (
        f"7 of 10 tensors begin as in {tmp_path / 'weights.pt'}; of another shape, so left as initialised: "
        "network.head.weight (2 x 3 x 1 x 1 there, 5 x 3 x 1 x 1 here), network.head.bias (2 there, 5 here); "
        "not in it, so left as initialised: network.extra.weight; in it, but not in the network: fc.weight"
    )


def test_an_encoder_s_weights_find_the_encoder(tmp_path):
    """Of a classifier into a U-Net with it inside."""
    source, model = network(), nn.ModuleDict({"network": nn.ModuleDict({"encoder": network(), "decoder": network()})})
    torch.save(bare(source), tmp_path / "weights.pt")
    report = load_weights_into(model, tmp_path / "weights.pt")
    assert same(model["network"]["encoder"], source)  # type: ignore[index]
    assert {name.split(".")[1] for name in report.missing} == {"decoder"}


def test_many_names_are_counted(tmp_path):
    source = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(6)))
    torch.save({**source.state_dict(), **{f"other{k}": torch.zeros(1) for k in range(8)}}, tmp_path / "weights.pt")
    assert str(load_weights_into(source, tmp_path / "weights.pt")).endswith("other3, other4 and 3 more")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"network.down8.weights": torch.zeros(2)}, r"'network.down8.weights' \(2\) in the file and "),
        ({"x": torch.zeros(())}, r"nearest are 'x' \(one number\) in the file and 'network.down8.weight' \(3 x 1 x 15"),
        ({"network.down8.weight": torch.zeros(2)}, r"no tensor in .*weights.pt fits the network"),
        ({"epoch": 3}, "holds no tensors by name"),
        ([torch.zeros(2)], "holds no tensors by name"),
        ({}, "holds no tensors by name"),
        (nn.Conv2d(1, 1, 1), r"no file of tensors alone .*save the tensors alone: torch.save\(network.state_dict\(\)"),
    ],
)
def test_a_file_that_is_of_no_use_is_one_line(tmp_path, content, words):
    model = resolve("paper-unet")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ModelError, match=words) as caught:
        load_weights_into(model, tmp_path / "weights.pt")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_missing_and_damaged_files_are_one_line(tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    (tmp_path / "empty").mkdir()
    for name in ("none.pt", "none.safetensors", "cut.safetensors", "empty"):
        with pytest.raises(ModelError, match=name) as caught:
            load_weights_into(network(), tmp_path / name)
        assert "\n" not in str(caught.value)


def test_code_in_a_file_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    torch.save({"state_dict": {"conv1.weight": Trap()}}, tmp_path / "trap.pt")
    with pytest.raises(ModelError, match="save the tensors alone"):
        load_weights_into(network(), tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()


# Saved as a folder


def test_a_folder_loads_back_into_the_plain_module(tmp_path):
    model = resolve("paper-unet")
    save_folder(tmp_path / "model", "paper-unet", model, {"level": 1}, "# A card\n")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    for path in (tmp_path / "model", tmp_path / "model" / "model.safetensors"):
        loaded = load(path)
        assert same(loaded, model)
        assert not loaded.training
    assert load_model(tmp_path / "model")[0] == "paper-unet"
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == model.state_dict().keys()


@pytest.mark.parametrize("weight", [torch.randn(3, 3), torch.randn(3, 3).t()])
def test_tied_and_strided_tensors_are_written(tmp_path, weight):
    one = nn.Linear(3, 3, bias=False)
    one.weight = nn.Parameter(weight)
    other = nn.Linear(3, 3, bias=False)
    other.weight = one.weight
    save_folder(tmp_path, "torch.nn:Sequential", nn.Sequential(one, other, one), {}, "")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == {"0.weight", "1.weight", "2.weight"}
    for tensor in tensors.values():
        assert torch.equal(tensor, one.weight)


@pytest.mark.parametrize(
    "config",
    ["{", "[]", "{}", '{"format": "gigagrad model"}', '{"format": "gigagrad model", "spec": "subprocess:getoutput"}'],
)
def test_a_folder_s_name_is_checked_like_a_file_s(tmp_path, config):
    save_folder(tmp_path, "paper-unet", resolve("paper-unet"), {}, "")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_safetensors_cannot_hold_is_said(tmp_path):
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(ModelError, match="safetensors cannot hold"):
        save_folder(tmp_path, "paper-unet", model, {}, "")


# Published weights


@pytest.fixture
def timm():
    pytest.importorskip("segmentation_models_pytorch")
    return pytest.importorskip("timm")


@pytest.fixture
def published(timm, monkeypatch):
    """Stands in for what the libraries would download: all ones. Gives the list of what they asked for."""
    import segmentation_models_pytorch as smp

    asked = []

    def of_timm(model_id, *args, **settings):
        asked.append(model_id)
        bare_model = timm.create_model(model_id.split("/")[1].split(".")[0], pretrained=False)
        return {name: torch.ones_like(tensor) for name, tensor in bare_model.state_dict().items()}

    def of_smp(repo_id, filename, **settings):
        asked.append(repo_id)
        return filename

    def ones(path, **settings):
        encoder = smp.encoders.get_encoder("resnet18")
        return {name: torch.ones_like(tensor) for name, tensor in encoder.state_dict().items()}

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", of_timm)
    monkeypatch.setattr(smp.encoders, "hf_hub_download", of_smp)
    monkeypatch.setattr(smp.encoders, "load_file", ones)
    return asked


NAMES = {
    "timm:resnet10t?pretrained=true&num_classes=3": ("network.conv1.0.weight", "timm/resnet10t.c3_in1k"),
    "timm:resnet10t.c3_in1k?pretrained=true": ("network.conv1.0.weight", "timm/resnet10t.c3_in1k"),
    "smp:Unet?encoder_name=resnet18&encoder_weights=imagenet&decoder_channels=8,8,8,8,8": (
        "network.encoder.conv1.weight", "smp-hub/resnet18.imagenet",
    ),
    "smp:Unet?encoder_name=tu-resnet10t&encoder_weights=imagenet&decoder_channels=8,8,8,8,8": (
        "network.encoder.model.conv1.0.weight", "timm/resnet10t.c3_in1k",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_published_weights_come_when_they_are_typed_and_never_with_a_file(tmp_path, published, name):
    tensor, place = NAMES[name]
    model = resolve(name).eval()
    assert set(published) == {place}
    assert torch.equal(model.state_dict()[tensor], torch.ones_like(model.state_dict()[tensor]))
    published.clear()
    save_model(tmp_path / "best.pt", name, model)
    save_folder(tmp_path / "model", name, model, {}, "")
    for saved in ("best.pt", "model"):
        spec, loaded = load_model(tmp_path / saved)
        assert spec == name
        assert same(loaded, model)
        image = torch.full((1, 3, 64, 64), 200, dtype=torch.uint8)
        assert torch.equal(loaded.get_submodule("preprocess")(image), model.get_submodule("preprocess")(image))
    assert not (resolve(name, published=False).state_dict()[tensor] == 1).all()
    assert published == []
    assert asks_for_weights(name) in ("pretrained", "encoder_weights")
    without = name.replace("pretrained=true", "pretrained=false").replace("imagenet", "none")
    assert asks_for_weights(without) is None


def test_the_front_is_what_the_weights_were_made_for(timm):
    def front(query):
        return resolve(f"smp:Unet?decoder_channels=8,8,8,8,8&{query}", published=False).preprocess.factor

    half = torch.full((1, 3, 1, 1), 2 / 255)
    assert torch.allclose(front("encoder_name=xception&encoder_weights=imagenet"), half)
    assert torch.allclose(front("encoder_name=tu-mobilenetv4_conv_small_035&encoder_weights=true"), half)
    assert not torch.allclose(front("encoder_name=resnet18&encoder_weights=imagenet"), half)
    assert not torch.allclose(front("encoder_name=xception"), half)


@pytest.mark.parametrize("name", NAMES)
def test_a_download_that_fails_is_one_line(timm, monkeypatch, name):
    import segmentation_models_pytorch as smp

    def down(*args, **settings):
        raise ConnectionError("the hub\nis not there")

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", down)
    monkeypatch.setattr(smp.encoders, "hf_hub_download", down)
    with pytest.raises(ModelError, match=r"cannot get the published weights .* --weights") as caught:
        resolve(name)
    assert "\n" not in str(caught.value)
    assert "check the connection" in str(caught.value)
    resolve(name, published=False)


def test_a_wrong_setting_is_not_taken_for_a_failed_download(timm):
    for name in ("timm:resnet18?pretrained=true&num_clases=3", "timm:resnet18.nope?pretrained=true"):
        with pytest.raises(ModelError, match="cannot build model"):
            resolve(name)
