"""How much memory a worker and the server need, estimated before anything is trained.

The real model is never allocated. The estimate comes from tensor sizes and two small measurements:

- *vectors*: the algorithm, with its bounding and its state, trains one client of a small network on the same
  kind of job, while every tensor that is created or freed is counted. This gives the number of vectors of the
  model's length that a worker holds, while it computes a gradient and at most. These vectors grow in
  proportion to the model.
- *activations*: one step of the real network on the shapes of a real batch, with torch's fake tensors (for
  accelerators: on torch's `meta` device), which have shapes but no memory. Everything created or freed is
  counted again, including the backward pass, and the book-keeping where gradients are clipped
  (`gradients.sketch`).

The count covers what is in use at once. A host's C library keeps freed memory between blocks in use, so a
process may be larger by up to the size of its activations (measured: see docs/scale.md).

>>> with Live() as live:
...     x = torch.zeros(1000)
...     y = x + 1
...     del x
>>> live.now, live.peak
(4000, 8000)
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tacit.data import ArrayRecords, Batch, Population
from tacit.engine.contract import Order, Participant
from tacit.engine.device import Compute, forget_activations
from tacit.engine.inprocess import InProcess
from tacit.engine.isolation import KEPT
from tacit.engine.states import ClientStates
from tacit.engine.worker import Job, one_at_a_time
from tacit.gradients.axes.call import Unsupported
from tacit.gradients.clipped import LITTLE, MUCH
from tacit.gradients.plain import Descent, Losses, batch_size, plain_gradient
from tacit.gradients.sketch import affordable, clip_records
from tacit.privacy import ClientLevel, ExampleLevel, LayeredNoise, Mechanism
from tacit.vector import Flat, Vectors

SMALL = 1024
"""Rows and columns of the matrix that is the small network: so large that its activations are negligible
beside it.
"""

_READ = torch.ops.aten._local_scalar_dense.default
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_UNIQUE = torch.ops.aten._unique2.default
_CTC = (torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss_backward.Tensor)


def _ctc(func: Any, *args: Any) -> Any:
    """The output shapes of CTC's kernels: torch has no rule for tensors without memory."""
    forward = func is _CTC[0]
    scores, targets = args[0 if forward else 1], args[1 if forward else 2]
    if not (scores.is_meta or isinstance(scores, FakeTensor)):
        return func(*args)
    if not forward:
        return torch.empty_like(scores)
    steps, records = scores.shape[:2]
    return scores.new_empty(records), scores.new_empty(records, steps, 2 * targets.shape[-1] + 1)


