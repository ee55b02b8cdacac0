"""What must be known about a model before its clipped gradients can be trusted.

Clipping bounds one record's influence only if a record's gradient depends on that record alone. Modules
that are known to mix records are refused by name. What the tape has shown is the proof; the experiments here
are a second line behind it. Before the first step, record 0's loss must not change when record 1 does. And
now and then through a run, losses and gradients of a few records together are compared with those of each
alone: a difference may mean that the proof has a hole, and then records are computed by themselves.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, allclose, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tacit.errors import UserError
from tacit.gradients import generators
from tacit.gradients.functions import AGREED
from tacit.gradients.plain import Batch, Losses, batch_size, refuse_shape
from tacit.gradients.steady import Steadily
from tacit.gradients.tape import Tape, Unsupported, tensors_in

Sums = Callable[[Batch, Losses], tuple[list[Tensor | None], Tensor]]
"""A way to compute a few records: the sum of each parameter's gradients, and the losses."""


class Mixed(UserError):
    """Records were seen to change each other, though nothing in sight mixes them."""


@dataclass(frozen=True)
class Survey:
    """What two records told about a model."""

    plain: int
    """Bytes that plain training keeps for one record between its forward and its backward pass."""
    kept: int
    """Bytes that book-keeping keeps for one record until the weighted sum."""
    obstacle: Unsupported | None
    """Why book-keeping is not possible, if it is not."""
    decided: bool = False
    """Whether this may be otherwise for other records: they decide what the model computes."""


def survey(module: nn.Module, pair: Batch, losses: Losses, tape: Callable[[Batch], Tape]) -> Survey:
    """Try the model on two records. Leaves the random state as it was; raises if records are mixed."""
    device = next(iter(pair.values())).device
    with generators.forked(device):
        state, others = generators.state(device), (random.getstate(), np.random.get_state())  # noqa: NPY002
        # nan cannot be hidden by a layer that happens to be all zeros, as fresh output layers often are.
        twice = {name: tensor[[0, 0]] for name, tensor in pair.items()}
        changed = {name: tensor.clone() for name, tensor in twice.items()}
        for tensor in changed.values():
            if tensor.is_floating_point():
                tensor[1] = float("nan")

        def run(batch: Batch, decisions: Decisions | None = None) -> Tensor:
            generators.set_state(state, device)  # the same draws each time
            random.setstate(others[0])
            np.random.set_state(others[1])  # noqa: NPY002
            with torch.no_grad(), decisions or nullcontext():
                found = losses(module, batch)
            refuse_shape(found, 2)
            return found

        def mixes() -> bool:
            """Whether it is not for what both records together decide, which is told apart later."""
            taken = Decisions()
            first = run(pair, taken)[0]
            return not _alike(first, run(changed, taken.again())[0])

        first = run(pair)[0]
        try:
            second = run(changed)[0]
        except RuntimeError:  # a decomposition, or a draw, of which nan is no argument
            changed = twice
            second = run(changed)[0]
        if not _alike(first, second) and mixes():
            culprit = _first_to_mix(module, lambda: run(pair), lambda: run(changed))
            raise UserError(
                f"{culprit} mixes the records of a batch, so no record's gradient can be bounded; "
                "use a layer that treats every record by itself, such as nn.GroupNorm or nn.LayerNorm"
            )
        generators.set_state(state, device)
        random.setstate(others[0])
        np.random.set_state(others[1])  # noqa: NPY002
        watching = tape(twice)  # copies agree about whatever they decide
        try:
            return Survey(*_trial(module, twice, losses, watching), None, watching.decided)
        except Unsupported as obstacle:
            whole = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
            # What stands in the way of this record need not be in that of others.
            return Survey(whole, 2 * whole, None if watching.decided else obstacle, watching.decided)
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])  # noqa: NPY002


def _alike(one: Tensor, other: Tensor) -> bool:
    return allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)


class Decisions(TorchFunctionMode):
    """What a pass found of all its records together where code may branch on it; and the same `again`.

    Such a model does with each record what it would do with that one alone (`Tape` sees to it). Were it
    refused, a record that decides otherwise than the first one would end a run, and tell of itself.
    """

    def __init__(self, taken: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self._taken: list[Tensor] = []
        self._left = None if taken is None else deque(taken)

    def again(self) -> Decisions:
        return Decisions(self._taken)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in AGREED or len(args) != 1 or kwargs:
            return found
        if self._left:
            return self._left.popleft()
        self._taken.append(found)
        return found


def _trial(module: nn.Module, pair: Batch, losses: Losses, tape: Tape) -> tuple[int, int]:
    """Book-keeping for two records: what it keeps of each, and what a plain step would."""
    known = [*module.parameters(), *module.buffers(), *pair.values()]
    storages = {tensor.untyped_storage().data_ptr() for tensor in known}
    plain = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal plain
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in storages:
            storages.add(pointer)
            plain += tensor.numel() * tensor.element_size()
        return tensor

    try:
        with saved_tensors_hooks(count, lambda tensor: tensor), tape:
            found = losses(module, tape.batch)
    except UserError:
        raise
    except Exception as error:
        tape.say_again()
        # The same records passed without a tape: torch.func inside a model, or a compiled one.
        raise Unsupported(f"a model that fails when watched ({_first_line(error)})", alone=True) from error
    tape.finish(found)
    for tensor in tape.held:
        count(tensor)
    forms = tape.backward(found)
    return plain // 2, sum(form.bytes for form, _ in filter(None, forms)) // 2


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).split("\n")[0][:80]


