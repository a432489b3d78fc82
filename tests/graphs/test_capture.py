"""What capture accepts, names and refuses."""

import copy
import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gigagrad.errors import CaptureError, UnsupportedOperatorError
from gigagrad.graphs import InputSpec, LossModule, capture

IMAGE = InputSpec((1, 2, 9, 8), torch.float32, field=True)
TARGET = InputSpec((1, 3, 9, 8), torch.float32, field=True)


class Net(nn.Module):
    """A convolution, then whatever the test says."""

    def __init__(self, function=lambda self, x: x):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.function = function

    def forward(self, x):
        return self.function(self, self.conv(x))


def mean_product(output, target):
    return (output * target).mean()


def test_tensors_go_by_each_of_their_names():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Module())
    model.again, model[2].weight = model[0], model[0].weight
    model[2].register_parameter("none", None)
    model[2].register_buffer("nothing", None)
    model.register_module("absent", None)
    module = LossModule(model, nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)))
    found = module.named_tensors()
    named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    expected = {name: tensor for tensors in named for name, tensor in tensors}
    assert found.keys() == expected.keys()
    assert {"model.again.bias", "model.2.weight", "model.1.running_mean", "loss.pos_weight"} <= found.keys()
    assert all(found[name] is expected[name] for name in expected)


def test_shapes_are_the_whole_images_and_no_memory_is_used():
    size = (160_000, 640_000)
    image, target = InputSpec((1, 2, *size), torch.float32, True), InputSpec((1, 3, *size), torch.uint8, True)
    graph = capture(Net(), mean_product, image, target)
    conv = next(node for node in graph.nodes if "conv2d" in node.op)
    assert conv.shape == (1, 3, 160_000, 640_000)
    assert conv.is_field
    assert conv.differentiable
    assert graph.source("target").dtype == torch.uint8
    assert not graph.source("image").differentiable
    assert graph[graph.output].shape == ()


def test_names_follow_the_model_and_the_loss():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))
            self.register_buffer("weight", torch.ones(3, 1, 1))

        def forward(self, output, target):
            return (output * target * self.weight).mean() * self.temperature

    graph = capture(Net(), Weighted(), IMAGE, TARGET)
    named = {(node.op, node.arguments["name"]) for node in graph.nodes if node.is_source}
    assert named == {
        ("image", "image"),
        ("target", "target"),
        ("parameter", "model.conv.weight"),
        ("parameter", "model.conv.bias"),
        ("parameter", "loss.temperature"),
        ("buffer", "loss.weight"),
    }


def test_capture_leaves_the_model_as_it_was():
    net = Net(lambda self, x: x + 1)
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    before = copy.deepcopy(net.state_dict())
    capture(net, mean_product, IMAGE, TARGET)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(net.conv.weight.grad, torch.ones_like(net.conv.weight))
    assert net.training


def test_frozen_parameters_end_the_flow_of_gradients():
    net = Net()
    net.conv.requires_grad_(False)
    assert not any(node.differentiable for node in capture(net, mean_product, IMAGE, TARGET).nodes)


def no_grad(self, x):
    with torch.no_grad():
        return x.sigmoid() * self.conv.bias.sum()


def inference_mode(self, x):
    with torch.inference_mode():
        return x.sigmoid() * self.conv.bias.sum()


def no_grad_under_autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return x.sigmoid() * self.conv.bias.sum()


@torch.no_grad()
def decorated(self, x):
    return x.sigmoid() * self.conv.bias.sum()


def detached(self, x):
    return (x.sigmoid() * self.conv.bias.sum()).detach()


