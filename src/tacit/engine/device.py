"""Where a worker computes, and in which precision: on the CPU or on accelerators, with one worker for each.

The worker moves the message and each batch to its device once. The flat parameters live there, and so do a
shard's sums until the shard is done. Algorithms, mechanisms and tasks do not see the device. Files always
hold host tensors.

- `precision: bf16` computes the model's own products in bfloat16 (torch's autocast). Parameters, clipped
  sums, norms, noise and the server's state stay in float32, so the clipping bound holds as before.
- `activation_checkpointing: true` drops what each layer computes inside and recomputes it in the backward
  pass: less memory, about a third more time. It uses transformers' own switch if the model has one. Clipped
  gradients are then computed record by record, since the isolation proof cannot follow a layer that runs
  twice.
- Private noise is made on the host, with the same generator and grid for every device. A second thread makes
  it while gradients are computed, and it is copied to the device once.
- Under a guarantee, float32 means float32: the worker switches TensorFloat-32 off. A norm and a sum that are
  rounded to ten bits in different ways would break the clipping bound.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from tacit.errors import UserError
from tacit.lazy import torch
from tacit.section import Section

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tacit.vector import Vectors

Precision = Literal["float32", "bf16"]
KINDS = ("cuda", "xpu", "mps")
"""What `auto` looks for, in this order."""
_NARROW = ("mps",)
"""Devices without float64. Bounding and rounding uploads needs it, so the host does both for these devices.
"""


def _device(name: object) -> str:
    """Check that a name could be a device's. The CPU is one device, however many cores it has."""
    sound = isinstance(name, str) and re.fullmatch(r"(?!cpu:)[a-z]+(:\d+)?", name)
    if not isinstance(name, str) or not sound:
        raise ValueError(f"{name!r} is no device; say auto, cpu, cuda, cuda:1, mps or xpu")
    return name


def _one_or_more(value: object) -> str | tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        return _device(value)
    if "auto" in value:
        raise ValueError(
            "auto is for itself: it takes every accelerator; name each device, or leave the list"
        )
    return tuple(map(_device, value))


Device = Annotated[str, BeforeValidator(_device)]
Devices = Annotated[str | tuple[str, ...], BeforeValidator(_one_or_more)]


class DeviceSettings(Section):
    """What every engine on machines of one's own can be told about where it computes."""

    device: Devices = "auto"
    """`auto` takes every accelerator that torch sees, else the CPU; a list has one worker for each entry."""
    precision: Precision = "float32"
    """bf16: the model's products in bfloat16, everything that is summed or released in float32."""
    activation_checkpointing: bool = False
    """Compute activations again on the way back instead of keeping them."""

    def computes(self) -> list[Compute]:
        """One `Compute` for each device; refused if torch does not see the device, or if it would have no
        worker.
        """
        found = devices(self.device)
        workers = getattr(self, "workers", "auto")
        if isinstance(self.device, tuple) and isinstance(workers, int) and workers < len(found):
            raise UserError(
                f"engine.workers: {workers} for a list of {len(found)} devices, which has a worker for each; "
                "leave engine.workers out, or name fewer devices"
            )
        return [Compute(device, self.precision, self.activation_checkpointing) for device in found]

    def one(self) -> Compute:
        """The only device, or the first one that `auto` found."""
        found = self.computes()
        if len(found) > 1 and self.device != "auto":
            raise UserError(
                f"engine.device: {len(found)} devices for one process; leave out engine.kind, or set it to "
                "pool, which has a worker for each"
            )
        return found[0]


def devices(wanted: str | Sequence[str], key: str = "engine.device") -> list[str]:
    """The devices, by torch's names; `key` is the config key that an error message points to.

    >>> devices("cpu")
    ['cpu']
    """
    if wanted == "auto":
        for kind in KINDS:
            if number := _number(kind):
                return [kind] if number == 1 else [f"{kind}:{i}" for i in range(number)]
        return ["cpu"]
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if not names:
        raise UserError(f"{key}: an empty list; name a device, or say auto")
    for name in names:
        kind, _, index = name.partition(":")
        if kind != "cpu" and int(index or 0) >= _number(kind):
            here = [k for k in KINDS if _number(k)]
            raise UserError(
                f"{key}: torch sees no {name} on this machine, but {', '.join(['cpu', *here])}; use "
                "one of those, or auto"
            )
    return names


