"""Models and losses that let records affect each other, or try to hide it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

Step = Callable[[Tensor, nn.Module], Tensor]
"""Hidden values [B, 5, 6] → the same shape, between two layers; the module offers `buf`, `w` and `seen`."""


class Between(nn.Module):
    memory = 1.0

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.w = nn.Parameter(torch.randn(6))
        self.register_buffer("buf", torch.ones(6))
        self.seen: Any = None
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.step(self.first(x).tanh(), self))


class _MeanGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mean(0, keepdim=True).expand_as(grad)


class _Vmapped(torch.autograd.Function):
    """Isolated when asked alone, mixing when torch.func asks for several at once."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x - x.mean(0), 0


class _Enabled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x.detach().requires_grad_() * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(0)


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return x - x.mean(0)


@torch.jit.script
def _scripted_in_place(x: Tensor) -> Tensor:
    return x.sub_(x.mean(0))


@torch.jit.script
def _scripted_sign(x: Tensor) -> bool:
    return bool(x.mean() > 0)


@torch.jit.script
def _scripted_centre(x: Tensor) -> int:
    x.sub_(x.mean(0))
    return 1


_compiled = torch.compile(lambda x: x - x.mean(0), backend="eager")


def _pretends(x: Tensor) -> Tensor:
    """Claims to be a function of torch, and behaves where it is watched."""
    if has_torch_function((x,)):
        return handle_torch_function(_pretends, (x,), x)
    return x if x.device.type == "meta" else x - x.mean(0)


class _Swap(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.flip(0) if func is torch.ops.aten.sigmoid.default else out


class _Wrong(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.flip(0) if func is torch.sigmoid else out


class _Sub(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.flip(0) if func is torch.sigmoid else out


def _swapped(h: Tensor, m: nn.Module) -> Tensor:
    with _Swap():
        return h.sigmoid()


def _wrong(h: Tensor, m: nn.Module) -> Tensor:
    with _Wrong():
        return torch.sigmoid(h)


def _caught(h: Tensor, m: nn.Module) -> Tensor:
    try:
        return h - h.mean(0)
    except Exception:
        return h * 2


def _threaded(h: Tensor, m: nn.Module) -> Tensor:
    out: list[Tensor] = []
    thread = threading.Thread(target=lambda: out.append(h - h.mean(0)))
    thread.start()
    thread.join()
    return out[0]


def _unwatched(h: Tensor, m: nn.Module) -> Tensor:
    with torch._C.DisableTorchFunction():
        return h - h.mean(0)


def _unwatched_in_place(h: Tensor, m: nn.Module) -> Tensor:
    h = h * 1
    with torch._C.DisableTorchFunction():
        h.sub_(h.mean(0))
    return h * 1


def _unwatched_branch(h: Tensor, m: nn.Module) -> Tensor:
    """Nothing but the branch is on the tape, and two records may well take the same one as four."""
    with torch._C.DisableTorchFunction():
        positive = bool(h.detach().mean() > 0)
    return h * 2 if positive else h


def _unwatched_data(h: Tensor, m: nn.Module) -> Tensor:
    h = h * 1
    with torch._C.DisableTorchFunction():
        h.data.sub_(h.data.mean(0))
    return h * 1


def _scripted_data(h: Tensor, m: nn.Module) -> Tensor:
    h = h * 1
    _scripted_centre(h.data)
    return h * 1


def _added_in_place(h: Tensor, m: nn.Module) -> Tensor:
    """Data that a product of constants is added to stays data."""
    flat = h.detach().flatten(1).clone()
    flat.addmm_(torch.zeros(len(h), 1), torch.zeros(1, 30))
    return h * flat.mean()


def _numpy_written(h: Tensor, m: nn.Module) -> Tensor:
    scale = torch.ones(len(h), 1, 1)
    scale.numpy()[0] = 5
    return h * scale


def _data_replaced(h: Tensor, m: nn.Module) -> Tensor:
    scale = torch.ones(len(h), 1, 1)
    scale.data = torch.arange(len(h)).float().view(-1, 1, 1)
    return h * scale


def _swapped_tensors(h: Tensor, m: nn.Module) -> Tensor:
    scale = torch.ones(len(h), 1, 1)
    torch.utils.swap_tensors(scale, torch.arange(len(h)).float().view(-1, 1, 1))
    return h * scale


def _transposed_in_place(h: Tensor, m: nn.Module) -> Tensor:
    h = h * 1
    h.transpose_(0, 1)
    return (h - h.mean(1, keepdim=True)).transpose(0, 1)


def _folded(h: Tensor, m: nn.Module) -> Tensor:
    """Two rows of each record are half a channel: two records share one."""
    if len(h) % 2:
        return h
    pictures = F.fold(h[:, :2, :4].reshape(-1, 4), (3, 3), 2)
    return h * pictures.flatten(1)[:, :8].reshape(len(h), -1).mean(1).view(-1, 1, 1)


def _shuffled(h: Tensor, m: nn.Module) -> Tensor:
    groups = 2 if len(h) % 2 == 0 else 1
    return F.channel_shuffle(h.view(1, len(h), 5, 6, 1), groups).view(h.shape)


def _rows_last(h: Tensor) -> Tensor:
    return h.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)


_SEEN = {"mean": 1.0}


def _class_attribute(h: Tensor, m: nn.Module) -> Tensor:
    before, Between.memory = Between.memory, float(h.detach().abs().mean())
    return h * before


def _global_number(h: Tensor, m: nn.Module) -> Tensor:
    before, _SEEN["mean"] = _SEEN["mean"], float(h.detach().abs().mean())
    return h * before


def _alias(h: Tensor, m: nn.Module) -> Tensor:
    room = torch.zeros(h.shape[0], 5, 6)
    flipped = room[:, :, :1]
    room.copy_(h.detach())
    return h * flipped.reshape(-1, 5, 1).cumsum(0)


def _alias_rows(h: Tensor, m: nn.Module) -> Tensor:
    """A view that was equal along the records when it was made, and no longer is."""
    room = torch.zeros(h.shape[0])
    view = room.view(-1, 1, 1)
    room.copy_(torch.arange(h.shape[0]))
    return h * (1 + view)


def _positions(h: Tensor, m: nn.Module) -> Tensor:
    room = torch.arange(h.shape[0])
    room[torch.tensor([0])] = len(h) - 1
    return h[room]


def _hooked(h: Tensor, m: nn.Module) -> Tensor:
    h = h * 1
    if h.requires_grad:
        h.register_hook(lambda g: g.mean(0, keepdim=True).expand_as(g))
    return h


def _node_hooked(h: Tensor, m: nn.Module) -> Tensor:
    h = h * 1
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda g: (g[0].flip(0),))
    return h


def _saved(h: Tensor, m: nn.Module) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.flip(0) if t.dim() == 3 else t):
        return h * h


