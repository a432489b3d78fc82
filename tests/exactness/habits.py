"""What people write in models and losses out of habit: transforms, TorchScript, numbers taken out of tensors, wrappers.

Each is a `Habit` in `HABITS` by name, in float64. Of each gigagrad gives what plain PyTorch gives, or it refuses in one
sentence that names a line of this file, or the part of the model that is at fault, and says what to write instead.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations

HEIGHT, WIDTH = 24, 30


@dataclass
class Habit:
    """`model` and `loss`, and the target that belongs to an image `(2, HEIGHT, WIDTH)`; made anew for each use.

    `others` are modules whose gradients count, too; `as_plain` is what the user of plain PyTorch would call the target.
    """

    model: Any
    loss: Any
    target: Tensor
    as_plain: Tensor | None = None
    others: tuple[nn.Module, ...] = ()


HABITS: dict[str, Callable[[], Habit]] = {}


def image() -> Tensor:
    return torch.randn(2, HEIGHT, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def numbers() -> Tensor:
    return torch.rand(1, HEIGHT, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def ids() -> Tensor:
    """Classes 0 to 2 of every pixel."""
    return (numbers() * 3).long()


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, dtype=torch.float64)


class Body(nn.Module):
    """`middle(self, y)` between two convolutions, with whatever parts it is given."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.a, self.b, self.middle = conv(2, 3), conv(3, 1), middle
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self, self.a(x)))


