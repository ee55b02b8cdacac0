"""What book-keeping holds at most while it clips, found without computing anything.

A model of tensors without memory goes through the very rules of clipping, which decide layer by layer what is
kept of each record until its clip factor is known, and whoever asked counts what lives. Nothing is proved
here, and no number comes out: a tape that asks fewer questions than the real one is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tacit.gradients.clipped import at_once
from tacit.gradients.functions import FREE
from tacit.gradients.marks import Mark, Spread
from tacit.gradients.plain import Batch, Losses, batch_size
from tacit.gradients.proof import Known
from tacit.gradients.records import Explicit, PerRecord, sum_by_record
from tacit.gradients.rules import RULES
from tacit.gradients.survey import Survey
from tacit.gradients.tape import Tape, tensors_in
from tacit.vector import Flat


class Sketch(Tape):
    """A tape for shapes: what a rule exists for goes by that rule, everything else as torch has it.

    A tensor that is made of parameters alone is a parameter to the rules, as on the real tape.
    """

    def __init__(self, parameters: Mapping[str, Tensor], batch: Batch, known: Known) -> None:
        super().__init__(parameters, batch, RULES, known)
        self._made: dict[int, Tensor] = {}
        """Tensors made of parameters alone, by id; kept, so that an id stays one's own."""
        self._spare: list[PerRecord] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [] if func in FREE else tensors_in((args, kwargs))
        mine = [self.owned(tensor) for tensor in tensors]
        if not any(mine):
            return func(*args, **kwargs)
        if all(mine):
            out = func(*args, **kwargs)
            self._made |= {id(tensor): tensor for tensor in tensors_in(out) if tensor.dim()}
            return out
        if func in RULES and torch.is_grad_enabled():
            return RULES[func](self, func, *args, **kwargs)
        return func(*args, **kwargs)

    def owned(self, tensor: object) -> bool:
        return id(tensor) in self._index or id(tensor) in self._made

    def is_data(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and not self.owned(tensor)

    def axis(self, tensor: Tensor) -> int:
        sizes = [place for place, size in enumerate(tensor.shape) if size == self.records]
        return sizes[0] if sizes else 0

    def check(self, tensor: Tensor, features: int = 1) -> None:
        pass

    def finish(self, losses: Tensor) -> None:
        pass

    def _expect(self, target: Tensor | None) -> Mark | None:
        if target is not None and id(target) in self._index:
            self._uses[self._index[id(target)]] += 1
        return None

    def spread(self, tensor: Tensor, shape: Sequence[int], axis: int) -> Tensor:
        self._expect(tensor)

        def found(grad: Tensor) -> None:
            own = [1 if place == axis else size for place, size in enumerate(shape)]
            own = own[len(own) - tensor.dim() :] if tensor.dim() < len(own) else own
            own = [min(pair) for pair in zip(own, tensor.shape, strict=True)]
            self.give(tensor, Explicit(sum_by_record(grad, own, self.records, axis)))

        out: Tensor = Spread.apply(self.anchor, tensor.detach(), shape, found)  # type: ignore[no-untyped-call]
        return out

    def give(self, target: Tensor, form: PerRecord) -> None:
        if id(target) in self._index:
            super().give(target, form)
        else:
            self._spare.append(form)


def survey(flat: Flat, pair: Batch, losses: Losses) -> Survey:
    """What a plain step and what book-keeping keep of one record; see `tacit.gradients.survey`."""
    model, tape = flat.module, _tape(flat, pair)
    seen = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *pair.values())}
    held: list[Tensor] = []

    def count(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in seen:
            seen.add(tensor.untyped_storage()._cdata)
            held.append(tensor)  # so that no other storage takes its name
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor), tape:
        found = losses(model, tape.batch)
    for tensor in tape.held:
        count(tensor)
    forms = tape.backward(found)
    kept = sum(form.bytes for form, _ in filter(None, forms))
    return Survey(sum(tensor.nbytes for tensor in held) // 2, kept // 2, None)


def affordable(flat: Flat, batch: Batch, losses: Losses) -> int:
    """Records that are clipped at a time."""
    size = batch_size(batch)
    if size < 2:
        return 1
    with torch.enable_grad():
        found = survey(flat, {name: tensor[:2] for name, tensor in batch.items()}, losses)
    return min(size, at_once(found, size))


def clip_records(flat: Flat, batch: Batch, losses: Losses) -> None:
    """All that is done for records that are clipped together, their sum added to the gradient's vector."""
    tape = _tape(flat, batch)
    with tape:
        values = losses(flat.module, tape.batch)
    forms = tape.backward(values)
    factors = flat.grad.new_ones(len(values))
    with torch.no_grad():
        for segment, form in zip(flat.layout.segments, forms, strict=True):
            if form is not None:
                form[0].add_weighted(factors, flat.grad[segment.slice].view(segment.shape))


def _tape(flat: Flat, batch: Batch) -> Sketch:
    parameters = dict(flat.module.named_parameters())
    named = {segment.name: parameters[segment.name] for segment in flat.layout.segments}
    return Sketch(named, batch, Known(nn.Module()))  # what is known matters to proofs alone