def _unique(func: Any, values: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """Treat every value as distinct, since there are no values to compare."""
    if not (values.is_meta or isinstance(values, FakeTensor)):
        return func(values, *rest, **kwargs)
    return values.new_empty(values.numel()), torch.empty_like(values), values.new_empty(0)


def _reordered(func: Any, args: Any, out: Any) -> int:
    """Bytes that a CPU convolution holds besides its result. It computes in a memory layout of its own, so
    its inputs and outputs exist twice for a while. As measured with oneDNN, see docs/scale.md.
    """
    if func is _CONVOLUTION:
        x, w = args[0].nbytes, args[1].nbytes
        return int(max(x + w, out.nbytes))
    g, x, w = (tensor.nbytes for tensor in args[:3])
    strided = any(step > 1 for step in args[4])
    made = [0 if found is None else int(found.nbytes) for found in out]
    data = max(g + x + w, (3 if strided else 2) * x) if made[0] else 0
    weight = made[0] + max(g + x + w, 2 * w) if made[1] else 0
    return int(max(0, data - sum(made), weight - sum(made)))


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are created inside this context, for as long as each lives.

    `reordered`: also count the copies that CPU convolutions make of their inputs and outputs, in a memory
    layout of their own.
    """

    def __init__(self, reordered: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self._seen: dict[int, Any] = {}
        self._reordered = reordered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, Tensor):
                self._note(value, made=False)
        if func is _READ and (args[0].is_meta or isinstance(args[0], FakeTensor)):
            # A model that branches on its data (is any token masked?) should take the branch that needs more.
            return torch.zeros((), dtype=args[0].dtype).item()
        if func in _CTC:
            out = _ctc(func, *args)
        elif func is _UNIQUE:
            out = _unique(func, *args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._note(value, made=True)
        if self._reordered and func in (_CONVOLUTION, _CONVOLUTION_BACKWARD):
            self.peak = max(self.peak, self.now + _reordered(func, args, out))
        return out

    def _note(self, tensor: Tensor, made: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes() if made else 0  # what existed before is not counted
        self._seen[key] = weakref.finalize(storage, self._gone, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self.now -= size


@dataclass(frozen=True)
class Held:
    """Vectors of the model's length (as float32) that a worker holds."""

    during: float
    """While it computes a gradient, besides the parameters and their gradient."""
    most: float
    """At most, when the update is bounded and added."""
    descends: bool
    """Whether steps avoid writing the gradient down as one vector."""


@dataclass(frozen=True)
class Need:
    """Bytes by part. `peak` is what is needed at once; it may be less than their sum."""

    parts: Mapping[str, int]
    peak: int


class _Noting:
    """A task that records the memory held whenever its losses are computed.

    The record is kept on the class, because whatever a job's object keeps is reset before the next client.
    """

    live: Live
    held: int

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        _Noting.held = max(_Noting.held, _Noting.live.now)
        found: Tensor = model(batch["x"]).square().mean(1)
        return found

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {}

    def summarise(self, sums: Mapping[str, float]) -> dict[str, float]:
        return dict(sums)


def _nameless(privacy: Mechanism | None) -> ClientLevel | None:
    """How clients bound uploads, for a network whose layers have other names; None at example level."""
    if not isinstance(privacy, ClientLevel):
        return None
    clip = replace(privacy.clip, weights={})
    if isinstance(privacy, LayeredNoise):
        return ClientLevel(privacy.noise, privacy.delta, clip, privacy.sampling, entropy=privacy.entropy)
    return replace(privacy, clip=clip)


def small_job(job: Job, states: ClientStates) -> Job:
    """The job with a small network in place of its own, and with records and a task to match."""
    x = np.ones((4, SMALL), np.float32)
    records = ArrayRecords(x, np.zeros(4, np.int64))
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Linear(SMALL, SMALL, bias=False))
    algorithm, public = job.algorithm, job.public[:0] if not len(job.public) else np.arange(4)
    if algorithm.personal_part:
        layers = {"body": nn.Linear(SMALL, SMALL, bias=False), "head": nn.Linear(SMALL, 4, bias=False)}
        model = nn.Sequential(OrderedDict(layers))
    return replace(
        job, model=model, task=_Noting(), population=Population(records, np.array([0, 4]), np.arange(4)),
        test=records, algorithm=algorithm, states=states, probe=np.empty(0, np.int64), public=public,
        augment=None, local=replace(job.local, batch=4, steps=2, epochs=None, seconds=None),
        privacy=_nameless(job.privacy), layers=False,
    )  # fmt: skip


def one_client(small: Job, order: Order, examples: bool) -> Held:
    """Train one client of a small job and count what it holds; `examples`: with private gradients."""
    live = Live()
    _Noting.live, _Noting.held = live, 0
    algorithm = small.algorithm
    size = 4 * small.layout.size
    theta = torch.zeros(small.layout.shared)
    message = algorithm.message(algorithm.init(theta, small.layout))
    with live:
        engine = InProcess(small)
        descent = engine.worker.descent
        bounding = None
        if small.privacy is not None:
            bounding = small.privacy.bounding(
                small.privacy.init(), small.upload_sizes, small.layout, order.steps or 1
            )
        engine.sum(replace(order, bounding=bounding), message, [Participant(0)])
        engine.close()
    descended = descent is not None and descent.used and not examples
    # The parameters are counted separately. The gradient is a NumPy array, so it was not counted here.
    return Held((_Noting.held - size) / size, (live.peak - size) / size, descended)