@pytest.mark.parametrize("region", [no_grad, inference_mode, no_grad_under_autocast, decorated, detached])
def test_where_autograd_stops_so_does_the_graph(region):
    """An exported program forgets these regions; the graph must not."""
    graph = capture(Net(region), mean_product, IMAGE, TARGET)
    assert not graph[graph.output].differentiable
    if region is inference_mode:
        return  # PyTorch itself refuses to mix such values with gradients
    partly = capture(Net(lambda self, x: x * region(self, x)), mean_product, IMAGE, TARGET)
    conv = next(node.id for node in partly.nodes if "conv2d" in node.op)
    product = next(node for node in partly.nodes if node.op == "aten.mul.Tensor" and node.operands[0] == conv)
    assert [partly[i].differentiable for i in product.operands] == [True, False]


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_the_callers_own_region_stops_nothing(around):
    net = Net()
    with around():
        graph = capture(net, mean_product, IMAGE, TARGET)
    assert graph[graph.output].differentiable


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_backward_of_ones_own_is_refused():
    with pytest.raises(CaptureError, match=r"autograd.Function 'StraightThrough'.*detach"):
        capture(Net(lambda self, x: StraightThrough.apply(x)), mean_product, IMAGE, TARGET)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_from_outside_are_inputs_of_the_graph(requires_grad):
    weight = torch.ones(3, 1, 1, requires_grad=requires_grad)
    graph = capture(Net(), lambda o, t: (o * t * weight).mean(), IMAGE, TARGET)
    assert graph.closed["closed.0"] is weight
    (node,) = (node for node in graph.nodes if node.arguments.get("name") == "closed.0")
    assert node.op == ("parameter" if requires_grad else "buffer")
    assert node.differentiable == requires_grad


def test_complex_numbers_pass_gradients_on():
    graph = capture(
        Net(lambda self, x: x * torch.complex(self.conv.bias, self.conv.bias).abs().sum()), mean_product, IMAGE, TARGET
    )
    assert next(node for node in graph.nodes if node.op == "aten.abs.default").differentiable


def test_every_node_knows_its_module_and_line():
    def turned(self, x):
        return x.flip(2)

    net = nn.Sequential(nn.Conv2d(2, 2, 1), Net(turned))
    graph = capture(net, lambda o, t: (o * t).flip(3).mean(), IMAGE, TARGET)
    line = inspect.getsourcelines(turned)[1] + 1
    first, second = (node for node in graph.nodes if node.op == "aten.flip.default")
    assert (first.origin.module_path, first.origin.source) == ("1", f"{__file__}:{line}")
    assert second.origin.module_path == ""


def test_running_statistics_are_updates_of_buffers():
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.InstanceNorm2d(3, track_running_stats=True))
    graph = capture(net.train(), mean_product, IMAGE, TARGET)
    assert {name.split(".", 1)[1] for name in graph.updates} == {
        f"{layer}.{name}" for layer in (1, 2) for name in ("running_mean", "running_var")
    } | {"1.num_batches_tracked"}
    assert not capture(net.eval(), mean_product, IMAGE, TARGET).updates