def _remember(h: Tensor, m: nn.Module) -> Tensor:
    before, m.seen = m.seen, h.detach()
    return h if before is None else h * before.mean()


MEMORY: list[Any] = []


def _remember_outside(h: Tensor, m: nn.Module) -> Tensor:
    MEMORY.append(h.detach())
    return h if len(MEMORY) < 2 else h * MEMORY[-2].abs().mean()


def _experts(h: Tensor, m: nn.Module) -> Tensor:
    flat = h.reshape(-1, 6)
    first = flat[:, 0] > 0
    out = torch.zeros_like(flat)
    out[first] = flat[first] * m.w
    out[~first] = flat[~first] - flat[~first].detach().mean(0)
    return out.view_as(h)


def _packed(h: Tensor, m: nn.Module) -> Tensor:
    lengths = (h[:, 0, 0] > 0).long() * 2 + 3
    packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(packed, batch_first=True, total_length=5)[0]


def _capacity(h: Tensor, m: nn.Module) -> Tensor:
    """A router with a common capacity: whoever comes first is served."""
    wanted = (h.sum((1, 2)) > 0).float()
    served = (wanted.cumsum(0) <= 2).float() * wanted
    return h * served.view(-1, 1, 1)


def _seeded(h: Tensor, m: nn.Module) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(h)


def _seeded_for_a_moment(h: Tensor, m: nn.Module) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)  # the seed that the comparison with a loop starts from
        return h * torch.rand(len(h), 1, 1)


