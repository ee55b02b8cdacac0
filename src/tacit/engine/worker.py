"""One resident model that plays one client after another.

A worker never holds two models and never a list of uploads: it loads the message, runs the algorithm's
client part, adds the upload to a running sum, and goes on to the next client.
"""

from __future__ import annotations

import itertools
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tacit import randomness
from tacit.algorithms import Algorithm
from tacit.data import Batch, Population, Records, batches
from tacit.data.augment import Augment
from tacit.data.records import Timed
from tacit.engine.allocator import keep_freed_memory
from tacit.engine.contract import Order, Report, Tune, Visit
from tacit.engine.local import Gradients, Local, PlainGradients, PrivateGradients, workload
from tacit.engine.memory import MemoryStore
from tacit.engine.work import LocalWork
from tacit.errors import UserError
from tacit.gradients import ClippedGradient, plain_gradient
from tacit.gradients.plain import Descent
from tacit.privacy import Bits, ExampleLevel, Mechanism, Workload
from tacit.tasks import Task
from tacit.vector import Flat, Layout, Vectors, read_buffers

BUFFERS = "buffers"
"""The reserved name under which BatchNorm's statistics and their like travel."""
TEST_CHUNK = 2000
"""Records of the test set in one evaluation task; fixed, so sums do not depend on the engine."""


class ClientError(RuntimeError):
    """Code of the model, the data or the algorithm failed on a client; says which one and where."""


