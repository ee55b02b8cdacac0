"""A simulated device, `accel`, to test code for accelerators on a machine without one.

`install()` makes `torch.device("accel")` a device like any other. A tensor on it is a plain `torch.Tensor`
with torch's own views, versions and autograd, but its memory belongs to the device. Every operation on it is
handled here: it is refused if a host tensor is mixed in, and computed by the CPU's kernel in that memory. So
results equal the CPU's bit for bit, and code that forgets to move something fails as on a real device.

>>> install()
>>> x = torch.ones(2, 3, device="accel")
>>> (x.to("accel") * 2).sum().item(), x.device.type
(12.0, 'accel')
>>> x + torch.ones(3)
Traceback (most recent call last):
RuntimeError: Expected all tensors to be on the same device, but found at least two devices, accel:0 and cpu!
>>> torch.nn.functional.linear(x, torch.ones(2, 3))
Traceback (most recent call last):
RuntimeError: aten.mm.out on accel: argument 1 is on the cpu, with shape [3, 2]; move it first
>>> with counting() as traffic:
...     y = x.cpu()
>>> traffic.up, traffic.down, traffic.bytes_down
(0, 1, 24)

How it works. torch reserves a dispatch key for external devices, PrivateUse1, and lets Python replace their
kernels. The storage of a tensor on `accel` points to memory of a host storage that it owns. The catch-all
kernel makes host tensors over the same memory, with the same strides, runs the operation on them, and moves
the results to the device. Operations that only view memory differently need none of this.

Stricter than real devices: an index on the host is refused (CUDA copies it). More lenient: random numbers are
the host's, so dropout can be compared; there is only one device; nothing is asynchronous.

In other processes: `environment(folder)` gives variables with which any Python that imports torch has the
device, through torch's own way of finding devices (entry points of the group `torch.backends`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

NAME = "accel"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SET: Any = torch.ops.aten.set_.source_Storage_storage_offset
_libraries: list[Any] = []
"""Registrations last as long as their library object."""


@dataclass
class Traffic:
    """Copies between host and device. A number that Python reads (`item`) waits for the device, too."""

    up: int = 0
    down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    reads: int = 0


_traffic = Traffic()


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count copies between host and device inside this context."""
    global _traffic
    before, _traffic = _traffic, Traffic()
    try:
        yield _traffic
    finally:
        _traffic = before


def install() -> None:
    """Register the device with torch; once per process, for the process's lifetime."""
    if _libraries:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    fallback: Any = torch.library.Library("_", "IMPL")
    fallback.fallback(_everything, "PrivateUse1")
    aten: Any = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        aten.impl("scaled_dot_product_attention", _attention, key)
    _libraries.extend([fallback, aten])


class _Module:
    """`torch.accel`: the functions that torch expects of a device's module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the host's."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def environment(folder: Path) -> dict[str, str]:
    """This process's environment variables, plus those that make Python find the device when it imports
    torch.
    """
    about = folder / f"{NAME}_device-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}-device\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = {Path(__file__).stem}:install\n")
    paths = [str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


# --- memory -------------------------------------------------------------------------------------------------


def _to_device(host: Tensor) -> Tensor:
    """A device tensor in the host tensor's memory, which it owns from now on."""
    memory = host.untyped_storage()
    storage: Any = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device(NAME, 0), memory.nbytes()
    )
    storage.host = memory  # torch keeps a storage's attributes for as long as any tensor has it
    tensor: Tensor = torch._C._acc.create_empty_tensor([0], host.dtype)
    _SET.redispatch(_CPU, tensor, storage, host.storage_offset(), host.shape, host.stride())
    return tensor


def _to_host(tensor: Tensor) -> Tensor:
    """A host tensor in a device tensor's memory."""
    storage: Any = tensor.untyped_storage()
    host = torch.empty(0, dtype=tensor.dtype)
    _SET(host, storage.host, tensor.storage_offset(), tensor.shape, tensor.stride())
    return host


# --- kernels ------------------------------------------------------------------------------------------------


