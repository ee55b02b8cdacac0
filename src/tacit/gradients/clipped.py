"""Σ_j clip_C(g_j) for a batch, by book-keeping.

One forward pass and one backward pass for the gradients of layer outputs; per-record norms from those,
each layer by the cheaper route for its shapes; one weighted product per layer for the sum. Neither a second
backward pass nor, for large layers, a per-record gradient is ever made.

>>> import torch
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
>>> clipped = ClippedGradient(model)
>>> batch = {"x": torch.randn(5, 3), "y": torch.randn(5, 1)}
>>> def squared_errors(model, batch):
...     return (model(batch["x"]) - batch["y"]).square().sum(1)
>>> result = clipped(batch, squared_errors, 0.1)
>>> result.norms.shape, clipped.flat.grad.shape
(torch.Size([5]), torch.Size([41]))
>>> bool(clipped.flat.grad.norm() <= 5 * 0.1)
True
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.gradients import generators
from tacit.gradients.fallback import record_gradients
from tacit.gradients.modules import refuse_modules
from tacit.gradients.plain import Batch, Losses, batch_size, refuse_shape
from tacit.gradients.proof import Book, Draws, Known
from tacit.gradients.records import Explicit, PerRecord, in_full
from tacit.gradients.rules import RULES
from tacit.gradients.survey import Mixed, Sums, Survey, experiment, survey
from tacit.gradients.tape import Differs, Tape, Unsupported
from tacit.gradients.unchanged import Unchanged
from tacit.gradients.unseen import Unseen
from tacit.vector import Flat

log = logging.getLogger(__name__)

Group = tuple[Sequence[slice] | Sequence[int], float]
"""Segments of the layout, by their slices or their indices, and the bound on their joint norm."""
Bound = float | Sequence[Group]
"""C for all coordinates together, or one C for each group; groups cover every segment once."""

SAFE = 1 - 2.0**-20
"""Norms and factors are rounded; this keeps what is left of a record within C all the same."""
_PLAINLY: AbstractContextManager[None] = nullcontext()
_NO_HOOKS = "hooks on saved tensors"
LITTLE, MUCH = 64 * 2**20, 2 * 2**30
"""Bytes that a part of a batch may always keep, and never may, when the size of the parts is not given."""


@dataclass(frozen=True)
class ClippedResult:
    """What is known after a clipped gradient: private, like the records themselves."""

    norms: Tensor
    """Each record's gradient norm before clipping: [B], or [B, groups]."""
    loss_sum: Tensor
    """Sum of the losses of the records that took part."""
    dropped: int
    """Records whose gradient was not finite; they contribute zero."""


@dataclass(frozen=True)
class _Part:
    """Records of a batch that are computed together.

    One that is left over is computed twice and counts once: kernels for one record would round it in another
    way than those for several (see `steady`). For the same reason records that decide otherwise about what
    is computed go each with those that agree, and not all of them by the slow road.
    """

    places: Sequence[int]
    twice: bool
    """Whether a record is never alone."""
    obstacle: Unsupported | None
    """Why they must take the slow road, if they must."""

    def of(self, batch: Batch) -> Batch:
        rows: Any = slice(self.places[0], self.places[-1] + 1) if _in_a_row(self.places) else [*self.places]
        if self.twice and len(self.places) == 1:
            rows = [*self.places] * 2
        return {name: tensor[rows] for name, tensor in batch.items()}

    def split(self, groups: Sequence[Sequence[int]]) -> Iterator[_Part]:
        """Parts of these places in this part, the last one first."""
        for group in reversed(groups):
            yield replace(self, places=[self.places[i] for i in group])


def _in_a_row(places: Sequence[int]) -> bool:
    return len(places) == places[-1] - places[0] + 1