@dataclass(frozen=True)
class Job:
    """All that a worker needs to play any client of a run; sent once, when the worker starts."""

    model: nn.Module
    task: Task
    population: Population
    test: Records
    algorithm: Algorithm
    local: Local
    seed: int
    memory: Path
    evaluation_batch: int = 500
    validating: bool = False
    """Judge clients by their own validation splits instead of their test splits."""
    privacy: Mechanism | None = None
    layers: bool = False
    """Report the norm of each layer of a client's update: exact numbers on single clients."""
    public: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Records that belong to no client and need no protection."""
    augment: Augment | None = None
    """Random changes to the records a client trains on; never to those that judge a model."""

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.model, self.algorithm.personal_part)

    @cached_property
    def upload_sizes(self) -> dict[str, int]:
        """Names and lengths of what each client sends.

        Under a guarantee buffers stay as they were: statistics of records need noise, and would drown in it.
        """
        sizes = dict(self.algorithm.uploads(self.layout))
        if self.privacy is None and (buffers := read_buffers(self.model).numel()):
            sizes[BUFFERS] = buffers
        return sizes

    @cached_property
    def workload(self) -> Workload:
        """What of the run decides its cost in privacy."""
        return workload(self.population, self.local, self.algorithm, self.seed)

    def empty_sums(self) -> Vectors:
        """Zeros to add uploads to: whole numbers under a client-level guarantee."""
        return {name: torch.zeros(size, dtype=self.sum_dtype) for name, size in self.upload_sizes.items()}

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.int64 if self.privacy is not None and self.privacy.sums_integers else torch.float32

    @property
    def test_chunks(self) -> int:
        """Number of evaluation tasks the common test set is cut into."""
        return -(-len(self.test) // TEST_CHUNK)


class Worker:
    """Plays clients on one resident model."""

    def __init__(self, job: Job) -> None:
        keep_freed_memory()
        self.job = job
        self.flat = Flat(job.model, job.algorithm.personal_part)
        self.memory = MemoryStore(job.memory)
        self._initial_personal = self.flat.personal.clone()
        example_level = isinstance(job.privacy, ExampleLevel)
        self._clipped = ClippedGradient(self.flat) if example_level else None
        self._descent = None if example_level else Descent(self.flat)
        self._bits = np.random.PCG64(0)
        # What one client leaves in the resident model must not reach the next one: not even integers, or
        # buffers that no checkpoint holds.
        self._fresh = [
            (part._buffers, name, buffer, buffer._version, buffer.clone())
            for part in self.flat.module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and buffer._base is not self.flat.buffers
        ]

    def sum(self, order: Order, message: Vectors, shard: Sequence[Visit], into: Vectors) -> list[Report]:
        """Train a shard's clients in turn and leave the weighted sum of their uploads in `into`."""
        for total in into.values():
            total.zero_()
        self.flat.module.train()
        return [self._visit(order, message, visit, into) for visit in shard]

    @torch.no_grad()
    def _visit(self, order: Order, message: Vectors, visit: Visit, into: Vectors) -> Report:
        start = time.perf_counter()
        job, flat, client = self.job, self.flat, visit.client
        self._seed(order, client)
        self._reset_buffers(message)
        work = LocalWork(
            flat,
            job.task,
            job.population.records,
            job.population.train(client),
            job.local,
            self._gradients(order, client),
            order,
            self._initial_personal,
            queries=sys.maxsize if self._clipped is None else job.algorithm.queries,
            public=self._public(order, client),
            descent=self._descent,
            augment=self._augment(order, client),
        )
        try:
            upload, memory = job.algorithm.client(message, self.memory.load(client, visit.memory), work)
            self._check(upload, into)
        except Exception as error:
            where = f"client {client}, round {order.round}, step {work.count}"
            if isinstance(error, UserError):  # it says itself what to do
                raise UserError(f"{where}: {error}") from error
            raise ClientError(f"{where}: {type(error).__name__}: {error}") from error
        if BUFFERS in into:
            upload[BUFFERS] = flat.buffers
        layers = job.layout.layer_norms(upload["delta"]).tolist() if job.layers else None
        norm, weight = self._add(order, client, upload, into, work.examples)
        finite = math.isfinite(norm)
        if finite and memory:
            self.memory.save(client, order.round, memory)
        return Report(
            client=client,
            weight=weight,
            examples=work.examples,
            steps=work.count,
            loss=work.loss,
            norm=norm,
            finite=finite,
            remembers=finite and bool(memory),
            notes=work.notes,
            seconds=time.perf_counter() - start,
            layers=layers,
        )

    def _reset_buffers(self, message: Vectors) -> None:
        if self.flat.buffers.numel():
            self.flat.buffers.copy_(message[BUFFERS])
        self.forget()

    def forget(self) -> None:
        """Buffers that do not travel, as they were at first."""
        for i, (owner, name, buffer, version, first) in enumerate(self._fresh):
            if owner.get(name) is not buffer or buffer._version != version:
                buffer.copy_(first)
                owner[name] = buffer
                self._fresh[i] = (owner, name, buffer, buffer._version, first)

    @property
    def _secret_coins(self) -> bool:
        """Under a guarantee for examples, whatever a client tosses for its records must stay unknown."""
        privacy = self.job.privacy
        return self._clipped is not None and privacy is not None and not privacy.simulated

    def _seed(self, order: Order, client: int) -> None:
        """Seed torch for one client (dropout)."""
        if self._secret_coins:
            # One record more or less moves the masks of those after it in a batch. That is covered if masks
            # are coins like any other; whoever knew them could see far more than one clipped gradient.
            torch.manual_seed(secrets.randbits(63))
            torch.default_generator.set_state(_secret_state())
            return
        seed = randomness.torch_seed(self.job.seed, "client", order.round, client)
        if self.flat.values.device.type == "cpu":
            # torch.manual_seed would also queue a call, with a stack trace, for every accelerator that this
            # process never uses: a third of a small client's time, and a list that grows for ever.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def _gradients(self, order: Order, client: int) -> Gradients:
        job = self.job
        if self._clipped is None:
            shuffler, durations = self._shuffler(order, client), self._durations(client)
            return PlainGradients(job.local, shuffler, job.algorithm.batches, durations)
        assert isinstance(job.privacy, ExampleLevel)
        name = (job.seed, order.round, order.attempt, client)
        return PrivateGradients(
            job.privacy,
            job.workload,
            self._clipped,
            job.privacy.bits(*name, 0),
            job.privacy.bits(*name, 1),
            len(job.population.train(client)),
        )

    def _durations(self, client: int) -> NDArray[Any] | None:
        records = self.job.population.records
        if self.job.local.seconds is None or not isinstance(records, Timed):
            return None
        durations: NDArray[Any] = records.seconds[self.job.population.train(client)]
        return durations

    def _shuffler(self, order: Order, client: int) -> np.random.Generator:
        """A generator named by round and client; the last one given before it is no longer to be used.

        A key is a hash already. To put it straight into a resident generator spares a small client the
        twentieth of its time that a new one, with a hash of NumPy's own, would take.
        """
        key = randomness.key(self.job.seed, "batches", order.round, client)
        # `has_uint32`: half a draw may be left over from the client before; it goes with the rest.
        state: Any = {
            "bit_generator": "PCG64",
            "state": {"state": key, "inc": 1},
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._bits.state = state
        return np.random.Generator(self._bits)

    def _augment(self, order: Order, client: int) -> Callable[[Batch, NDArray[np.int64], int], Batch] | None:
        if self.job.augment is None:
            return None
        key = randomness.key(self.job.seed, "augment", order.round, client)
        return partial(self.job.augment, key=secrets.randbits(64) if self._secret_coins else key)

    def _public(self, order: Order, client: int) -> Iterator[NDArray[np.int64]] | None:
        public = self.job.public
        if not len(public):
            return None
        rng = randomness.generator(self.job.seed, "public", order.round, client)
        size = min(self.job.local.batch, len(public))
        return (rng.choice(public, size, replace=False) for _ in itertools.count())

    def _add(
        self, order: Order, client: int, upload: Vectors, into: Vectors, examples: int
    ) -> tuple[float, float]:
        """Add a client's upload to the sums; its norm before any bound, and its weight (0: left out)."""
        if order.bounding is not None:
            assert self.job.privacy is not None
            bits = self.job.privacy.bits(self.job.seed, order.round, order.attempt, client, 1)
            norm = order.bounding.add_(upload, into, bits)
            return norm, 1.0 if math.isfinite(norm) else 0.0
        norm = math.sqrt(sum(float(torch.linalg.vector_norm(v.float())) ** 2 for v in upload.values()))
        weight = (float(examples) if order.weighted else 1.0) if math.isfinite(norm) else 0.0
        if weight:
            for name, vector in upload.items():
                into[name].add_(vector, alpha=weight)
        return norm, weight

    @staticmethod
    def _check(upload: Mapping[str, Tensor], into: Vectors) -> None:
        expected = {name: total.numel() for name, total in into.items() if name != BUFFERS}
        got = {name: vector.numel() for name, vector in upload.items()}
        if got != expected:
            raise ValueError(
                f"the algorithm sent {got} but its uploads() declares {expected}; make the two agree"
            )

    def load(self, message: Vectors, personal: Tensor | None = None) -> None:
        """Put the server's model (and a client's personal part) into the resident model."""
        self.flat.shared.copy_(message["theta"])
        self.flat.personal.copy_(self._initial_personal if personal is None else personal)
        self._reset_buffers(message)

    def evaluate_chunk(self, chunk: int) -> dict[str, float]:
        """Sums of the task's metrics over one chunk of the common test set; call `load` first."""
        stop = min((chunk + 1) * TEST_CHUNK, len(self.job.test))
        return self._evaluate(self.job.test, np.arange(chunk * TEST_CHUNK, stop))

    def evaluate_client(self, message: Vectors, visit: Visit, tune: Tune | None = None) -> dict[str, float]:
        """Sums of the task's metrics over a client's own test split, with its own personal part."""
        job, client = self.job, visit.client
        self.load(message, self.memory.load(client, visit.memory).get("personal"))
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
        local = Local(job.local.batch, epochs=tune.epochs, seconds=job.local.seconds)
        rows = PlainGradients(local, rng, durations=self._durations(client)).rows(len(own))
        for batch in batches.gather(job.population.records, own, rows):
            plain_gradient(flat, batch, job.task.losses)
            flat.values.sub_(flat.grad, alpha=tune.lr)

    def _evaluate(self, records: Records, indices: NDArray[Any]) -> dict[str, float]:
        return evaluate(self.flat.module, self.job, records, indices)


@torch.inference_mode()
def evaluate(model: nn.Module, job: Job, records: Records, indices: NDArray[Any]) -> dict[str, float]:
    """Sums of the task's metrics of a model over some records."""
    model.eval()
    sums: dict[str, float] = {}
    for lo in range(0, len(indices), job.evaluation_batch):
        batch = records.prepare(records.take(indices[lo : lo + job.evaluation_batch]))
        for name, value in job.task.evaluate(model, batch).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def add_sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up metric sums in the order given."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _secret_state() -> Tensor:
    """A whole state for torch's CPU generator that nobody can guess, for a model's own dice (dropout).

    Layout (5056 bytes): the seed (8), words left (4), seeded (4), next word (8), 624 words of 8 bytes with
    32 bits each, then cached normals. "One left" makes the generator stir the new words before using them.
    """
    state = np.zeros(5056, dtype=np.uint8)
    state[8:16] = np.array([1, 1], dtype=np.int32).view(np.uint8)
    state[24 : 24 + 8 * 624] = (Bits.secret().words(624) >> np.uint64(32)).view(np.uint8)
    return torch.from_numpy(state)