OWN = torch.Generator()
CAPTURE_ERRORS = {
    "a branch on pixels": (lambda self, x: x if x.sum() > 0 else -x, mean_product, "cannot capture"),
    "a plain error": (lambda self, x: x.no_such_thing, mean_product, "AttributeError"),
    "no scalar": (lambda self, x: x, lambda o, t: o * t, r"scalar, got a tensor of shape \(1, 3, 9, 8\)"),
    "per channel": (lambda self, x: x, lambda o, t: (o * t).mean((0, 2, 3)), r"scalar, got a tensor of shape \(3,\)"),
    "two values": (lambda self, x: x, lambda o, t: (o.mean(), t.mean()), "one tensor, got 2 values"),
    "sizes that differ": (lambda self, x: x[..., 1:], mean_product, "cannot capture"),
    "no tensor": (lambda self, x: x, lambda o, t: 3.0, "must return one tensor"),
    "a generator": (
        lambda self, x: x * torch.rand(1, generator=OWN),
        mean_product,
        r"of its own at .*test_capture\.py:\d",
    ),
    "no derivative": (lambda self, x: x + x // 0.3, mean_product, "no derivative for aten::floor_divide"),
    "a part of memory": (
        lambda self, x: x[..., 1:].as_strided((3,), (2,)),
        lambda o, t: o.sum(),
        "on a part of a tensor",
    ),
    "a selection": (lambda self, x: x[x > 0], lambda o, t: o.sum(), r"torch\.where\(mask"),
}


@pytest.mark.parametrize("name", CAPTURE_ERRORS)
def test_capture_errors_are_one_line(name):
    function, loss, text = CAPTURE_ERRORS[name]
    with pytest.raises(CaptureError, match=text) as caught:
        capture(Net(function), loss, IMAGE, TARGET)
    assert "\n" not in str(caught.value)


def test_a_plain_error_names_the_users_line():
    def broken(self, x):
        return x.no_such_thing

    line = inspect.getsourcelines(broken)[1] + 1
    with pytest.raises(CaptureError, match=re.escape(f"{__file__}:{line}")):
        capture(Net(broken), mean_product, IMAGE, TARGET)


def test_several_outputs_of_a_model_without_loss_are_whole():
    graph = capture(Net(lambda self, x: (x, {"mean": x.mean()})), None, IMAGE, None)
    assert [graph[i].shape for i in graph.outputs] == [(*IMAGE.shape[:1], 3, *IMAGE.shape[2:]), ()]
    assert not any(graph[i].is_field for i in graph.outputs)


def test_a_model_that_reads_no_pixels_is_refused_where_there_is_no_loss():
    with pytest.raises(CaptureError, match="depends on the pixels"):
        capture(Net(lambda self, x: torch.ones(3)), None, IMAGE, None)
    graph = capture(Net(lambda self, x: torch.ones(3)), lambda o, t: o.mean(), IMAGE, TARGET)
    assert graph.source("image") is not None


def test_a_model_that_returns_no_tensor_is_refused():
    with pytest.raises(CaptureError, match="must return tensors"):
        capture(Net(lambda self, x: (x, 3.0)), None, IMAGE, None)


def test_an_image_too_small_for_the_model_is_refused():
    with pytest.raises((CaptureError, UnsupportedOperatorError)):
        capture(Net(lambda self, x: F.max_pool2d(x, 20)), mean_product, IMAGE, TARGET)


def test_a_module_that_cannot_be_copied_is_refused():
    class Locked(Net):
        def __deepcopy__(self, memo):
            raise TypeError("cannot copy this")

    with pytest.raises(CaptureError, match="cannot copy this"):
        capture(Locked(), mean_product, IMAGE, TARGET)


def test_the_model_may_stay_where_it_is():
    """Everything is traced on the model's own device, so that it meets the loss's constants there."""
    weight = torch.ones(3, 1, 1, device="meta")
    graph = capture(Net().to("meta"), lambda o, t: (o * t * weight).mean(), IMAGE, TARGET)
    assert graph[graph.output].differentiable
    assert [value.device.type for value in graph.closed.values()] == ["meta"]


def test_what_a_first_forward_makes_is_made_in_every_run():
    """A model may fill a buffer when it sees a new size; what a first trace made is no constant of the second."""

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("grid", torch.zeros(1, 1))

        def forward(self, x):
            if self.grid.shape != x.shape[-2:]:  # type: ignore[has-type]
                self.grid = torch.arange(x.shape[-1], dtype=x.dtype).expand(x.shape[-2:])
            return x * self.grid * self.scale

    model = Lazy()
    graph = capture(model, lambda o, t: o.mean() * t.mean(), IMAGE, TARGET)
    assert any(node.op.startswith("aten.arange") for node in graph.nodes)
    assert not any(node.op == "buffer" for node in graph.nodes)
    assert model.grid.shape == (1, 1)


def test_a_plain_tensor_that_a_module_holds_is_read_as_it_is():
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.scale, self.seen = nn.Conv2d(3, 1, 1), torch.tensor([2.0]), torch.Tensor()

        def forward(self, x):
            self.seen = x.detach()
            return self.conv(x) * self.scale

    image = InputSpec((1, 3, 8, 8), torch.float32, field=True)
    graph = capture(Held(), None, image, None)
    assert [value.tolist() for value in graph.closed.values()] == [[2.0]]
