"""What must be known about a model before its clipped gradients can be trusted.

Clipping bounds one record's influence only if a record's gradient depends on that record alone. Modules
that are known to mix records are refused by name. Any other mixing is found by experiment on the first
two records of a batch: record 0's loss must not change when record 1 does, and no gradient of record 0's
loss may arrive where record 1's activations are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tacit.errors import UserError
from tacit.gradients.plain import Batch, Losses, refuse_shape
from tacit.gradients.tape import Tape, Unsupported, tensors_in


def refuse_mixing_modules(module: nn.Module) -> None:
    """Raise if `module` holds a layer that shares statistics between records."""
    for name, part in module.named_modules():
        if isinstance(part, _InstanceNorm):
            if part.track_running_stats:
                raise UserError(
                    f"module {name!r} ({type(part).__name__}) keeps running statistics of private records; "
                    "build it with track_running_stats=False"
                )
        elif getattr(part, "max_norm", None) is not None and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            raise UserError(
                f"module {name!r} ({type(part).__name__}) writes to its own rows as records look them up, past the "
                "clipping; build it without max_norm"
            )
        elif isinstance(part, _BatchNorm):
            channels = part.num_features
            groups = next((g for g in (32, 16, 8, 4, 2) if channels % g == 0), 1)
            raise UserError(
                f"module {name!r} ({type(part).__name__}) mixes the records of a batch, so no record's "
                f"gradient can be bounded; replace it with nn.GroupNorm({groups}, {channels})"
            )


@dataclass(frozen=True)
class Survey:
    """What two records told about a model."""

    plain: int
    """Bytes that plain training keeps for one record between its forward and its backward pass."""
    kept: int
    """Bytes that book-keeping keeps for one record until the weighted sum."""
    obstacle: Unsupported | None
    """Why book-keeping is not possible, if it is not."""


def survey(module: nn.Module, pair: Batch, losses: Losses, tape: Callable[[Batch], Tape]) -> Survey:
    """Try the model on two records. Leaves the random state as it was; raises if records are mixed."""
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        # nan cannot be hidden by a layer that happens to be all zeros, as fresh output layers often are.
        changed = {name: tensor[[0, 0]] for name, tensor in pair.items()}
        for tensor in changed.values():
            if tensor.is_floating_point():
                tensor[1] = float("nan")

        def run(batch: Batch) -> Tensor:
            torch.set_rng_state(state)  # the same dropout masks each time
            with torch.no_grad():
                found = losses(module, batch)
            refuse_shape(found, 2)
            return found

        if not torch.allclose(run(pair)[0], run(changed)[0], rtol=1e-3, atol=1e-5, equal_nan=True):
            culprit = _first_to_mix(module, lambda: run(pair), lambda: run(changed))
            raise UserError(
                f"{culprit} mixes the records of a batch, so no record's gradient can be bounded; "
                "use a layer that treats every record by itself, such as nn.GroupNorm or nn.LayerNorm"
            )
        torch.set_rng_state(state)
        try:
            return Survey(*_trial(module, pair, losses, tape(pair)), None)
        except Unsupported as obstacle:
            whole = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
            return Survey(whole, 2 * whole, obstacle)


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

    with saved_tensors_hooks(count, lambda tensor: tensor), tape:
        found = losses(module, tape.batch)
    tape.finish(found)
    for tensor in tape.held:
        count(tensor)
    forms = tape.backward(found)
    return plain // 2, sum(form.bytes for form, _ in filter(None, forms)) // 2


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
        return all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-4) for a, b in zip(one, two, strict=True)
        )

    for (part, args, out), (_, other_args, other_out) in zip(*passes, strict=False):
        if same(args, other_args) and not same(out, other_out):
            return f"module {names[part]!r} ({type(part).__name__})"
    return "the loss function"
