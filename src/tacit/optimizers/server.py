"""The server's optimizer: the clients' average update as a gradient (Reddi et al. 2021, arXiv:2003.00295).

The average Δ̄ points where the clients moved, so its negative takes the gradient's place. Plain SGD at rate 1
is then federated averaging, θ + Δ̄, to the last bit. Each parameter tensor is a parameter of the optimizer,
so LAMB and LARS see layers. All of them are views of one vector, which other code sees as `theta`.

>>> import torch
>>> layout = Layout.of(torch.nn.Linear(2, 1))
>>> server = ServerOptimizer("sgd", torch.zeros(3), layout, lr=1.0)
>>> server.step(torch.tensor([1.0, 2.0, 3.0]))
>>> server.theta
tensor([1., 2., 3.])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tacit.errors import UserError
from tacit.optimizers.lamb import Lamb
from tacit.optimizers.lars import Lars
from tacit.optimizers.schedules import Schedule
from tacit.vector import Layout

Scalar = float | int
GROUP = "group"
"""Prefix for the names of state that an optimizer keeps in its parameter groups."""

# LBFGS needs losses and SparseAdam sparse gradients; a server has neither.
_TORCH = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
}
OPTIMIZERS: dict[str, type[Optimizer]] = dict(sorted({**_TORCH, "lamb": Lamb, "lars": Lars}.items()))
"""Every server optimizer by name, in lower case."""

OptimizerFactory = Callable[..., Optimizer]
"""What `tacit.run(optimizer=…)` accepts: a callable that makes a torch optimizer from parameters and `lr`,
such as an optimizer class or `functools.partial(CLASS, OPTIONS)`.
"""

# Options that the server sets itself (parameters, rate, direction), and torch's switches for GPUs.
_OURS = {"self", "params", "lr", "maximize", "foreach", "fused", "capturable", "differentiable"}


def options(name: str) -> dict[str, Any]:
    """The options of a server optimizer and their defaults."""
    parameters = inspect.signature(_kind(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in _OURS}


def constant(round: int) -> float:
    """The schedule of a constant rate."""
    return 1.0


class ServerOptimizer:
    """An optimizer over the shared vector."""

    theta: Tensor
    """The live vector, which `step` updates in place; writing to it changes the model."""

    def __init__(
        self,
        kind: str | OptimizerFactory,
        theta: Tensor,
        layout: Layout,
        lr: float,
        schedule: Schedule = constant,
        **given: Any,
    ) -> None:
        """Start from a copy of `theta`, the shared vector; a bad name or option is a `UserError`."""
        build: Any = kind
        if isinstance(kind, str):
            build, known = _kind(kind), options(kind)
            for option in given:
                if option not in known:
                    takes = ", ".join(f"{k}={v!r}" for k, v in known.items())
                    raise UserError(
                        f"server optimizer {kind!r} has no option {option!r}; its options are: {takes}"
                    )
        self.theta = theta.detach().clone(memory_format=torch.contiguous_format)
        self._segments = layout.shared_segments
        self._lr, self._schedule = lr, schedule
        self._parameters = [nn.Parameter(view, requires_grad=False) for _, view in layout.views(self.theta)]
        try:
            self._optimizer: Optimizer = build(self._parameters, lr=lr, **given)
        except (TypeError, ValueError) as error:
            raise UserError(f"server optimizer {kind!r} refuses its settings: {error}") from error
        if not isinstance(self._optimizer, Optimizer):
            made = type(self._optimizer).__name__
            raise UserError(f"server optimizer: {kind!r} makes a {made}, not a torch.optim.Optimizer")
        self._groups = [dict(group) for group in self._optimizer.param_groups]

    def step(self, delta: Tensor, round: int = 0) -> None:
        """Move along `delta`, the average update, at the round's rate."""
        lr = self._lr * self._schedule(round)
        # The sign is flipped in place and back, which is exact; a copy would be one more vector of the
        # model's size.
        gradient = delta.neg_()
        try:
            for segment, parameter in zip(self._segments, self._parameters, strict=True):
                parameter.grad = gradient[segment.slice].view(segment.shape)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        finally:
            delta.neg_()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
        """What `load` needs besides `theta`, by parameter and name (`"0.exp_avg"`): tensors and plain
        numbers.

        The tensors are live; write them out before the next step.
        """
        tensors: dict[str, Tensor] = {}
        scalars: dict[str, Scalar] = {}
        for i, parameter in enumerate(self._parameters):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{i}.{name}"] = value
                elif value is not None:
                    scalars[f"{i}.{name}"] = value
        for i, (group, before) in enumerate(zip(self._optimizer.param_groups, self._groups, strict=True)):
            for name, value in group.items():  # some optimizers keep state there, next to their options
                if isinstance(value, Tensor):
                    tensors[f"{GROUP}{i}.{name}"] = value
                elif isinstance(value, int | float) and name != "lr" and before.get(name) != value:
                    scalars[f"{GROUP}{i}.{name}"] = value
        return tensors, scalars

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> None:
        """Continue bit for bit from where `state` was taken; the caller restores `theta`."""
        states: list[dict[str, Tensor | Scalar]] = [{} for _ in self._parameters]
        groups = self._optimizer.param_groups
        for key, value in {**tensors, **scalars}.items():
            index, _, name = key.removeprefix(GROUP).partition(".")
            if key.startswith(GROUP) and index.isdigit() and int(index) < len(groups):
                groups[int(index)][name] = value.clone() if isinstance(value, Tensor) else value
                continue
            if not index.isdigit() or int(index) >= len(states):
                raise ValueError(f"optimizer state {key!r} belongs to another model")
            # torch counts steps on the host, in a tensor without dimensions.
            states[int(index)][name] = _like(value, self.theta) if isinstance(value, Tensor) else value
        for parameter, state in zip(self._parameters, states, strict=True):
            # Not load_state_dict, which casts every tensor to the parameter's type.
            self._optimizer.state[parameter] = state


def _like(value: Tensor, theta: Tensor) -> Tensor:
    return value.clone() if value.dim() == 0 else value.to(theta.device, copy=True)


def _kind(name: str) -> type[Optimizer]:
    kind = OPTIMIZERS.get(name.lower())
    if kind is None:
        near = get_close_matches(name.lower(), OPTIMIZERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"unknown server optimizer {name!r}{hint} (known: {', '.join(OPTIMIZERS)}; a class of your own "
            "is passed in Python, to tacit.run)"
        )
    return kind
