"""What the tape leaves on tensors and in the graph: marks that say what a tensor is made of, and nodes that
tell of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import Tensor

from tacit.gradients.axes import Unsupported, tensors_in


class Token:
    """One pass, in one thread; marks of other passes mean nothing to it."""

    def __init__(self, refuse: Callable[[Unsupported], NoReturn]) -> None:
        self.active, self._refuse, self._thread = True, refuse, get_ident()

    def refuse_elsewhere(self) -> None:
        if self.active and get_ident() != self._thread:
            self._refuse(Unsupported("data used in another thread", alone=True))


class Mark:
    """What a tensor is made of; kept as an attribute of the tensor itself, so it lives exactly as long."""

    __slots__ = ("axes", "coins", "core", "order", "parameters", "token")

    def __init__(
        self,
        token: Token,
        axes: str,
        parameters: frozenset[int] = frozenset(),
        core: Tensor | None = None,
        order: int = 0,
        coins: bool = False,
    ) -> None:
        self.token, self.axes, self.order = token, axes, order
        self.coins = coins
        """Whether random numbers are in it."""
        self.parameters = parameters
        """Indices of the parameters it was computed from; empty for data and constants."""
        self.core = core
        """For an owned tensor expanded over records: the same with a dimension of one in their place."""


class Watched(Tensor):
    """Data of a pass that tells where it is used. Modes watch one thread; a tensor's class goes along to all.

    A mean that another thread takes, and a branch on it, would leave nothing on the tape. As slow as `Unseen`
    and, like it, for a model's comparison alone.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in(args, kwargs):
            mark: Mark | None = getattr(tensor, "_tacit", None)
            if mark is not None:
                mark.token.refuse_elsewhere()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Anchor(torch.autograd.Function):
    """The identity, but the output has a gradient even where no input of the layer needs one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)  # the same memory, and later in-place functions stay allowed
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class Spread(torch.autograd.Function):
    """An owned tensor broadcast to one copy per record; its gradient goes to the tape, unsummed."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tensor: Tensor, shape: Sequence[int], found: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.found = found
        return tensor.expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.found(grads[0])
        return None, None, None, None
