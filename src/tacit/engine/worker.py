"""One resident model that trains for one client after another.

A worker never holds two models and never a list of uploads: it loads the message, runs the algorithm's
client part, adds the upload to a running sum, and goes on to the next client.
"""

from __future__ import annotations

import itertools
import math
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tacit import randomness
from tacit.data import Records, batches
from tacit.data.records import Timed
from tacit.engine.allocator import keep_freed_memory, return_freed_memory
from tacit.engine.contract import Order, Participant, Report, Tune
from tacit.engine.csprng import SecretPlaces, csprng, own_generators, refresh_generator, seed_generators
from tacit.engine.device import HOST, Compute
from tacit.engine.front import Front
from tacit.engine.guard import Shown, received, refuse_no_state
from tacit.engine.isolation import Pristine
from tacit.engine.job import TEST_CHUNK, Job, add_sums
from tacit.engine.local import Gradients, PlainGradients, PrivateGradients, nothing
from tacit.engine.settings import Local
from tacit.engine.states import version
from tacit.engine.work import LocalWork, mean_loss
from tacit.errors import ClientError, UserError
from tacit.gradients import ClippedGradient, plain_gradient
from tacit.gradients.plain import Descent
from tacit.privacy import ExampleLevel, SecureSum
from tacit.tasks import Task
from tacit.vector import Flat, Vectors

__all__ = [
    "Job",
    "Worker",
    "add_sums",
    "evaluate",
    "one_at_a_time",
]


def one_at_a_time(model: nn.Module, compute: Compute) -> bool:
    """Whether clipped gradients are taken of one record at a time.

    In bfloat16 even the number of records beside it may round a record's gradient in another way.
    """
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return half or compute.precision == "bf16"


