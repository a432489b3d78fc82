"""The network of several stains, by plain PyTorch: shapes, sizes, and that the paths really read each other."""

import pytest
import torch

from gigagrad.errors import ImageError, ModelError
from gigagrad.models import MultiStainNet, Normalise, load_model, resolve, save_model
from gigagrad.models.networks import LEVELS


def images(height, width, stains=2, dtype=torch.float32):
    torch.manual_seed(0)
    return tuple(torch.rand(1, 3, height, width, dtype=dtype) for _ in range(stains))


@pytest.mark.parametrize(("stains", "classes"), [(2, 1), (2, 3), (3, 2)])
def test_as_many_logits_as_classes_at_every_pixel(stains, classes):
    model = MultiStainNet(stains=stains, classes=classes, width=2)
    assert model(*images(32, 48, stains)).shape == (1, classes, 32, 48)


@pytest.mark.parametrize("size", [(17, 1), (1, 17), (33, 47), (31, 64), (16, 18), (45, 45)])
def test_any_size_trains(size):
    output = MultiStainNet(width=2)(*images(*size))
    assert output.shape == (1, 1, *size)
    output.mean().backward()


def test_any_size_at_all_predicts():
    with torch.no_grad():
        assert MultiStainNet(width=2).eval()(*images(1, 1)).shape == (1, 1, 1, 1)


@pytest.mark.parametrize("level", range(LEVELS))
@pytest.mark.parametrize(("path", "other"), [(0, 1), (1, 0)])
def test_each_path_reads_the_other_stain_at_every_level_below_the_first(level, path, other):
    """In evaluation mode, in which no statistics can carry one stain into the other's features."""
    model = MultiStainNet(width=2).eval()
    features = []
    model.encoder[level].blocks[path].register_forward_hook(lambda _module, _inputs, output: features.append(output))
    stains = [image.requires_grad_() for image in images(40, 40)]
    model(*stains)
    own, cross = torch.autograd.grad(features[0].square().sum(), [stains[path], stains[other]], materialize_grads=True)
    assert own.any()
    assert cross.any() == (level > 0)


def test_links_are_dense_the_last_level_reads_the_other_stains_first_level_directly():
    model = MultiStainNet(width=2)
    inputs = [level.blocks[0].branches[0][0].in_channels for level in model.encoder]  # type: ignore[index]
    assert inputs == [3, 3 + 2 * 2, 3 + 2 * (2 + 4), 3 + 2 * (2 + 4 + 8)]
    model.eval()
    seen = []
    model.encoder[-1].blocks[0].register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))  # type: ignore[index]
    first = []
    model.encoder[0].blocks[1].register_forward_hook(lambda _module, _inputs, output: first.append(output))  # type: ignore[index]
    model(*images(40, 40))
    pooled = torch.nn.functional.max_pool2d(first[0], 8)
    assert any(torch.equal(pooled, seen[0][:, c : c + 2]) for c in range(seen[0].shape[1] - 1))


def test_every_parameter_has_a_gradient():
    model = MultiStainNet()
    model(*images(64, 64)).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_stains_are_told_apart():
    model = MultiStainNet(width=2).eval()
    he, ihc = images(32, 32)
    with torch.no_grad():
        assert not torch.allclose(model(he, ihc), model(ihc, he))


def test_bytes_are_scaled_to_one():
    model = MultiStainNet(width=2).double().eval()
    bytes_ = [torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8) for _ in range(2)]
    with torch.no_grad():
        torch.testing.assert_close(model(*bytes_), model(*(image.double() / 255 for image in bytes_)))


@pytest.mark.parametrize(
    ("stains", "words"),
    [
        (images(32, 32, 1), "takes 2, one for each stain"),
        ((*images(32, 32, 1), *images(32, 48, 1)), "32 x 32, 32 x 48 px"),
        ((torch.rand(1, 1, 32, 32), torch.rand(1, 1, 32, 32)), "takes 3"),
        (images(16, 16), "more than 16 px"),
    ],
)
def test_images_that_do_not_fit_are_refused_with_the_remedy(stains, words):
    with pytest.raises(ImageError, match=words):
        MultiStainNet(width=2)(*stains)


@pytest.mark.parametrize("wrong", [{"stains": 1}, {"classes": 0}, {"width": 0}])
def test_settings_that_make_no_network_are_refused(wrong):
    with pytest.raises(ValueError, match="two or more stains"):
        MultiStainNet(**wrong)


def test_has_a_name_and_survives_a_file(tmp_path):
    model = resolve("multi-stain?stains=3&classes=2&width=2")
    assert (model.stains, model.head.out_channels) == (3, 2)  # type: ignore[comparison-overlap]
    assert isinstance(next(model.children()), Normalise)
    save_model(tmp_path / "best.pt", "multi-stain?stains=3&classes=2&width=2", model)
    stains = images(20, 20, 3)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "best.pt")[1](*stains), model.eval()(*stains))
    with pytest.raises(ModelError, match="two or more stains"):
        resolve("multi-stain?stains=1")
    with pytest.raises(ModelError, match="did you mean 'multi-stain'"):
        resolve("multi-stains")