def peak_of(work: Callable[[], object], compute: Compute) -> int:
    """The most memory that `work` adds to what exists before; nothing is really computed."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=compute.precision == "bf16")
    with Live(reordered=compute.here) as live, torch.enable_grad(), autocast:
        work()
    return int(live.peak)


def step_bytes(flat: Flat, batch: Batch, losses: Losses, compute: Compute, descends: bool) -> int:
    """The most memory that one plain step on `batch` adds."""
    if descends:
        return peak_of(lambda: Descent(flat)(batch, losses, 0.0), compute)
    return peak_of(lambda: plain_gradient(flat, batch, losses), compute)


def pretend(model: nn.Module, mode: FakeTensorMode) -> None:
    """Make the tensors of a model on the `meta` device pass for host tensors, in place and still without
    memory. torch's autocast does nothing on `meta`.
    """
    known: dict[int, Any] = {}

    def there(tensor: Tensor) -> Tensor:
        fake = mode.fake_tensor_converter.from_meta_and_device(mode, tensor.detach(), torch.device("cpu"))
        trained = isinstance(tensor, nn.Parameter)
        return nn.Parameter(fake, tensor.requires_grad) if trained else fake

    for part in model.modules():
        registers: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in registers:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = known.setdefault(id(tensor), there(tensor))


def clipped_bytes(flat: Flat, batch: Batch, losses: Losses, compute: Compute, one: int) -> int:
    """The most memory that a clipped gradient of `batch` adds; `one`: what a plain step on a single record
    adds.

    Batches are cut into parts that fit in the room of a plain step, or into single records. The experiment of
    the first step holds the gradients of up to three records, plus one more, where gradients are computed
    record by record. Otherwise it holds their sum and what is kept of three records, and then two sums; see
    `tacit.gradients`.
    """
    records, trained = batch_size(batch), 4 * flat.values.numel()
    rest = max(0, one - trained)
    if compute.activation_checkpointing:
        return rest + (1 + min(records, 3)) * trained

    try:
        parts = 1
        if not one_at_a_time(flat.module, compute):
            with Live():  # it answers questions that a tensor without memory cannot
                parts = affordable(flat, batch, losses)
        most, few = (
            peak_of(partial(clip_records, flat, _first(batch, size), losses), compute)
            for size in (-(-records // -(-records // parts)), min(3, records))
        )
    except (
        Unsupported,
        RuntimeError,
        TypeError,
    ):  # a model that reads its data, or uses it in a way without a rule
        plain = step_bytes(flat, batch, losses, compute, descends=False)
        most, few = max(one, min(MUCH, max(LITTLE, plain * 5 // 4), 2 * plain)), one
    return max(most, trained + few, 2 * trained + rest) if records > 1 else most


def _first(batch: Batch, size: int) -> Batch:
    return {name: tensor[:size] for name, tensor in batch.items()}


def parameter_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the trained parameters (as float32), and of frozen ones and buffers (as they are)."""
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    return trained, frozen + sum(b.nbytes for b in model.buffers())


def activation_bytes(model: nn.Module, batch: Batch, job: Job, compute: Compute, descends: bool) -> int:
    """The most memory that a step adds, whatever kind of gradient it uses. Consumes `model`."""
    flat, losses = Flat(model), job.task.losses
    if compute.activation_checkpointing:
        forget_activations(model)
    there = {name: torch.empty_like(tensor, device=flat.values.device) for name, tensor in batch.items()}
    if not isinstance(job.privacy, ExampleLevel):
        return step_bytes(flat, there, losses, compute, descends)
    one = step_bytes(flat, _first(there, 1), losses, compute, descends)
    return clipped_bytes(flat, there, losses, compute, one)


def worker_need(model: nn.Module, batch: Batch, job: Job, compute: Compute, vectors: Held) -> Need:
    """The memory of one worker, for a step on `batch`. `model` is on the `meta` device, and is consumed."""
    trained, frozen = parameter_bytes(model)
    activations: int | None = None
    if compute.here or compute.precision == "bf16":
        # Kernels are chosen by device: on `meta`, attention and dropout differ from the host's.
        here, fake = deepcopy(model), FakeTensorMode(allow_non_fake_inputs=True)
        pretend(here, fake)
        with suppress(RuntimeError), fake:  # some losses read their data (CTC its lengths)
            activations = activation_bytes(here, batch, job, compute, vectors.descends)
    if activations is None:
        activations = activation_bytes(model, batch, job, compute, vectors.descends)
    noise = 8 * trained // 4 if isinstance(job.privacy, ExampleLevel) and not compute.here else 0
    during, most = int(vectors.during * trained), int(vectors.most * trained)
    # On the host, the pages of a gradient that is never written are never allocated.
    gradient = 0 if vectors.descends and compute.here else trained
    # Part of what no client may change is kept as a copy.
    base = trained + gradient + frozen + min(frozen, KEPT)
    parts = {
        "parameters": trained,
        "frozen parameters": frozen,
        "gradient": gradient,
        "message, updates and sums": max(during, most),
        "activations": activations,
        "noise": noise,
    }
    return Need(parts, base + max(during + activations + noise, most))


def server_need(
    job: Job, state: Vectors, message: Vectors, optimizer: int, noise: int, held: float, slots: int
) -> Need:
    """The memory of the process that holds the server: vectors by purpose.

    `held`: vectors of the model's length that the server creates in a round, counted on a small server;
    `slots`: sums that worker processes have ready for it.
    """
    trained, frozen = parameter_bytes(job.model)
    sums = job.sum_dtype.itemsize * sum(job.upload_sizes.values())
    sent = 4 * sum(v.numel() for v in message.values())
    parts = {
        "parameters": trained,
        "frozen parameters": frozen,
        "state": 4 * sum(v.numel() for v in state.values()),
        "optimizer": optimizer,
        "message": sent,
        "sums": (1 + slots) * sums,
        "mean update": 4 * sum(job.upload_sizes.values()),
        "noise": noise,
    }
    return Need(parts, trained + frozen + sent + noise + slots * sums + int(held * trained))