class Worker:
    """Runs clients on one resident model."""

    def __init__(self, job: Job, compute: Compute = HOST) -> None:
        # Who has activations computed twice would rather have less memory than less time.
        (return_freed_memory if compute.activation_checkpointing else keep_freed_memory)()
        self.job, self.compute = job, compute
        self.flat = Flat(compute.place(job.model, job.privacy is not None), job.algorithm.personal_part)
        self._initial_personal = self.flat.personal.clone()
        example_level = isinstance(job.privacy, ExampleLevel)
        alone = 1 if one_at_a_time(self.flat.module, compute) else None
        self._clipped = ClippedGradient(self.flat, alone) if example_level else None
        self.descent = None if example_level else Descent(self.flat)
        self._bits = np.random.PCG64(0)
        self.flat.module.train()
        flat = self.flat
        roots = {"model": flat.module, "task": job.task}
        self._model = Pristine(roots, overwritten=(flat.values, flat.grad, flat.buffers))
        # Records that are changed at random are new ones every time.
        changed = job.augment is not None
        records, protected = job.population.records, job.privacy is not None
        front = None if changed else Front.of(flat.module, job.task, records, compute, protected)
        self._front = None if front is None else front.continued()
        self._task: Task = job.task if self._front is None else self._front.task
        self._model.restore()  # a trial leaves nothing to the clients
        # An algorithm has only what clients send: its own to keep, unless clients are what is protected.
        protected = job.privacy is not None and not example_level
        self._algorithm = Pristine({"algorithm": job.algorithm} if protected else {})
        if job.privacy is not None:
            self._model.watch_large()

    def sum(
        self, order: Order, message: Vectors | Shown, shard: Sequence[Participant], into: Vectors
    ) -> list[Report]:
        """Train a shard's clients in turn and leave the weighted sum of their uploads in `into`.

        Clients never get the vectors of `message` themselves: see `tacit.engine.guard`. A `Shown` message is
        on this worker's device. Sums that are wanted on the host are copied there when the shard is done.
        """
        for total in into.values():
            total.zero_()
        shown = message if isinstance(message, Shown) else Shown.copy_of(self.compute.vectors(message))
        there = any(str(total.device) != self._sums_device for total in into.values())
        wanted, into = into, self._sums if there else into
        for total in into.values() if there else ():
            total.zero_()
        with csprng() if self._secret_randomness else own_generators() if self._claims else nullcontext():
            reports = [self._train(order, shown, participant, into) for participant in shard]
        if self.job.privacy is not None:
            self._model.refuse_large_changes()
        for name, total in wanted.items() if there else ():
            total.copy_(into[name])
        return reports

    @cached_property
    def _sums(self) -> Vectors:
        return self.job.empty_sums(self.compute.sums)

    @cached_property
    def _sums_device(self) -> str:
        return str(torch.empty(0, device=self.compute.sums).device)

    @torch.no_grad()
    def _train(self, order: Order, shown: Shown, participant: Participant, into: Vectors) -> Report:
        start = time.perf_counter()
        job, flat, client, message = self.job, self.flat, participant.client, shown.message
        self.load(message)
        self._seed(order, client)
        own = job.population.train(client)
        losses: list[Tensor] = []
        work = LocalWork(
            flat,
            self._task,
            job.population.records,
            own,
            job.local,
            self._gradients(order, client, own),
            order,
            self._initial_personal,
            queries=sys.maxsize if self._clipped is None else job.algorithm.queries,
            public=self._public(order, client),
            descent=self.descent,
            layers=job.layers,
            augment=self._augment(order, client),
            losses=losses,
            compute=self.compute,
            front=self._front,
        )
        try:
            answer = job.algorithm.client(
                message, self.compute.vectors(job.states.load(client, participant.state)), work
            )
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise TypeError(
                    f"{type(job.algorithm).__name__}.client returned a {type(answer).__name__}; return two "
                    "dictionaries, of what is sent and of what the client keeps"
                )
            sent, state = answer
            shown.refuse_if_written()
            refuse_no_state(state)
            if state and not job.algorithm.keeps_state and job.privacy and job.privacy.forgetful_clients:
                raise UserError(
                    f"{type(job.algorithm).__name__} keeps state at its clients, and for cohorts of a fixed "
                    "size no ε is proved then; set cohort.sampling to poisson, and keeps_state to True"
                )
            upload = received(sent, job.uploads)
        except Exception as error:
            where = f"client {client}, round {order.round + 1}, step {work.count}"
            if isinstance(error, UserError):  # it says itself what to do
                raise UserError(f"{where}: {error}") from error
            raise ClientError(f"{where}: {type(error).__name__}: {error}") from error
        upload |= {name: live for name, live in flat.named_buffers.items() if name in into}
        layers = job.layout.layer_norms(upload["delta"]).tolist() if job.layers else None
        upload = {name: vector.to(self.compute.sums) for name, vector in upload.items()}
        clipped: list[float] | None = None
        if job.layers and order.bounding is not None:
            clipped = job.layout.layer_norms(order.bounding.bound.apply(upload)[0]["delta"]).tolist()
        norm, weight = self._add(order, client, upload, into, work.examples)
        finite = math.isfinite(norm)
        kept = None
        # Under masks nobody may see that a client added nothing: it writes again what it had.
        if state and (finite or isinstance(job.privacy, SecureSum)):
            kept = version(order.round, order.attempt, participant.replay)
            keep = self.compute.host(state) if finite else job.states.load(client, participant.state)
            job.states.save(client, kept, keep)
        return Report(
            client=client,
            weight=weight,
            examples=work.examples,
            steps=work.count,
            loss=mean_loss(losses),
            norm=norm,
            finite=finite,
            state=kept,
            notes=work.notes,
            seconds=time.perf_counter() - start,
            layers=layers,
            gradient_layers=work.gradient_layers,
            clipped_layers=clipped,
        )

    def forget(self) -> None:
        """Whatever clients left in the model and the task (and the algorithm, under a guarantee for clients),
        as it was at first.
        """
        self._model.restore()
        self._algorithm.restore()

    @property
    def _secret_randomness(self) -> bool:
        """Under a guarantee for examples, what a client draws for its records must stay unknown."""
        privacy = self.job.privacy
        return self._clipped is not None and privacy is not None and not privacy.simulated

    @property
    def _claims(self) -> bool:
        """Whether anything is guaranteed, so that what is drawn must be fresh."""
        privacy = self.job.privacy
        return privacy is not None and privacy.noise > 0 and not privacy.simulated

    def _key(self, purpose: str, order: Order, client: int) -> int:
        """128 bits for what a client draws in a round: named by both, but fresh ones under a guarantee.

        A client's number, and the place of its records, depend on who else is there. With named draws one
        client less would give all those after it other batches and masks, and move each of their updates;
        fresh ones are the same whoever is there, in distribution, so that one client moves the sum by its
        own upload alone.
        """
        if self._claims:
            return secrets.randbits(128)
        return randomness.key(self.job.seed, purpose, order.round, client)

    def _seed(self, order: Order, client: int) -> None:
        """Seed torch for one client (dropout), and under a guarantee whatever else a model may draw from, so
        that nothing goes on where the client before it stopped.
        """
        if self._claims:
            seed_generators()
        if self._secret_randomness:
            refresh_generator()
            return
        seed = self._key("client", order, client) & (2**63 - 1)
        if self.flat.values.device.type == "cpu":
            # torch.manual_seed would also queue a call, with a stack trace, for every accelerator that this
            # process never uses: a third of a small client's time, and a list that grows for ever.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def _gradients(self, order: Order, client: int, own: NDArray[np.int64]) -> Gradients:
        job = self.job
        if self._clipped is None:
            shuffler, durations = self._shuffler(order, client), self._durations(own)
            return PlainGradients(job.local, shuffler, job.algorithm.batches, durations)
        assert isinstance(job.privacy, ExampleLevel)
        return PrivateGradients(
            job.privacy.queries(len(own), job.workload, job.seed, order.round, order.attempt, client),
            self._clipped,
            turn=(order.round, client),
            model=self._model,
            masks=refresh_generator if self._secret_randomness else nothing,
        )

    def _durations(self, own: NDArray[np.int64]) -> NDArray[Any] | None:
        records = self.job.population.records
        if self.job.local.seconds is None or not isinstance(records, Timed):
            return None
        durations: NDArray[Any] = records.seconds[own]
        return durations

    def _shuffler(self, order: Order, client: int) -> np.random.Generator:
        """A generator for one client in one round; the last one given before it is no longer to be used.

        A key is a hash already. To put it straight into a resident generator spares a small client the
        twentieth of its time that a new one, with a hash of NumPy's own, would take.
        """
        key = self._key("batches", order, client)
        # `has_uint32`: half a draw may be left over from the client before; it goes with the rest.
        state: Any = {
            "bit_generator": "PCG64",
            "state": {"state": key, "inc": 1},
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._bits.state = state
        return np.random.Generator(self._bits)

    def _augment(self, order: Order, client: int) -> batches.Change | None:
        if self.job.augment is None:
            return None
        if self._secret_randomness:
            return partial(self.job.augment, key=SecretPlaces())
        return partial(self.job.augment, key=self._key("augment", order, client))

    def _public(self, order: Order, client: int) -> Iterator[NDArray[np.int64]] | None:
        public = self.job.public
        if not len(public):
            return None
        rng = np.random.default_rng(self._key("public", order, client))
        size = min(self.job.local.batch, len(public))
        return (rng.choice(public, size, replace=False) for _ in itertools.count())

    def _add(
        self, order: Order, client: int, upload: Vectors, into: Vectors, examples: int
    ) -> tuple[float, float]:
        """Add a client's upload to the sums; its norm before any bound, and its weight (0: left out)."""
        if order.bounding is not None:
            assert self.job.privacy is not None
            named = (self.job.seed, order.round, order.attempt, client, 1)
            bits = self.job.privacy.bits(*named) if order.bounding.share else None
            norm = order.bounding.add_(upload, into, bits)
            return norm, 1.0 if math.isfinite(norm) else 0.0
        norm = math.sqrt(sum(float(torch.linalg.vector_norm(v.float())) ** 2 for v in upload.values()))
        weight = (float(examples) if order.weighted else 1.0) if math.isfinite(norm) else 0.0
        if weight:
            for name, vector in upload.items():
                into[name].add_(vector, alpha=weight)
        return norm, weight

    def load(self, message: Vectors, personal: Tensor | None = None) -> None:
        """Put the server's model (and a client's personal part) into the resident model, and nothing else:
        what others left there is gone.
        """
        flat = self.flat
        self.forget()
        flat.shared.copy_(message["theta"])
        flat.personal.copy_(self._initial_personal if personal is None else personal)
        flat.load_buffers(message)
        if bool(flat.grad.any()):  # asked first: a gradient that nobody fills takes no memory
            flat.grad.zero_()

    def evaluate_chunk(self, chunk: int) -> dict[str, float]:
        """Sums of the task's metrics over one chunk of the common test set, or of the probe; call `load`
        first.
        """
        job = self.job
        if chunk >= job.test_chunks:
            start = (chunk - job.test_chunks) * TEST_CHUNK
            return self._evaluate(job.population.records, job.probe[start : start + TEST_CHUNK])
        stop = min((chunk + 1) * TEST_CHUNK, len(self.job.test))
        return self._evaluate(self.job.test, np.arange(chunk * TEST_CHUNK, stop))

    def evaluate_client(
        self, message: Vectors, participant: Participant, tune: Tune | None = None
    ) -> dict[str, float]:
        """Sums of the task's metrics over a client's own test split, with its own personal part."""
        job, client = self.job, participant.client
        self.load(message, self.compute.vectors(job.states.load(client, participant.state)).get("personal"))
        if tune is not None and len(job.population.train(client)):
            self._tune(client, tune)
        own = job.population.validate(client) if job.validating else job.population.test(client)
        return self._evaluate(job.population.records, own)

    def _tune(self, client: int, tune: Tune) -> None:
        """Train the loaded model on a client's own records, for itself alone."""
        job, flat = self.job, self.flat
        flat.module.train()
        torch.manual_seed(randomness.torch_seed(job.seed, "tune", client))
        own = job.population.train(client)
        rng = randomness.generator(job.seed, "tune", client)
        local = Local(tune.lr, job.local.batch, job.local.seconds, epochs=tune.epochs)
        rows = PlainGradients(local, rng, durations=self._durations(own)).rows(len(own))
        u = torch.zeros_like(flat.values)
        for batch in batches.gather(job.population.records, own, rows):
            with self.compute.products():
                plain_gradient(flat, self.compute.batch(batch), job.task.losses)
            flat.values.sub_(u.mul_(tune.momentum).add_(flat.grad), alpha=tune.lr)

    def _evaluate(self, records: Records, indices: NDArray[Any]) -> dict[str, float]:
        return evaluate(self.flat.module, self.job, records, indices, self.compute, self._front)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    job: Job,
    records: Records,
    indices: NDArray[Any],
    compute: Compute = HOST,
    front: Front | None = None,
) -> dict[str, float]:
    """Sums of the task's metrics of a model over some records; `front`: that of this very model."""
    model.eval()
    task = job.task if front is None else front.task
    sums: dict[str, float] = {}
    for lo in range(0, len(indices), job.evaluation_batch):
        batch = compute.batch(records.prepare(records.take(indices[lo : lo + job.evaluation_batch])))
        with compute.products():
            found = task.evaluate(model, batch if front is None else front.extended(batch, job.task.evaluate))
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums
