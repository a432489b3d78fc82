"""What PyTorch wraps around a model is taken off, or refused by the name of the part and what to write instead."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gigagrad as gg
from gigagrad.errors import ConfigError, ModelError
from gigagrad.models.registry import unwrapped


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 1, 1)).double()


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("alone")
def test_gradients_land_on_the_parameters_of_a_distributed_module(net):
    image, target = torch.rand(2, 12, 14).double(), torch.rand(1, 12, 14).double()
    wrapped = nn.parallel.DistributedDataParallel(net)
    engine = gg.compile(torch.compile(wrapped, backend="eager"), F.mse_loss, tile=(5, 6))  # type: ignore[arg-type]
    assert engine.model is net
    engine.backward(image, target)
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    F.mse_loss(net(image[None]), target[None]).backward()
    for gradient, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("alone")
def test_a_distributed_module_of_several_processes_is_refused(net, monkeypatch):
    wrapped = nn.parallel.DistributedDataParallel(net)
    monkeypatch.setattr(type(wrapped.process_group), "size", lambda self: 2)
    with pytest.raises(ModelError, match=r"write gg\.compile\(model\.module, \.\.\.\).*all_reduce"):
        gg.compile(wrapped, F.mse_loss)


@pytest.mark.usefixtures("alone")
def test_wrappers_of_parts_are_refused_by_their_names(net):
    net[0] = nn.parallel.DistributedDataParallel(net[0])
    with pytest.raises(ModelError, match=r"'model\.0' is in DistributedDataParallel.*in its place"):
        gg.compile(net)


@pytest.mark.usefixtures("alone")
def test_shards_are_refused(net):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))  # type: ignore[attr-defined]
    fully_shard(net[0], mesh=mesh)
    with pytest.raises(ModelError, match=r"'model\.0' is sharded .*without that"):
        gg.compile(net)


def test_losses_are_taken_out_as_well():
    loss = nn.MSELoss()
    assert unwrapped(nn.DataParallel(loss), "loss") is loss
    assert unwrapped(F.mse_loss, "loss") is F.mse_loss
    assert unwrapped(None, "loss") is None


def test_torchscript_exported_programs_and_quantised_layers_are_refused(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(net)
        frozen = torch.jit.freeze(torch.jit.script(net.eval()))
        program = torch.export.export(net, (torch.rand(1, 2, 8, 8).double(),))
        quantised = nn.Sequential(torch.ao.nn.quantized.Conv2d(2, 1, 3))
    for model, text in (
        (scripted, r"'model' is TorchScript.*load_state_dict\(scripted"),
        (frozen, "'model' is TorchScript"),
        (nn.Sequential(nn.ReLU(), scripted), r"'model\.1' is TorchScript"),
        (quantised, r"'model\.0' is a quantised layer \(Conv2d\)"),
    ):
        with pytest.raises(ModelError, match=text):
            gg.compile(model)
    with pytest.raises(ConfigError, match=r"gg\.compile\(program\.module\(\)"):
        gg.compile(program)  # type: ignore[arg-type]