def _no_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _hidden(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose own calls are invisible to autograd and to the tested code's modes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction(), _no_autocast():
            return kernel(*args, **kwargs)

    return run


@_hidden
def _everything(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation without its own kernel here."""
    schema = op._schema
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return op.redispatch(_CPU, *args, **kwargs)  # a view: the same memory, on either device
    for place, value in enumerate((*args, *kwargs.values())):
        _refuse_host(op, place, value)
    if isinstance(kwargs.get("device"), torch.device):
        kwargs["device"] = torch.device("cpu")
    args = tuple(_number(value, schema.arguments[i].type, args) for i, value in enumerate(args))
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    found = op(*_moved(args, moved), **{name: _moved(value, moved) for name, value in kwargs.items()})
    for tensor, host in moved.values():
        if tensor.shape != host.shape or tensor.stride() != host.stride():  # an output that was too small
            _adopt(tensor, host)
    given = {host.data_ptr(): tensor for tensor, host in moved.values()}
    written = any(r.alias_info is not None for r in schema.returns)

    def back(value: Any) -> Any:
        if isinstance(value, Tensor):
            return given[value.data_ptr()] if written and value.data_ptr() in given else _to_device(value)
        return type(value)(map(back, value)) if isinstance(value, (list, tuple)) else value

    return back(found)


def _number(value: Any, kind: Any, args: tuple[Any, ...]) -> Any:
    """torch passes plain numbers to Python where a kernel expects tensors: make tensors of them."""
    if type(value) not in (int, float, bool) or str(kind) not in ("Tensor", "Optional[Tensor]"):
        return value
    wide = isinstance(value, float) and any(isinstance(a, Tensor) and a.is_floating_point() for a in args)
    return torch.tensor(value, dtype=torch.float64 if wide else None)


def _refuse_host(op: Any, place: int, value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for part in value:
            _refuse_host(op, place, part)
    elif isinstance(value, Tensor) and value.device.type != NAME and value.dim():
        raise RuntimeError(
            f"{op} on {NAME}: argument {place} is on the {value.device}, with shape {list(value.shape)}; "
            "move it first"
        )


def _moved(value: Any, moved: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """The same arguments with host tensors in place of device tensors."""
    if isinstance(value, Tensor) and value.device.type == NAME:
        if id(value) not in moved:
            moved[id(value)] = value, _to_host(value)
        return moved[id(value)][1]
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(part, moved) for part in value)
    return value


def _adopt(tensor: Tensor, host: Tensor) -> None:
    """Make a device tensor take over what a host tensor has become."""
    fresh = _to_device(host)
    _SET.redispatch(_CPU, tensor, fresh.untyped_storage(), host.storage_offset(), host.shape, host.stride())


@_hidden
def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return _to_device(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


@_hidden
def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _to_device(torch.empty_strided(size, stride, dtype=dtype))


@_hidden
def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if self.device.type != source.device.type and source.numel():
        if self.device.type == NAME:
            _traffic.up += 1
            _traffic.bytes_up += source.nbytes
        else:
            _traffic.down += 1
            _traffic.bytes_down += source.nbytes
    into, what = (t if t.device.type == "cpu" else _to_host(t) for t in (self, source))
    into.copy_(what)
    return self


@_hidden
def _copy_from(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy(into, source)


@_hidden
def _read(self: Tensor) -> Any:
    _traffic.reads += 1
    return _to_host(self).item()


@_hidden
def _convolution(*args: Any) -> Any:
    return _everything(torch.ops.aten.convolution.default, *args)


@_hidden
def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    *options, wanted = rest
    sizes = [weight.shape[1] * options[-1] if options[3] else weight.shape[0]]
    backward = torch.ops.aten.convolution_backward.default
    return _everything(backward, grad, x, weight, sizes, *options, wanted)


@_hidden
def _dropout(x: Tensor, p: float, train: bool | None) -> Any:
    """Dropout as on the CPU, which scales the mask and not the product; the mask is kept with its scale."""
    host = _to_host(x)
    mask = torch.ones_like(host) if train is False else torch.empty_like(host).bernoulli_(1 - p).div_(1 - p)
    return _to_device(host * mask), _to_device(mask)


@_hidden
def _dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return _to_device(_to_host(grad) * _to_host(mask))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    p: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The CPU's choice of kernel and, for its fused kernel, the CPU's derivative."""
    options = {"scale": scale, "enable_gqa": enable_gqa}
    with torch._C.DisableTorchFunction():
        with torch.no_grad():
            choice = torch._fused_sdp_choice(
                *map(_to_host, (q, k, v)), _moved(mask, {}), p, causal, **options
            )
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        learnt = mask is not None and mask.requires_grad and torch.is_grad_enabled()
        if learnt or choice != SDPBackend.FLASH_ATTENTION.value:  # the fused one has no derivative by a mask
            found = torch._scaled_dot_product_attention_math(q, k, v, mask, p, causal, None, **options)
        else:
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            found = fused(q, k, v, p, causal, attn_mask=mask, scale=scale)
    out: Tensor = found[0]
    return out


def _same(name: str) -> Callable[..., Any]:
    """The CPU's kernel where torch would use another formula for unknown devices."""
    op = getattr(torch.ops.aten, name).default
    return lambda *args, **kwargs: _everything(op, *args, **kwargs)


@_hidden
def _set_storage(self: Tensor, source: Any, offset: int, size: Any, stride: Any = ()) -> Tensor:
    found: Tensor = _SET.redispatch(_CPU, self, source, offset, size, stride)
    return found


@_hidden
def _set_whole(self: Tensor, source: Any) -> Tensor:
    numbers = source.nbytes() // self.element_size()
    found: Tensor = _SET.redispatch(_CPU, self, source, 0, [numbers], [1])
    return found


_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "copy_": _copy,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "_local_scalar_dense": _read,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    "native_dropout": _dropout,
    "native_dropout_backward": _dropout_backward,
    **{
        name: _same(name)
        for name in [
            "native_group_norm",
            "native_group_norm_backward",
            "native_layer_norm",
            "native_layer_norm_backward",
            "silu_backward",
            "mish_backward",
        ]
    },
    "set_.source_Storage_storage_offset": _set_storage,
    "set_.source_Storage": _set_whole,
}