class Still(TorchFunctionMode):
    """No randomness: dropout does nothing, and what is drawn is the same everywhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0]
        if func in _DRAWS:
            kwargs.pop("generator", None)
            return _DRAWS[func](*args, **kwargs).fill_(0.5)
        return func(*args, **kwargs)


_DROPOUTS = frozenset(
    (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.feature_dropout,
        torch.alpha_dropout,
    )
)
_DRAWS: dict[Any, Any] = {
    torch.rand: torch.empty,
    torch.randn: torch.empty,
    torch.rand_like: torch.empty_like,
    torch.randn_like: torch.empty_like,
}


def experiment(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    batch: Batch,
    losses: Losses,
    together: Sums,
    steadily: bool,
) -> None:
    """Raise `Mixed` if a few records together have other losses, or other sums of gradients, than each alone.

    `together` is the way under test. Randomness is left out, as it cannot be the same for one record and for
    several; where a model draws in other ways, there is nothing to compare. Two gradients are in memory at a
    time: of several records, and of one.

    `steadily`: that way takes kernels which round a record's numbers the same beside any others, though not
    quite by itself. Then a record is alone with copies of itself: of one on a kink of the network, kernels
    for a single record could turn the gradient on or off.
    """
    device = next(iter(batch.values())).device
    with generators.forked(device):
        states, before = (random.getstate(), np.random.get_state()), generators.state(device)  # noqa: NPY002

        def still(model: nn.Module, records: Batch) -> Tensor:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            with Still():
                return losses(model, records)

        compared = []
        for n in [n for n in (2, 3) if n <= batch_size(batch)]:
            left, found = together({name: tensor[:n] for name, tensor in batch.items()}, still)
            # Errors are held against the lengths of all the gradients: those of their sum may cancel.
            alone, lengths = [], [_norms(left, found)]
            for j in range(n):
                count = 5 - n if steadily else 1  # never n: what depends on their number shows
                copies = {name: _copies(tensor, j, count) for name, tensor in batch.items()}
                with Steadily() if steadily else nullcontext():
                    loss = still(module, copies)[0]
                alone.append(loss.detach().float())
                grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
                lengths.append(_norms(grads, found))
                left = [_less(total, grad) for total, grad in zip(left, grads, strict=True)]
                del loss, grads  # before the next ones come
            compared.append((found.dtype, [found.float(), torch.stack(alone), _norms(left, found), *lengths]))
            del left
        if not generators.same(before, generators.state(device)):
            return
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters.values())
    half = half or torch.is_autocast_enabled(device.type)
    for dtype, seen in compared:
        # From a device in one piece; squares of long gradients are too large for float32.
        fetched = torch.split(torch.cat(seen).cpu().double(), [len(each) for each in seen])
        found, expected = fetched[:2]
        errors, *each = (norms.square().sum().sqrt() for norms in fetched[2:])
        length = torch.stack(each).sum()
        rough = 0.2 if half or dtype != torch.float32 else 1e-2
        apart = (found - expected).abs().max() > rough * expected.abs().max() + 1e-5
        if not (torch.isfinite(expected).all() and torch.isfinite(errors + length)):
            return
        if apart or errors > rough * length + 1e-6:
            raise Mixed(
                f"records of a batch change each other's {'losses' if apart else 'gradients'} (seen with "
                f"{len(expected)} of them), though nothing in sight mixes them; nothing can be promised for "
                "this model. Does it use code that is hidden from torch, or keep something between calls?"
            )


def _copies(tensor: Tensor, row: int, count: int) -> Tensor:
    """One record so often, with its layout in memory, by which kernels are chosen. Its number is written down
    on the device and not sent there.
    """
    return tensor[torch.full((count,), row, device=tensor.device)]


def _less(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """What is left of a sum; `total` is scratch."""
    if grad is None:
        return total
    return -grad if total is None else total.sub_(grad)


def _norms(parts: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Each part's, on the device of `like`."""
    norms = [torch.linalg.vector_norm(part.flatten()).float() for part in parts if part is not None]
    return torch.stack(norms) if norms else like.new_zeros(0, dtype=torch.float32)


def _first_to_mix(module: nn.Module, *runs: Callable[[], Tensor]) -> str:
    """The first module whose output for record 0 changed although its input for record 0 did not."""
    names = {part: name for name, part in module.named_modules()}
    passes: list[list[tuple[nn.Module, list[Tensor], list[Tensor]]]] = []

    def note(part: nn.Module, args: Any, out: Any) -> None:
        firsts = [[t[0].clone() for t in tensors_in(v) if t.dim()] for v in (args, out)]
        passes[-1].append((part, firsts[0], firsts[1]))

    handles = [part.register_forward_hook(note) for part in names]
    try:
        for run in runs:
            passes.append([])
            run()
    finally:
        for handle in handles:
            handle.remove()

    def same(one: list[Tensor], two: list[Tensor]) -> bool:
        return all(a.shape == b.shape and allclose(a, b, rtol=1e-4) for a, b in zip(one, two, strict=True))

    for (part, args, out), (_, other_args, other_out) in zip(*passes, strict=False):
        if same(args, other_args) and not same(out, other_out):
            return f"module {names[part]!r} ({type(part).__name__})"
    return "the loss function"