class ClippedGradient:
    """Clipped gradients of one model; a model that mixes records is refused, here or at first use."""

    flat: Flat

    def __init__(self, model: Flat | nn.Module, micro_batch: int | None = None) -> None:
        """`micro_batch`: records at a time; by default as many as fit in a fixed amount of memory."""
        if micro_batch is not None and micro_batch < 1:
            raise UserError(f"micro_batch is {micro_batch}; it counts records, so give 1 or more")
        self.flat = model if isinstance(model, Flat) else Flat(model)
        refuse_modules(self.flat.module, examples=True)
        self._micro_batch, self._device = micro_batch, self.flat.grad.device
        self._precondition: Tensor | None = None
        parameters = dict(self.flat.module.named_parameters())
        self._parameters = {s.name: parameters[s.name] for s in self.flat.layout.segments}
        for name, parameter in self._parameters.items():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UserError(
                    f"parameter {name!r} has a hook on its gradient, which no record's own passes; remove "
                    "it, and freeze by requires_grad_(False) or scale the loss"
                )
        self._unchanged, self._settled = Unchanged(self.flat.module), False
        self._turn: Sequence[int] | None = None
        self._looks, self._steps = True, 0
        self._surveys: dict[object, Survey] = {}
        self._known, self._book = Known(self.flat.module), Book()
        self._doubt = False
        self.obstacle: Unsupported | None = None
        """What made gradients be computed record by record, if anything did; for the person to read."""

    def begin(self, round: int) -> None:
        """Another client's gradients follow, in round 0, 1, 2, …

        What an earlier client's records put in doubt, or decided about what the model computes, is not held
        against this one, so that its bits do not depend on who came to the same worker before it.
        Experiments are made in rounds 1, 10, 100, … (counted from 1), at a client's own steps 1, 10, 100, …;
        by who never calls this, at all such steps.
        """
        self._doubt, self._looks, self._steps = False, _power_of_ten(round + 1), 0
        self._surveys = {key: found for key, found in self._surveys.items() if not found.decided}

    def __call__(
        self,
        batch: Batch,
        losses: Losses,
        bound: Bound,
        precondition: Tensor | None = None,
        turn: Sequence[int] | None = None,
    ) -> ClippedResult:
        """Fill `flat.grad` with Σ_j clip(g_j), g_j the gradient of record j's loss.

        A record's share has norm at most C, or at most C_g in each group. The sum does not depend on the
        size of the parts, nor on which records share a batch. `precondition` p: clip g_j ⊙ p instead of g_j,
        at the cost of every layer's explicit gradients. `turn`: one and the same object for all gradients of
        a client in a round, whose number is its first item; with another one, `begin` is called.
        """
        if turn is not None and turn is not self._turn:
            self._turn = turn
            self.begin(turn[0])
        self._precondition = precondition
        if not torch.is_grad_enabled():
            raise RuntimeError("gradients are switched off here; leave torch.no_grad before asking for some")
        groups, bounds = _groups(self.flat, bound)
        size = batch_size(batch)
        before, draws = self._unchanged.state(), Draws()
        total = self.flat.grad.zero_()
        norms, loss_sum, dropped = [total.new_zeros(0, len(bounds))], total.new_zeros(()), 0
        parts = self._parts(batch, size, losses)
        draws.save()
        order: list[int] = []
        while parts:
            part = parts.popleft()
            try:
                forms, values = self._per_record(part.of(batch), losses, part, draws)
            except Differs as differing:
                draws.forget()
                if len(differing.groups) == len(part.places):
                    self._tell(differing)
                parts.extendleft(part.split(differing.groups))
                continue
            real = len(part.places)
            order += part.places
            with torch.no_grad(), exactly(total.device.type):
                part_norms = _norms(forms, groups, total.new_zeros(len(bounds), len(values)))
                factors = (bounds.to(part_norms) * SAFE / part_norms).clamp_(max=1.0)
                factors[real:] = 0.0
                if not isfinite(part_norms.sum()):
                    kept = part_norms.isfinite().all(1)
                    factors = torch.where(kept.unsqueeze(1), factors, 0.0)
                    values = torch.where(kept, values, 0.0)
                    forms = [None if f is None else (f[0].keep(kept), f[1]) for f in forms]
                    dropped += int((~kept[:real]).sum())
                rows = factors.t().contiguous().unbind()
                for segment, group, form in zip(self.flat.layout.segments, groups, forms, strict=True):
                    if form is not None:
                        form[0].add_weighted(rows[group], total[segment.slice].view(segment.shape))
            norms.append(part_norms[:real])
            loss_sum = loss_sum + values[:real].sum()
            del forms  # before the next part needs the memory
        stands = self._test(batch, losses)
        self._unchanged.check(before)
        if not stands:
            return self(batch, losses, bound, precondition, turn)
        all_norms = torch.cat(norms)
        if order != list(range(size)):
            all_norms = all_norms[torch.tensor(order).argsort()]
        return ClippedResult(
            all_norms[:, 0] if isinstance(bound, (int, float)) else all_norms, loss_sum, dropped
        )

    def _parts(self, batch: Batch, size: int, losses: Losses) -> deque[_Part]:
        """Slices of the batch, cut by the model and the shapes alone, never by what was computed before."""
        if not size:
            return deque()
        found = self._survey(batch, losses)
        micro = self._micro_batch or at_once(found, max(2, size))
        count = size if self._doubt else -(-size // micro)
        edges = [size * i // count for i in range(count + 1)]  # of nearly equal sizes
        parts = (_Part(range(*edge), micro > 1, found.obstacle) for edge in pairwise(edges))
        return deque(parts)

    def _test(self, batch: Batch, losses: Losses) -> bool:
        """Whether the gradient stands: the second line behind the proof, an experiment now and then.

        If not, in this and all later ones of the client each record is computed with nothing but a copy of
        itself. Records with numbers that float32 cannot hold apart may fail an experiment by themselves, so
        nothing else may follow from it: by the same road, all other records have the same coins and the same
        bits as before. Nor is it logged. Only a model that also mixes records that are computed one after
        another is refused.
        """
        self._steps += 1
        if not (self._looks and _power_of_ten(self._steps)) or batch_size(batch) < 2:
            return True
        alone = self._doubt
        try:
            with exactly(self._device.type):
                if not alone:
                    try:
                        self._experiment(batch, losses, self._together, steadily=True)
                        return True
                    except Unsupported as reason:
                        alone = reason.alone
                self._experiment(batch, losses, partial(self._apart, alone), steadily=False)
        except Mixed:
            if alone:
                raise
            seen = "records that seemed to change each other's gradients, though nothing in sight mixes them"
            self._doubt, self.obstacle = True, self.obstacle or Unsupported(seen)
            self._steps -= 1  # this one is made, and looked at, again
            return False
        return True

    def _experiment(self, batch: Batch, losses: Losses, sums: Sums, steadily: bool) -> None:
        experiment(self.flat.module, self._parameters, batch, losses, sums, steadily)

    def _apart(self, alone: bool, few: Batch, losses: Losses) -> tuple[list[Tensor | None], Tensor]:
        """The sums of gradients of a few records computed one by one, and their losses."""
        grads, values = record_gradients(self.flat.module, self._parameters, few, losses, lambda: None, alone)
        return [each.sum(0) for each in grads.values()], values

    def _together(self, few: Batch, losses: Losses) -> tuple[list[Tensor | None], Tensor]:
        """The same by book-keeping."""
        draws = Draws()
        draws.save()
        tape, values = self._proved(few, losses, draws)
        forms, values = tape.backward(values), values.detach()
        sums: list[Tensor | None] = []
        for form, parameter in zip(forms, self._parameters.values(), strict=True):
            total = None if form is None else in_full(torch.zeros_like(parameter.detach()))
            if form is not None and total is not None:
                form[0].add_weighted(total.new_ones(len(values)), total)
            sums.append(total)
        return sums, values

    def _survey(self, batch: Batch, losses: Losses) -> Survey:
        module = self.flat.module
        shapes = tuple((name, tensor.shape[1:], tensor.dtype) for name, tensor in batch.items())
        key = (shapes, module.training, torch.is_autocast_enabled(self._device.type))
        if key not in self._surveys:
            pair = {name: tensor[:2] if len(tensor) > 1 else tensor[[0, 0]] for name, tensor in batch.items()}
            self._known.add(losses)
            before = self._unchanged.contents(attributes=False)
            try:
                self._surveys[key] = survey(module, pair, losses, self._tape)
            finally:
                self._unchanged.check_contents(before, attributes=False)
        return self._surveys[key]

    def _per_record(
        self, batch: Batch, losses: Losses, part: _Part, draws: Draws
    ) -> tuple[list[tuple[PerRecord, Tensor] | None], Tensor]:
        """Each segment's per-record gradients with their squared norms, and the losses. Raises `Differs` for
        several records that decide otherwise about what is computed.
        """
        obstacle = part.obstacle
        if obstacle is None:
            try:
                tape, values = self._proved(batch, losses, draws)
                with exactly(values.device.type):
                    return self._preconditioned(tape.backward(values)), values.detach()
            except Unsupported as reason:
                if isinstance(reason, Differs) and len(part.places) > 1:
                    raise
                obstacle = reason
                draws.forget()
        self._tell(obstacle)
        grads, values = self._one_by_one(batch, losses, obstacle, draws)
        explicit = [Explicit(grads[name].contiguous()) for name in self._parameters]
        return self._preconditioned([(form, form.squares()) for form in explicit]), values

    def _one_by_one(
        self, batch: Batch, losses: Losses, obstacle: Unsupported, draws: Draws
    ) -> tuple[dict[str, Tensor], Tensor]:
        """By the slow road, with the model's contents the same before and after."""
        module = self.flat.module
        if not self._settled:
            # What a model makes on its first call and keeps (a table of positions) is made now.
            with generators.forked(self._device), torch.no_grad():
                losses(module, {name: tensor[:1] for name, tensor in batch.items()})
            self._settled = True
        draws.begun = True
        before = self._unchanged.contents()
        alone = obstacle.alone or self._doubt
        found = record_gradients(module, self._parameters, batch, losses, draws.restore, alone)
        self._unchanged.check_contents(before)
        return found

    def _tape(self, batch: Batch, draws: Draws | None = None, replay: bool = False) -> Tape:
        return Tape(self._parameters, batch, RULES, self._known, self._book, draws, replay)

    def _proved(self, batch: Batch, losses: Losses, draws: Draws) -> tuple[Tape, Tensor]:
        """A forward pass of which every operation was shown to keep records apart; else `Unsupported`."""
        size, book, module = batch_size(batch), self._book, self.flat.module
        self._known.add(losses)
        book.tidy()
        autocast = torch.is_autocast_enabled(self._device.type)
        kind = (size, module.training, autocast, *(t.shape for t in batch.values()))
        if draws.begun:
            draws.restore()
        draws.begun = True
        tape = self._tape(batch, draws)
        try:
            with torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS), tape:
                values = losses(module, tape.batch)
        except Exception as error:
            tape.say_again()  # a model, or what is between it and us, may have made another error of it
            if str(error).startswith(_NO_HOOKS):
                raise Unsupported("a model that changes what autograd saves", alone=True) from None
            raise
        if not isinstance(values, Tensor):
            raise UserError(f"losses returned a {type(values).__name__}; return a tensor of one each")
        refuse_shape(values, size)
        tape.finish(values)
        program = (kind, *tape.program)
        if program not in book.compared:
            book.compared[program] = self._compared(batch, losses, tape.program, draws)
        draws.share(tape.paths, tape.drawn, book.compared[program])
        return tape, values

    def _compared(self, batch: Batch, losses: Losses, program: Sequence[int], draws: Draws) -> list[bool]:
        """Run the model on another number of records with the same draws, and compare what it did."""
        size = batch_size(batch)
        other = 3 if size == 2 else 2
        chosen = torch.arange(other, device=next(iter(batch.values())).device) % size
        after = Draws()
        after.save()
        with generators.forked(self._device):
            generators.seed_unlike_any(self._device)
            tape = self._tape({name: tensor[chosen] for name, tensor in batch.items()}, draws, replay=True)
            unseen = Unseen(tape)
            draws.restore()
            try:
                with torch.autograd.graph.saved_tensors_hooks(_forgotten, _forgotten), unseen, tape:
                    values = losses(self.flat.module, tape.batch)
                refuse_shape(values, other)
                tape.finish(values)
            except Differs as obstacle:
                raise Unsupported("random numbers that decide what is computed") from obstacle
            except (RuntimeError, ValueError, IndexError, TypeError, SystemError) as error:
                tape.say_again()
                raise Unsupported(f"{other} records instead of {size} ({str(error)[:80]})") from error
            finally:
                after.restore()
        return self._book.compare(program, size, tape.program, other)

    def _preconditioned(
        self, forms: list[tuple[PerRecord, Tensor] | None]
    ) -> list[tuple[PerRecord, Tensor] | None]:
        if self._precondition is None:
            return forms
        scaled: list[tuple[PerRecord, Tensor] | None] = []
        for segment, form in zip(self.flat.layout.segments, forms, strict=True):
            if form is None:
                scaled.append(None)
                continue
            scale = self._precondition[segment.slice].view(segment.shape)
            explicit = Explicit(form[0].explicit() * scale)
            scaled.append((explicit, explicit.squares()))
        return scaled

    def _tell(self, obstacle: Unsupported) -> None:
        if self.obstacle is None:
            log.warning("clipped gradients are computed record by record, which is slow: %s", obstacle)
            self.obstacle = obstacle


def _power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"


def _forgotten(saved: object) -> Any:
    """What autograd need not keep of a pass that no backward pass follows, while another's is all there."""


def exactly(device: str) -> AbstractContextManager[None]:
    """Without autocast: norms and sums are taken in float32."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _PLAINLY


def _groups(flat: Flat, bound: Bound) -> tuple[list[int], Tensor]:
    """Each segment's group, and each group's bound."""
    segments = flat.layout.segments
    if isinstance(bound, (int, float)):
        groups, bounds = [0] * len(segments), [float(bound)]
    else:
        offsets = {s.offset: i for i, s in enumerate(segments)}
        groups, bounds = [-1] * len(segments), [float(c) for _, c in bound]
        for g, (members, _) in enumerate(bound):
            for member in members:
                i = offsets.get(member.start, -1) if isinstance(member, slice) else member
                if i < 0 or (isinstance(member, slice) and segments[i].slice != member) or groups[i] >= 0:
                    raise ValueError(f"group {g}: {member} is not a whole segment, or is in two groups")
                groups[i] = g
        if -1 in groups:
            raise ValueError(f"no group bounds {segments[groups.index(-1)].name}; cover every segment")
    if not all(0 < c <= inf for c in bounds):
        raise ValueError(f"a clipping bound is a positive number, got {bounds}")
    return groups, torch.tensor(bounds, dtype=torch.float64)


def _norms(
    forms: Sequence[tuple[PerRecord, Tensor] | None], groups: Sequence[int], squares: Tensor
) -> Tensor:
    """Per-record norms of each group, [B, groups]; `squares` [groups, B] is zero before."""
    members = [group for group, form in zip(groups, forms, strict=True) if form is not None]
    found = [form[1] for form in forms if form is not None]
    if found and len(squares) == 1:
        squares = torch.stack(found).to(squares).sum(0, keepdim=True)
    elif found:
        squares.index_add_(0, torch.tensor(members, device=squares.device), torch.stack(found).to(squares))
    return squares.sqrt_().t()


def at_once(found: Survey, size: int) -> int:
    """As many records as book-keeping can hold in about the memory of a plain step on all `size` of them.

    Activations go as the gradients to be kept come: at no time are both there in full. Where one record is
    computed after another anyway, one at a time takes the least memory and no more time. Whether records are
    ever alone is no matter of `size`: kernels round a record in another way then (see `steady`), and one more
    of them would have a say in all others' bits.
    """
    if found.obstacle is not None and found.obstacle.alone:
        return 1
    limit, each = min(MUCH, max(LITTLE, size * found.plain * 5 // 4)), max(1, found.plain, found.kept)
    return max(2 if 2 * each <= MUCH else 1, limit // each)