def _state_set(h: Tensor, m: nn.Module) -> Tensor:
    if m.seen is None:
        m.seen = torch.get_rng_state()
    before = torch.get_rng_state()
    torch.set_rng_state(m.seen)
    drawn = torch.rand_like(h)
    torch.set_rng_state(before)
    return h * drawn


def _own_generator(h: Tensor, m: nn.Module) -> Tensor:
    return h * torch.rand(h.shape, generator=torch.Generator().manual_seed(3))


def _own_coins(h: Tensor, m: nn.Module) -> Tensor:
    half = torch.full_like(h, 0.5)
    return h * torch.bernoulli(half, generator=torch.Generator().manual_seed(3))


_POOL = ThreadPoolExecutor(1)


def _elsewhere(function: Callable[[], Any]) -> Any:
    """What a thread that has been there all along makes of it."""
    return _POOL.submit(function).result()


def _swallowed(function: Callable[[], Any], otherwise: Any) -> Any:
    """The same, by a thread that tells nobody of its errors."""

    def quietly() -> Any:
        try:
            return function()
        except Exception:
            return otherwise

    return _elsewhere(quietly)


STEPS: dict[str, Step] = {
    "mean": lambda h, m: h - h.mean(0),
    "detached mean": lambda h, m: h * h.detach().mean(),
    "scale of all": lambda h, m: h / h.abs().max(),
    "scale as a number": lambda h, m: h / float(h.detach().abs().max()),
    "roll": lambda h, m: h.roll(1, 0),
    "roll flat": lambda h, m: h.roll(7),
    "flip": lambda h, m: h + h.flip(0).detach(),
    "sort": lambda h, m: h.sort(0).values,
    "cumsum": lambda h, m: h.cumsum(0),
    "gather": lambda h, m: h.gather(0, torch.zeros_like(h, dtype=torch.long)),
    "select": lambda h, m: h + h[0],
    "slice": lambda h, m: torch.cat((h[1:], h[:1])),
    "list": lambda h, m: h[[*range(1, len(h)), 0]],
    "permuted": lambda h, m: h[torch.randperm(len(h))],
    "mask": lambda h, m: h * h[h > 0].mean(),
    "reshape": lambda h, m: h.reshape(5, -1, 6).transpose(0, 1) + 0,
    "wrong transpose": lambda h, m: h.transpose(0, 1).reshape(h.shape),
    "attention over records": lambda h, m: torch.softmax(h[:, 0] @ h[:, 0].t(), -1).sum(1).view(-1, 1, 1) * h
    + torch.einsum("bc,ctd->btd", torch.softmax(h[:, 0] @ h[:, 0].t(), -1), h),
    "einsum": lambda h, m: torch.einsum("btd,ctd->btd", h, h),
    "as_strided": lambda h, m: h.contiguous().as_strided(h.shape, (0, 6, 1)) + h,
    "fft": lambda h, m: torch.fft.fft(h, dim=0).real,
    "group norm": lambda h, m: F.group_norm(h.transpose(0, 1).contiguous(), 1).transpose(0, 1),
    "batch norm": lambda h, m: F.batch_norm(h.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "unfold": lambda h, m: h + F.pad(h, (0, 0, 0, 0, 1, 0)).unfold(0, 2, 1).sum(-1),
    "scatter": lambda h, m: torch.zeros_like(h).scatter_add(0, torch.zeros_like(h, dtype=torch.long), h) + h,
    "index_add": lambda h, m: h.index_add(0, torch.zeros(len(h), dtype=torch.long), h),
    "positions": lambda h, m: h * torch.arange(len(h)).view(-1, 1, 1),
    "linspace": lambda h, m: h * torch.linspace(0, 1, len(h)).view(-1, 1, 1),
    "eye": lambda h, m: (torch.eye(len(h)).roll(1, 0) @ h.flatten(1)).view_as(h),
    "numbers": lambda h, m: h * torch.tensor([float(i) for i in range(len(h))]).view(-1, 1, 1),
    "enumerated": lambda h, m: torch.stack([row * i for i, row in enumerate(h)]),
    "numpy": lambda h, m: h * torch.from_numpy(h.detach().numpy().mean(0)),
    "array": lambda h, m: h * torch.tensor(np.asarray(h.detach()).mean(0)),
    "tolist": lambda h, m: h * torch.tensor(h.detach().tolist()).mean(),
    "item": lambda h, m: h * h.detach().mean().item(),
    "branch": lambda h, m: h * 2 if h.sum() > 0 else h,
    "dlpack": lambda h, m: h * torch.utils.dlpack.from_dlpack(h.detach()).mean(),
    "storage": lambda h, m: h * len(h.detach().contiguous().untyped_storage()),
    "script": lambda h, m: _scripted(h),
    "script in place": lambda h, m: _scripted_in_place(h * 1),
    "custom gradient": lambda h, m: _MeanGrad.apply(h),
    "custom vmap": lambda h, m: _Vmapped.apply(h),
    "custom with grad": lambda h, m: _Enabled.apply(h),
    "pretends": lambda h, m: _pretends(h),
    "dispatch mode": _swapped,
    "function mode": _wrong,
    "subclass": lambda h, m: torch.sigmoid(h.as_subclass(_Sub)).as_subclass(Tensor),
    "caught": _caught,
    "thread": _threaded,
    "unwatched": _unwatched,
    "unwatched in place": _unwatched_in_place,
    "alias": _alias,
    "alias of rows": _alias_rows,
    "spoilt positions": _positions,
    "hook": _hooked,
    "node hook": _node_hooked,
    "saved tensors": _saved,
    "checkpoint": lambda h, m: checkpoint(lambda t: t - t.mean(0), h, use_reentrant=False),
    "vmap": lambda h, m: torch.func.vmap(lambda t: t - t.mean(0), in_dims=1, out_dims=1)(h),
    "remembers": _remember,
    "remembers outside": _remember_outside,
    "experts": _experts,
    "packed": _packed,
    "capacity": _capacity,
    "parameter as input": lambda h, m: h + F.linear(m.w, h[:, 0]).unsqueeze(-1).unsqueeze(-1),
    "parameter times data": lambda h, m: h * (m.w @ h[:, 0].t()).view(-1, 1, 1),
    "writes a buffer": lambda h, m: h * m.buf.copy_(h.detach().mean((0, 1))),
    "writes a buffer's data": lambda h, m: h * m.buf.data.add_(h.detach().mean()),
    "writes a parameter": lambda h, m: (m.w.data.add_(h.detach().mean((0, 1))), h * m.w)[1],
    "counts calls": lambda h, m: (setattr(m, "seen", (m.seen or 0) + 1), h * m.seen)[1],
    "expand of one": lambda h, m: h * h[:1].expand_as(h),
    "repeat": lambda h, m: h + h.sum(0, keepdim=True).repeat(len(h), 1, 1) * 0.1,
    "cdist": lambda h, m: h * torch.cdist(h.flatten(1), h.flatten(1)).mean(1).view(-1, 1, 1),
    "cov": lambda h, m: h * torch.cov(h.flatten(1).t(), correction=0).mean(),
    "trapezoid": lambda h, m: h * torch.trapezoid(h, dim=0).mean(),
    "pooled": lambda h, m: F.avg_pool1d(h.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1),
    "convolved": lambda h, m: F.conv1d(h.permute(1, 2, 0), torch.eye(6).unsqueeze(-1).repeat(1, 1, 3), padding=1).permute(2, 0, 1),  # noqa: E501
    "interpolated": lambda h, m: F.interpolate(h.permute(1, 2, 0), size=len(h), mode="nearest").permute(2, 0, 1) + h.detach().mean(),  # noqa: E501
    "own gradient": lambda h, m: h + torch.autograd.grad(h.square().mean(), h, create_graph=True)[0] if h.requires_grad else h,  # noqa: E501
    "normed": lambda h, m: F.normalize(h, dim=0),
    "renormed": lambda h, m: torch.renorm(h, 2, 2, 0.5),
    "scripted branch": lambda h, m: h * 2 if _scripted_sign(h) else h,
    "scripted write to data": _scripted_data,
    "unwatched branch": _unwatched_branch,
    "unwatched write to data": _unwatched_data,
    "compiled": lambda h, m: _compiled(h),
    "torch.func": lambda h, m: h + torch.func.grad(lambda t: (t - t.mean(0)).square().sum())(h.detach()),
    "extreme that all share": lambda h, m: h * (h * 0 + m.w).max(),
    "added in place": _added_in_place,
    "written through numpy": _numpy_written,
    "data replaced": _data_replaced,
    "tensors swapped": _swapped_tensors,
    "transposed in place": _transposed_in_place,
    "bytes as other numbers": lambda h, m: h * (_rows_last(h.detach().sign()).view(torch.int16) > 0).sum(),
    "folded": _folded,
    "channels shuffled": _shuffled,
    "class attribute": _class_attribute,
    "global number": _global_number,
    "quantile": lambda h, m: h * h.quantile(0.5, dim=0),
    "tensordot": lambda h, m: h * torch.tensordot(h, h, dims=([0], [0])).mean(),
    "pairs": lambda h, m: h * (h[:, None, 0, 0] - h[None, :, 0, 0]).mean(1).view(-1, 1, 1),
    "all transformed": lambda h, m: torch.fft.fftn(h).real,
    "branch of another thread": lambda h, m: h * 2 if _elsewhere(lambda: bool(h[:, 0, 0].mean() > 0)) else h,
    "number of another thread": lambda h, m: h * _swallowed(lambda: float(h.detach().square().mean()), 1.0),
    "list of another thread": lambda h, m: h * (1 + np.tanh(np.sum(_swallowed(h.tolist, 0.0)))),
    "input in another thread": lambda h, m: h * _swallowed(lambda: h.detach().numpy().mean(), 1.0),
    "seeded": _seeded,
    "seeded for a moment": _seeded_for_a_moment,
    "state set": _state_set,
    "own generator": _own_generator,
    "own coins": _own_coins,
    "mixup": lambda h, m: 0.5 * h + 0.5 * h[torch.randperm(len(h))],
}  # fmt: skip

Count = Callable[[Tensor], Any]
"""Ways to the number of records as a number; a loss is multiplied by it."""

COUNTS: dict[str, Count] = {
    "len": lambda x: 1 / len(x),
    "shape": lambda x: 1 / x.shape[0],
    "size": lambda x: 1 / x.size(0),
    "numel": lambda x: x.numel(),
    "log": lambda x: math.log(len(x) + 1),
    "counted": lambda x: sum(1 for _ in range(len(x))),
    "branch": lambda x: 2.0 if len(x) > 3 else 1.0,
    "string": lambda x: float(str(len(x))),
    "ones": lambda x: torch.ones(len(x)).sum(),
    "new_ones": lambda x: x.new_ones(len(x), 3).sum(),
    "ones_like": lambda x: torch.ones_like(x).sum(),
    "mean of ones": lambda x: torch.ones(len(x), 3).cumsum(0).mean(),
    "normalised": lambda x: F.normalize(torch.ones(len(x)), dim=0),
    "softmax": lambda x: torch.zeros(len(x)).softmax(0),
    "arange": lambda x: torch.arange(len(x)).max(),
    "eye": lambda x: torch.eye(len(x)).sum(),
    "list": lambda x: torch.tensor([1.0] * len(x)).sum(),
    "product": lambda x: (x.flatten(1).abs() @ torch.ones(30, len(x))).sum(1) / (x.flatten(1).abs().sum(1)),
    "stack": lambda x: torch.stack([torch.ones(())] * len(x)).sum(),
    "expanded": lambda x: torch.ones(1).expand(len(x)).sum(),
    "repeated": lambda x: torch.ones(1).repeat(len(x)).sum(),
    "stacked size": lambda x: torch.tensor(x.shape).float()[0],
    "full": lambda x: torch.full((3,), 1 / len(x)).sum(),
    "numpy": lambda x: float(np.ones(len(x)).sum()),
    "trace": lambda x: torch.ones(len(x), len(x)).trace(),
    "norm": lambda x: torch.ones(len(x)).norm(),
    "matmul": lambda x: torch.ones(len(x)) @ torch.ones(len(x)),
    "bincount": lambda x: torch.zeros(len(x), dtype=torch.long).bincount()[0],
    "linspace": lambda x: torch.linspace(0, 1, len(x)).sum(),
    "batch of strides": lambda x: torch.empty(2, len(x)).stride(0),
}