def _number(kind: str) -> int:
    module: Any = getattr(torch, kind, None)
    available = torch.backends.mps.is_available if kind == "mps" else getattr(module, "is_available", None)
    return int(module.device_count()) if available is not None and available() else 0


@dataclass(frozen=True)
class Compute:
    """One worker's device and precision."""

    device: str = "cpu"
    precision: Precision = "float32"
    activation_checkpointing: bool = False

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def here(self) -> bool:
        """Whether the device is the host itself."""
        return self.kind == "cpu"

    @property
    def sums(self) -> str:
        """The device on which uploads are bounded and added up."""
        return "cpu" if self.kind in _NARROW else self.device

    def place(self, model: nn.Module, private: bool) -> nn.Module:
        """The model on its device: itself on the host, a copy elsewhere."""
        if private and self.kind == "cuda":
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.cuda.matmul.allow_tf32 = False
        if self.precision == "bf16" and not torch.amp.is_autocast_available(self.kind):
            raise UserError(f"engine.precision: torch has no bf16 on {self.device}; set it to float32")
        if not self.here and any(str(p.device) not in self._names() for p in model.parameters()):
            model = deepcopy(model, _moved(model, self.device))
        if self.activation_checkpointing:
            forget_activations(model)
        return model

    def _names(self) -> tuple[str, ...]:
        """The names that tensors on this device may report; without a number, a name means the first."""
        return (self.device, self.device if ":" in self.device else f"{self.device}:0")

    def batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch on the model's device. The copy runs beside whatever the device is computing."""
        if self.here:
            return batch
        if self.kind == "cuda":
            return {name: t.pin_memory().to(self.device, non_blocking=True) for name, t in batch.items()}
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def vectors(self, vectors: Mapping[str, Tensor]) -> Vectors:
        """Named vectors on the model's device."""
        return {name: vector.to(self.device) for name, vector in vectors.items()}

    @staticmethod
    def host(vectors: Mapping[str, Tensor]) -> Vectors:
        """Named vectors on the host, for files and other processes."""
        return {name: vector.cpu() for name, vector in vectors.items()}

    def products(self) -> AbstractContextManager[Any]:
        """Inside this context, the model's products use the configured precision."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.kind, dtype=torch.bfloat16)


HOST = Compute()


def _moved(model: nn.Module, device: str) -> dict[int, Any]:
    """What a deep copy should use for each of the model's tensors, so that the host never holds a second
    copy.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        there = parameter.detach().to(device)
        plain = type(parameter) is torch.nn.Parameter  # a quantised one moves what it needs to be read, too
        memo[id(parameter)] = (
            torch.nn.Parameter(there, parameter.requires_grad) if plain else parameter.to(device)
        )
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to(device)
    return memo


def forget_activations(model: nn.Module) -> None:
    """Make each layer of a model keep only its input, and recompute the rest in the backward pass.

    Refused if that would not be exact, or would save nothing.
    """
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.utils.checkpoint import checkpoint

    for name, part in model.named_modules():
        if isinstance(part, _BatchNorm) and part.track_running_stats:
            raise UserError(
                f"engine.activation_checkpointing: module {name!r} ({type(part).__name__}) would count every "
                "batch twice in its statistics; leave it out, or use a network with group normalisation"
            )
    switch = getattr(model, "gradient_checkpointing_enable", None)
    if switch is not None and getattr(model, "supports_gradient_checkpointing", False):
        switch({"use_reentrant": False})
        return
    layers = _layers(model)
    if not layers:
        raise UserError(
            "engine.activation_checkpointing: this model has no sequence of equal layers; leave it out"
        )
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def _layers(model: nn.Module) -> list[nn.Module]:
    """A transformer's layers or a residual network's blocks. The kind of layer is that of the longest
    sequence; all layers of this kind that stand in sequences are returned.
    """
    sequences: list[list[nn.Module]] = []
    for part in model.modules():
        children = list(part.children())
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        if isinstance(part, (torch.nn.Sequential, torch.nn.ModuleList)) and alike:
            sequences.append(children)
    longest = max(sequences, key=len, default=[])
    return [layer for layers in sequences for layer in layers if type(layer) is type(longest[0])]