class Called(nn.Module):
    """A module whose forward calls a function."""

    def __init__(self, function: Callable[[Any], Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *given: Any) -> Any:
        return self.function(*given)


def _in_forward(**middles: Callable[[Any, Tensor], Tensor]) -> None:
    for name, middle in middles.items():
        HABITS[name.replace("_", " ")] = functools.partial(_forward, middle)


def _forward(middle: Callable[[Any, Tensor], Tensor]) -> Habit:
    torch.manual_seed(0)
    return Habit(Body(middle), F.mse_loss, numbers())


def _in_loss(outputs: int = 1, target: Callable[[], Tensor] = numbers, **losses: Callable[[Any, Any], Any]) -> None:
    for name, loss in losses.items():
        HABITS["loss: " + name.replace("_", " ")] = functools.partial(_loss, outputs, loss, target)


def _loss(outputs: int, loss: Any, target: Callable[[], Tensor]) -> Habit:
    torch.manual_seed(0)
    return Habit(conv(2, outputs), loss, target())


def _habit(make: Callable[[], Habit]) -> Callable[[], Habit]:
    def seeded() -> Habit:
        torch.manual_seed(0)
        return make()

    HABITS[make.__name__.strip("_").replace("_", " ")] = seeded
    return make


# Transforms of functions.


def _ensemble(m: Any, y: Tensor) -> Tensor:
    weights = torch.stack([m.b.weight, 2 * m.b.weight])
    return y + torch.vmap(lambda w: F.conv2d(y, w, padding=1))(weights).sum(0)


def _functional(m: Any, y: Tensor) -> Tensor:
    return y + torch.func.functional_call(m.b, {"weight": m.b.weight * 2, "bias": m.b.bias}, (y,))


def _dual(m: Any, y: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(y, torch.ones_like(y))
        return torch.autograd.forward_ad.unpack_dual(dual.tanh()).tangent


_in_forward(
    vmap_over_channels=lambda m, y: torch.vmap(lambda c: c * c.mean())(y[0])[None],
    vmap_over_the_batch=lambda m, y: torch.vmap(lambda c: c.tanh())(y),
    vmap_with_in_dims=lambda m, y: torch.vmap(lambda c, k: c * k, in_dims=(1, 0), out_dims=1)(y, m.a.bias),
    vmap_nested=lambda m, y: torch.vmap(torch.vmap(lambda r: r - r.mean()))(y),
    vmap_in_chunks=lambda m, y: torch.vmap(lambda c: c.sin(), in_dims=1, out_dims=1, chunk_size=2)(y),
    vmap_of_an_ensemble=_ensemble,
    func_grad=lambda m, y: y * torch.func.grad(lambda w: w.square().sum())(m.b.bias),
    func_grad_of_the_field=lambda m, y: torch.func.grad(lambda z: z.tanh().sum())(y),
    func_grad_and_value=lambda m, y: y * torch.func.grad_and_value(lambda w: w.pow(3).sum())(m.a.bias)[1],
    func_vjp=lambda m, y: torch.func.vjp(torch.tanh, y)[1](y)[0],
    func_jvp=lambda m, y: torch.func.jvp(torch.tanh, (y,), (y,))[1],
    func_jacrev=lambda m, y: y * torch.func.jacrev(lambda w: w.square())(m.a.bias).sum(),
    func_jacfwd=lambda m, y: y * torch.func.jacfwd(lambda w: w.square())(m.a.bias).sum(),
    func_hessian=lambda m, y: y * torch.func.hessian(lambda w: w.pow(3).sum())(m.a.bias).sum(),
    functional_call=_functional,
    forward_mode=_dual,
    autograd_functional_jacobian=lambda m, y: y * torch.autograd.functional.jacobian(torch.square, m.a.bias).sum(),
)

# What is asked of gradients.


def _retained(m: Any, y: Tensor) -> Tensor:
    y.retain_grad()
    return y * 2


def _hooked(m: Any, y: Tensor) -> Tensor:
    y.register_hook(lambda g: g * 2)
    return y


_in_forward(retain_grad=_retained, hook=_hooked)

# TorchScript inside an ordinary model.


def _python_swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _python_clamped(x: Tensor, low: float, high: float) -> Tensor:
    if low > high:
        return x
    return torch.clamp(x, low, high) + x.mean()


def _python_loss(o: Tensor, t: Tensor) -> Tensor:
    return ((o - t) ** 2).mean() + (o - t).abs().mean()


with warnings.catch_warnings():  # torch.jit is deprecated, and in use
    warnings.simplefilter("ignore", DeprecationWarning)
    _swish, _clamped, _scripted_loss = map(torch.jit.script, (_python_swish, _python_clamped, _python_loss))


_in_forward(
    script_function=lambda m, y: _swish(y),
    script_function_with_numbers=lambda m, y: _clamped(y, -0.5, 0.5),
    script_function_under_no_grad=lambda m, y: y + _without_gradient(_swish, y),
    script_function_of_a_parameter=lambda m, y: y * _swish(m.a.bias)[:, None, None],
    asks_whether_it_is_scripted=lambda m, y: y * (3.0 if torch.jit.is_scripting() else 1.0),
    asks_whether_it_is_traced=lambda m, y: y * (3.0 if torch.jit.is_tracing() else 1.0),
)


def _without_gradient(function: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    with torch.no_grad():
        return function(y)


_in_loss(scripted=_scripted_loss)


@_habit
def _script_submodule() -> Habit:
    return Habit(nn.Sequential(conv(2, 3), torch.jit.script(nn.ReLU()), conv(3, 1)), F.mse_loss, numbers())


@_habit
def _script_submodule_with_parameters() -> Habit:
    return Habit(nn.Sequential(conv(2, 3), torch.jit.script(conv(3, 1))), F.mse_loss, numbers())


@_habit
def _traced_submodule() -> Habit:
    traced = torch.jit.trace(conv(3, 1), torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    return Habit(nn.Sequential(conv(2, 3), traced), F.mse_loss, numbers())


@_habit
def _scripted_model() -> Habit:
    return Habit(torch.jit.script(nn.Sequential(conv(2, 3), nn.ReLU(), conv(3, 1))), F.mse_loss, numbers())


@_habit
def _traced_model() -> Habit:
    return Habit(torch.jit.trace(nn.Sequential(conv(2, 3), conv(3, 1)), image()[None]), F.mse_loss, numbers())


@_habit
def _frozen_model() -> Habit:
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(conv(2, 3), conv(3, 1)).eval()))
    return Habit(frozen, F.mse_loss, numbers())


@_habit
def _scripted_loss_module() -> Habit:
    return Habit(conv(2, 1), torch.jit.script(nn.MSELoss()), numbers())


@_habit
def _scripted_network_in_the_loss() -> Habit:
    features = torch.jit.script(conv(1, 2))
    loss = lambda o, t: F.mse_loss(features(o), features(t))  # noqa: E731
    return Habit(conv(2, 1), loss, numbers(), others=(features,))


@_habit
def _frozen_scripted_network_in_the_loss() -> Habit:
    features = torch.jit.freeze(torch.jit.script(conv(1, 2).eval()))
    return Habit(conv(2, 1), lambda o, t: F.mse_loss(features(o), features(t)), numbers())


# Exported, symbolically traced, quantised.


@_habit
def _fx_graph_module() -> Habit:
    net = nn.Sequential(conv(2, 3), nn.BatchNorm2d(3, dtype=torch.float64), nn.ReLU(), conv(3, 1))
    return Habit(torch.fx.symbolic_trace(net), F.mse_loss, numbers())


@_habit
def _fx_submodule() -> Habit:
    inner = torch.fx.symbolic_trace(nn.Sequential(conv(3, 3), nn.GELU()))
    return Habit(nn.Sequential(conv(2, 3), inner, conv(3, 1)), F.mse_loss, numbers())


@_habit
def _exported_model() -> Habit:
    program = torch.export.export(nn.Sequential(conv(2, 3), nn.ReLU(), conv(3, 1)), (image()[None],))
    return Habit(program.module(), F.mse_loss, numbers())


@_habit
def _exported_model_of_another_size() -> Habit:
    given = (torch.zeros(1, 2, 16, 16, dtype=torch.float64),)
    program = torch.export.export(nn.Sequential(conv(2, 3), nn.ReLU(), conv(3, 1)), given)
    return Habit(program.module(), F.mse_loss, numbers())


@_habit
def _exported_program() -> Habit:
    return Habit(torch.export.export(conv(2, 1), (image()[None],)), F.mse_loss, numbers())


@_habit
def _quantised_layer() -> Habit:
    layer = torch.ao.nn.quantized.Conv2d(3, 1, 3, padding=1)
    return Habit(nn.Sequential(conv(2, 3), layer), F.mse_loss, numbers())


@_habit
def _dynamically_quantised_layer() -> Habit:
    layer = torch.ao.nn.quantized.dynamic.Linear(30, 30)
    return Habit(nn.Sequential(conv(2, 1), layer), F.mse_loss, numbers())


# Numbers taken out of tensors, and branches on them.


def _while(m: Any, y: Tensor) -> Tensor:
    while y.abs().amax() > 1:
        y = y / 2
    return y


def _asserted(m: Any, y: Tensor) -> Tensor:
    assert not torch.isnan(y).any()
    return y


def _try_numpy(m: Any, y: Tensor) -> Tensor:
    return y * float(np.percentile(y.detach().numpy(), 90))


def _looped(m: Any, y: Tensor) -> Tensor:
    for _ in range(int(y.mean().abs() * 10)):
        y = y * 2
    return y


def _assigned_by_mask(m: Any, y: Tensor) -> Tensor:
    y = y.clone()
    y[y < 0] = y[y < 0] * 0.1
    return y


_in_forward(
    branch_on_a_mean=lambda m, y: y if y.mean() > 0 else -y,
    branch_on_any=lambda m, y: y * 2 if (y > 0).any() else y,
    branch_on_all=lambda m, y: y * 2 if torch.all(y > 0) else y,
    branch_on_allclose=lambda m, y: y * 2 if torch.allclose(y, y * 0) else y,
    branch_on_equal=lambda m, y: y * 2 if torch.equal(y, y * 0) else y,
    branch_on_a_parameter=lambda m, y: y * 2 if m.a.bias.sum() > 0 else y,
    branch_on_nan=_asserted,
    loop_while=_while,
    loop_a_computed_number_of_times=_looped,
    item=lambda m, y: y * y.mean().item(),
    item_of_a_parameter=lambda m, y: y * m.a.bias.mean().item(),
    to_float=lambda m, y: y * float(y.mean()),
    to_int=lambda m, y: y * int(y.amax()),
    to_list=lambda m, y: y * y.mean((0, 2, 3)).tolist()[0],
    to_numpy=_try_numpy,
    to_cpu_and_numpy=lambda m, y: y + torch.from_numpy(y.detach().cpu().numpy()),
    numpy_function=lambda m, y: y + torch.as_tensor(np.tanh(y.detach())),
    numpy_asarray=lambda m, y: y + torch.tensor(np.asarray(y.detach())),
    from_numpy=lambda m, y: y * torch.from_numpy(np.arange(WIDTH) / WIDTH),
    from_numpy_in_two_axes=lambda m, y: y + torch.from_numpy(np.hanning(HEIGHT)[:, None] * np.hanning(WIDTH)),
    tensor_of_numpy=lambda m, y: y * torch.tensor(np.linspace(0, 1, WIDTH)),
    as_tensor_of_numpy=lambda m, y: y * torch.as_tensor(np.linspace(0, 1, WIDTH)),
    tensor_of_a_list=lambda m, y: y * torch.tensor([0.5, 1.0, 2.0], dtype=y.dtype)[:, None, None],
    tensor_of_a_computed_number=lambda m, y: y * torch.tensor(y.mean()),
    new_tensor=lambda m, y: y * y.new_tensor([0.5, 1.0, 2.0])[:, None, None],
    chosen_by_mask=lambda m, y: y - y[y > 0].mean(),
    masked_select=lambda m, y: y - torch.masked_select(y, y > 0).mean(),
    assigned_by_mask=_assigned_by_mask,
    nonzero=lambda m, y: y + y.nonzero().double().mean(),
    argwhere=lambda m, y: y + torch.argwhere(y > 0).double().mean(),
    where_with_one_argument=lambda m, y: y * len(torch.where(y > 0)[0]),
    unique=lambda m, y: y + y.round().unique().mean(),
    bincount=lambda m, y: y + torch.bincount((y * 3).abs().long().flatten()).double().mean(),
    histogram=lambda m, y: y + torch.histc(y.detach(), 8, -1, 1).mean(),
    repeat_interleave_by_numbers=lambda m, y: torch.repeat_interleave(y, (m.a.bias > -9).long(), 1),
    string_of_a_value=lambda m, y: y * len(str(float(y.mean()))),
    formatted=lambda m, y: y * len(f"{y.mean():.3f}"),
)
_in_loss(
    branch_on_the_target=lambda o, t: F.mse_loss(o, t) if t.sum() > 0 else o.square().mean(),
    returns_early=lambda o, t: o.sum() * 0 if not (t > 0.99).any() else F.mse_loss(o, t),
    only_where_labelled=lambda o, t: F.mse_loss(o[t > 0.5], t[t > 0.5]),
    gaussian_nll=lambda o, t: F.gaussian_nll_loss(o, t, o.exp()),
    gaussian_nll_of_a_number=lambda o, t: F.gaussian_nll_loss(o, t, 0.5),
    poisson_nll=lambda o, t: F.poisson_nll_loss(o, t),
    one_hot_of_any_number=lambda o, t: F.mse_loss(o, F.one_hot((t[:, 0] * 3).long()).permute(0, 3, 1, 2).double()),
    numpy_of_the_target=lambda o, t: F.mse_loss(o, torch.from_numpy(np.sqrt(t.numpy()))),
    python_number=lambda o, t: float(F.mse_loss(o, t)),
    a_tuple=lambda o, t: (F.mse_loss(o, t), o.mean()),
    nothing=lambda o, t: None,
    not_reduced=lambda o, t: (o - t) ** 2,
)
_in_loss(gaussian_nll_module=nn.GaussianNLLLoss(), kl_div=nn.KLDivLoss(reduction="sum"))
_in_loss(
    5,
    ctc=lambda o, t: F.ctc_loss(
        o.mean(2).permute(2, 0, 1).log_softmax(2), torch.tensor([[1, 2, 3]]), torch.tensor([WIDTH]), torch.tensor([3])
    ),
    max_pool_of_ids=lambda o, t: F.cross_entropy(o, F.max_pool2d((t * 5).long(), 3, 1, 1)[:, 0]),
    max_pool_of_ids_by_stride=lambda o, t: F.cross_entropy(o[..., ::2, ::2], F.max_pool2d((t * 5).long(), 2)[:, 0]),
    adaptive_max_pool_of_ids=lambda o, t: F.cross_entropy(
        F.adaptive_avg_pool2d(o, 6), F.adaptive_max_pool2d((t * 5).long(), 6)[:, 0]
    ),
    average_pool_of_ids=lambda o, t: F.cross_entropy(o[..., ::2, ::2], F.avg_pool2d((t * 5).long(), 2)[:, 0]),
    max_pool_of_bytes=lambda o, t: F.cross_entropy(o, F.max_pool2d((t * 5).byte(), 3, 1, 1)[:, 0].long()),
    normal_distribution=lambda o, t: (
        -torch.distributions.Normal(o[:, :1], o[:, 1:2].exp(), validate_args=True).log_prob(t).mean()
    ),
    normal_distribution_unchecked=lambda o, t: (
        -torch.distributions.Normal(o[:, :1], o[:, 1:2].exp(), validate_args=False).log_prob(t).mean()
    ),
    categorical_distribution=lambda o, t: (
        -torch.distributions.Categorical(logits=o.permute(0, 2, 3, 1), validate_args=True)
        .log_prob((t * 5).long()[:, 0])
        .mean()
    ),
)

# Control flow of PyTorch's own, spectra, random numbers.


def _spectrum_in_place(m: Any, y: Tensor) -> Tensor:
    s = torch.fft.rfft2(y)
    s[:, :, :5] = 0
    return torch.fft.irfft2(s, s=y.shape[-2:])


def _spectrum_scaled_in_place(m: Any, y: Tensor) -> Tensor:
    s = torch.fft.fft2(y)
    s *= 0.5
    s[..., 0, 0] += 1
    return torch.fft.ifft2(s).real


def _forked(m: Any, y: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return y + torch.rand_like(y)


def _seeded(m: Any, y: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(y, 0.5)


def _state_set(m: Any, y: Tensor) -> Tensor:
    torch.set_rng_state(torch.get_rng_state())
    return F.dropout(y, 0.5)


_in_forward(
    cond=lambda m, y: torch.cond(y.mean() > 0, torch.sin, torch.cos, (y,)),
    cond_on_a_shape=lambda m, y: torch.cond(y.shape[-1] > 8, torch.sin, torch.cos, (y,)),
    while_loop=lambda m, y: torch._higher_order_ops.while_loop(lambda z: z.sum() > 9e9, lambda z: (z / 2,), (y,))[0],
    spectrum=lambda m, y: torch.fft.irfft2(torch.fft.rfft2(y) * 0.5, s=y.shape[-2:]),
    spectrum_in_place=_spectrum_in_place,
    spectrum_scaled_in_place=_spectrum_scaled_in_place,
    seed=_seeded,
    seed_in_a_fork=_forked,
    seed_of_the_generator=lambda m, y: (torch.default_generator.manual_seed(3), F.dropout(y, 0.5))[1],
    state_of_the_generator=_state_set,
    seed_that_is_none=lambda m, y: (torch.seed(), F.dropout(y, 0.5))[1],
)

# What a model holds and changes.


def _new_parameter(m: Any, y: Tensor) -> Tensor:
    m.k = nn.Parameter(m.k.detach() * 0.5)
    return y * m.k


def _kept_features(m: Any, y: Tensor) -> Tensor:
    last, m.last = getattr(m, "last", None), y.detach()
    return y if last is None else y + 0.1 * last


def _appended(m: Any, y: Tensor) -> Tensor:
    m.seen.append(y.mean())
    return y * len(m.seen)


def _mean_of_all(m: Any, y: Tensor) -> Tensor:
    m.seen.append(y.mean().detach())
    return y - torch.stack(m.seen).mean()


def _holding(name: str, middle: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]) -> None:
    HABITS[name] = lambda: _with_parts(middle, parts)


def _with_parts(middle: Callable[[Any, Tensor], Tensor], parts: dict[str, Callable[[], Any]]) -> Habit:
    torch.manual_seed(0)
    return Habit(Body(middle, **{name: make() for name, make in parts.items()}), F.mse_loss, numbers())


def _locked(m: Any, y: Tensor) -> Tensor:
    with m.lock:
        return y * 2


_holding("a Python module as an attribute", lambda m, y: y * m.np.pi, np=lambda: np)
_holding("a module of PyTorch as an attribute", lambda m, y: m.F.relu(y), F=lambda: F)
_holding("Python modules in a list", lambda m, y: y * m.tools[0].pi, tools=lambda: [math, np])
_holding("a lock as an attribute", _locked, lock=threading.Lock)
_holding("a generator as an attribute", lambda m, y: y * next(m.numbers), numbers=lambda: (n for n in (1, 2, 3)))
_holding("a new parameter in forward", _new_parameter, k=lambda: nn.Parameter(torch.ones((), dtype=torch.float64)))
_holding("features of the last call", _kept_features)
_holding("outputs in a list", _appended, seen=list)
_holding("a mean of all calls", _mean_of_all, seen=list)
_holding(
    "a tensor that asks for a gradient", lambda m, y: y * m.k[0], k=lambda: [torch.ones(1).double().requires_grad_()]
)


@_habit
def _spectral_norm_of_a_critic() -> Habit:
    critic = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(1, 4, 4, 2, 1)), nn.Conv2d(4, 1, 3)).double()
    return Habit(conv(2, 1), lambda o, t: F.mse_loss(o, t) - critic(o).mean(), numbers(), others=(critic,))


class _Critic(nn.Module):
    """A loss that holds its critic."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(o, t) - self.critic(o).mean()


@_habit
def _spectral_norm_in_a_loss_module() -> Habit:
    critic = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(1, 4, 4, 2, 1)), nn.Conv2d(4, 1, 3)).double()
    return Habit(conv(2, 1), _Critic(critic), numbers(), others=(critic,))


@_habit
def _weight_norm_of_a_critic() -> Habit:
    critic = parametrizations.weight_norm(nn.Conv2d(1, 4, 4, 2, 1)).double()
    return Habit(conv(2, 1), lambda o, t: F.mse_loss(o, t) - critic(o).mean(), numbers(), others=(critic,))


@_habit
def _batch_norm_of_a_critic() -> Habit:
    critic = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3)).double()
    return Habit(conv(2, 1), lambda o, t: F.mse_loss(o, t) - critic(o).mean(), numbers(), others=(critic,))


@_habit
def _frozen_critic_in_evaluation() -> Habit:
    critic = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3)).double().eval()
    critic.requires_grad_(False)
    return Habit(conv(2, 1), lambda o, t: F.mse_loss(critic(o), critic(t)), numbers())


# Wrappers.


def _net() -> nn.Sequential:
    return nn.Sequential(conv(2, 3), nn.BatchNorm2d(3, dtype=torch.float64), nn.ReLU(), conv(3, 1))


@_habit
def _data_parallel() -> Habit:
    return Habit(nn.DataParallel(_net()), F.mse_loss, numbers())


@_habit
def _data_parallel_inside() -> Habit:
    return Habit(nn.Sequential(nn.DataParallel(conv(2, 3)), conv(3, 1)), F.mse_loss, numbers())


@_habit
def _compiled_model() -> Habit:
    return Habit(torch.compile(_net(), backend="eager"), F.mse_loss, numbers())


@_habit
def _compiled_in_place() -> Habit:
    net = _net()
    net.compile(backend="eager")
    return Habit(net, F.mse_loss, numbers())


@_habit
def _compiled_submodule() -> Habit:
    return Habit(nn.Sequential(torch.compile(_net(), backend="eager"), conv(1, 1)), F.mse_loss, numbers())


@_habit
def _compiled_in_data_parallel() -> Habit:
    return Habit(torch.compile(nn.DataParallel(_net()), backend="eager"), F.mse_loss, numbers())


@_habit
def _compiled_loss() -> Habit:
    return Habit(_net(), torch.compile(F.mse_loss, backend="eager"), numbers())


@_habit
def _compiled_function_in_forward() -> Habit:
    return Habit(Body(lambda m, y: _compiled_tanh(y)), F.mse_loss, numbers())


@functools.lru_cache
def _tanh() -> Any:
    return torch.compile(lambda y: y.tanh() * 2, backend="eager")


def _compiled_tanh(y: Tensor) -> Tensor:
    return _tanh()(y)


@_habit
def _disabled_function_in_forward() -> Habit:
    return Habit(Body(lambda m, y: torch.compiler.disable(torch.tanh)(y)), F.mse_loss, numbers())


# Losses that are objects.


class _Weighed(nn.Module):
    """A loss with parameters (uncertainty weighting)."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        return (-self.s[0]).exp() * F.mse_loss(o, t) + (-self.s[1]).exp() * F.l1_loss(o, t) + self.s.sum()


class _Method:
    factor = 2.0

    def loss(self, o: Tensor, t: Tensor) -> Tensor:
        return self.factor * F.mse_loss(o, t)

    def __call__(self, o: Tensor, t: Tensor) -> Tensor:
        return self.loss(o, t)

    @staticmethod
    def fixed(o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(o, t)


@_habit
def _loss_module_with_parameters() -> Habit:
    loss = _Weighed()
    return Habit(_net(), loss, numbers(), others=(loss,))


@_habit
def _partial_of_a_loss_module() -> Habit:
    loss = _Weighed()
    return Habit(_net(), functools.partial(lambda module, o, t: module(o, t), loss), numbers(), others=(loss,))


_in_loss(
    partial=functools.partial(F.huber_loss, delta=0.3),
    partial_of_a_partial=functools.partial(functools.partial(F.smooth_l1_loss, beta=0.5), reduction="sum"),
    method=_Method().loss,
    callable_object=_Method(),
    static_method=_Method.fixed,
    wants_a_third_argument=lambda o, t, weight: F.mse_loss(o, t),
    torch_module=nn.SmoothL1Loss(),
    torch_function=F.l1_loss,
)

# Class ids.

_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "(1, H, W)": lambda t: t,
    "(H, W)": lambda t: t[0],
    "(1, 1, H, W)": lambda t: t[None],
}
_DTYPES = (torch.int64, torch.uint8, torch.int32, torch.int16)
_OF_IDS: dict[str, Callable[[], Any]] = {
    "CrossEntropyLoss": nn.CrossEntropyLoss,
    "CrossEntropyLoss(ignore_index=2)": lambda: nn.CrossEntropyLoss(ignore_index=2),
    "CrossEntropyLoss(weight)": lambda: nn.CrossEntropyLoss(torch.tensor([0.2, 0.3, 0.5]).double()),
    "CrossEntropyLoss(label_smoothing)": lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
    "NLLLoss": nn.NLLLoss,
    "F.cross_entropy": lambda: F.cross_entropy,
    "F.nll_loss": lambda: functools.partial(F.nll_loss, reduction="sum"),
    "own, with ignore_index": lambda: lambda o, t: F.cross_entropy(o, t, ignore_index=1) + o.square().mean(),
}


def _ids(loss: Callable[[], Any], shape: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Habit:
    torch.manual_seed(0)
    return Habit(conv(2, 3), loss(), shape(ids()).to(dtype), as_plain=ids())


for _name, _make in _OF_IDS.items():
    for _shape, _reshape in _SHAPES.items():
        HABITS[f"{_name} of {_shape}"] = functools.partial(_ids, _make, _reshape, torch.int64)
for _dtype in _DTYPES[1:]:
    HABITS[f"CrossEntropyLoss of {_dtype}"] = functools.partial(_ids, nn.CrossEntropyLoss, _SHAPES["(1, H, W)"], _dtype)


@_habit
def _cross_entropy_of_probabilities() -> Habit:
    return Habit(conv(2, 3), nn.CrossEntropyLoss(), numbers().expand(3, -1, -1).softmax(0).contiguous())


@_habit
def _cross_entropy_of_floats() -> Habit:
    return Habit(conv(2, 3), nn.CrossEntropyLoss(), ids().double(), as_plain=ids())


@_habit
def _binary_cross_entropy_of_ids() -> Habit:
    return Habit(conv(2, 1), nn.BCEWithLogitsLoss(), ids().clamp(max=1), as_plain=ids().clamp(max=1)[None])


@_habit
def _cross_entropy_of_a_scanner() -> Habit:
    pooled = nn.Sequential(conv(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3, dtype=torch.float64))
    return Habit(pooled, nn.CrossEntropyLoss(), torch.tensor([2]))


@_habit
def _own_loss_that_leaves_pixels_out() -> Habit:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        kept = (t[:, 0] != 2).double()
        return (F.cross_entropy(o, t[:, 0].clamp(max=1), reduction="none") * kept).sum() / kept.sum().clamp(min=1)

    return Habit(conv(2, 3), loss, ids())


# More of the same kinds: values asked for in passing, other memory, other kinds of tensors.


def _guarded_item(m: Any, y: Tensor) -> Tensor:
    try:
        return y * y.mean().item()
    except Exception:
        return y


def _guarded_branch(m: Any, y: Tensor) -> Tensor:
    try:
        return y * 2 if y.mean() > -9 else y
    except RuntimeError:
        return y


def _guarded_numpy(m: Any, y: Tensor) -> Tensor:
    try:
        return y * float(y.detach().numpy().max())
    except Exception:
        return y


def _printed(m: Any, y: Tensor) -> Tensor:
    print(y.shape, y.mean(), end="")  # noqa: T201
    return y * 2


def _sparse(m: Any, y: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(HEIGHT, dtype=y.dtype).to_sparse(), y[0, 0])[None, None] + y


def _nested(m: Any, y: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(torch.nested.nested_tensor([y[0, 0], y[0, 1]]), 0.0).sum() + y


_in_forward(
    guarded_item=_guarded_item,
    guarded_branch=_guarded_branch,
    guarded_numpy=_guarded_numpy,
    printed=_printed,
    largest_of_tensors=lambda m, y: y * max(y.mean(), y.amax()),
    largest_of_a_tensor_and_a_number=lambda m, y: y * max(y.mean(), 0.5),
    sorted_tensors=lambda m, y: y * sorted([y.mean(), y.amax()])[0],
    sum_of_tensors=lambda m, y: y + sum([y.mean(), y.amax()]),
    square_root_by_math=lambda m, y: y * math.sqrt(y.square().mean()),
    in_a_list=lambda m, y: y * (2 if y.mean() in [1.0, 2.0] else 1),
    range_of_a_tensor=lambda m, y: y * len(range(y.argmax() // 9999)),
    index_by_a_tensor=lambda m, y: y * [1.0, 2.0][(y.mean() > -9).long()],
    is_nonzero=lambda m, y: y * 2 if torch.is_nonzero(y.mean()) else y,
    asserted_by_torch=lambda m, y: (torch._assert(y.shape[1] == 3, "channels"), y * 2)[1],
    asserted_value_by_torch=lambda m, y: (torch._assert((y.mean() > -9).item(), "mean"), y * 2)[1],
    asserted_later=lambda m, y: (torch._assert_async(y.mean() > -9), y * 2)[1],
    assert_close=lambda m, y: (torch.testing.assert_close(y, y), y * 2)[1],
    split_by_a_tensor=lambda m, y: torch.tensor_split(y, torch.tensor([1, 2]), 1)[0] + y,
    nonzero_static=lambda m, y: y + torch.nonzero_static((y > 0).flatten(), size=4).double().mean(),
    unique_consecutive=lambda m, y: y + torch.unique_consecutive(y.detach().round()).mean(),
    sparse_product=_sparse,
    to_sparse=lambda m, y: y + y.detach().to_sparse().to_dense(),
    nested_tensors=_nested,
    from_buffer=lambda m, y: y * torch.frombuffer(bytearray(np.ones(WIDTH).tobytes()), dtype=torch.float64),
    from_dlpack=lambda m, y: y * torch.from_dlpack(np.ones(WIDTH)),
    asarray=lambda m, y: y * torch.asarray(np.ones(WIDTH)),
    numpy_number=lambda m, y: y * np.float64(0.5) + np.sqrt(2),
    numpy_array_times_tensor=lambda m, y: y * torch.ones(()).double() * np.ones(()),
    buffer_pointer=lambda m, y: y * (2 if y.data_ptr() else 1),
    to_a_device_by_value=lambda m, y: y.to("cpu").cpu() * 2,
    scripted_late=lambda m, y: torch.jit.script(_python_swish)(y),
    traced_late=lambda m, y: torch.jit.trace(torch.tanh, torch.zeros(2, 2))(y),
    compiled_late=lambda m, y: torch.compile(torch.tanh, backend="eager")(y),
    linear_algebra=lambda m, y: y + torch.linalg.eigvalsh(y[0, 0, :9, :9] @ y[0, 0, :9, :9].T).sum(),
    multinomial=lambda m, y: y + 0 * torch.multinomial(y.softmax(-1)[0, 0], 1).double().mean(),
    quantile=lambda m, y: y - torch.quantile(y, 0.3),
    searched=lambda m, y: y + torch.searchsorted(torch.linspace(-1, 1, 9).double(), y.detach()).double(),
    fake_quantised=lambda m, y: torch.fake_quantize_per_tensor_affine(y.float(), 0.1, 0, -128, 127).double(),
    stft=lambda m, y: y + torch.stft(y.flatten(), 16, window=torch.ones(16).double(), return_complex=True).abs().mean(),
    saved_to_a_file=lambda m, y: (torch.save(y.detach().mean(), io.BytesIO()), y)[1],
    pickled=lambda m, y: y * len(pickle.dumps(y.mean().detach())),
    deep_copied=lambda m, y: y + copy.deepcopy(y.detach()),
    deep_copied_module=lambda m, y: y + copy.deepcopy(m.a)(torch.ones(1, 2, *y.shape[-2:]).double()) * 0.1,
    state_dict_read=lambda m, y: y * m.state_dict()["a.bias"].sum(),
    state_dict_loaded=lambda m, y: (m.b.load_state_dict(m.b.state_dict()), y)[1],
    trained_in_forward=lambda m, y: (m.train(), y)[1],
    grad_read=lambda m, y: y * (2 if m.a.weight.grad is None else 1),
    zero_grad_inside=lambda m, y: (m.zero_grad(), y)[1],
)


@_habit
def _old_spectral_norm() -> Habit:
    return Habit(nn.Sequential(nn.utils.spectral_norm(conv(2, 3)), conv(3, 1)), F.mse_loss, numbers())


@_habit
def _old_weight_norm() -> Habit:
    return Habit(nn.Sequential(parametrizations.weight_norm(conv(2, 3)), conv(3, 1)), F.mse_loss, numbers())


@_habit
def _lazy_layer() -> Habit:
    return Habit(nn.Sequential(nn.LazyConv2d(3, 3, padding=1, dtype=torch.float64), conv(3, 1)), F.mse_loss, numbers())


@_habit
def _transformer_layer() -> Habit:
    layer = nn.TransformerEncoderLayer(3, 3, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
    return Habit(Body(lambda m, y: m.t(y.flatten(2).mT).mT.reshape(y.shape), t=layer), F.mse_loss, numbers())


@_habit
def _swa_model() -> Habit:
    return Habit(torch.optim.swa_utils.AveragedModel(_net()), F.mse_loss, numbers())


@_habit
def _pruned_layer() -> Habit:
    net = _net()
    torch.nn.utils.prune.random_unstructured(net[0], "weight", 0.5)
    return Habit(net, F.mse_loss, numbers())


@_habit
def _checkpointed_sequential() -> Habit:
    net = nn.Sequential(conv(2, 3), nn.Tanh(), conv(3, 1))
    call = lambda x: torch.utils.checkpoint.checkpoint_sequential(net, 2, x, use_reentrant=False)  # noqa: E731
    return Habit(Called(call, net), F.mse_loss, numbers())
