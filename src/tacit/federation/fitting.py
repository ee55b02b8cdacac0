"""Data and models of one's own, looked at before a run begins: what would fail in a client is named here."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tacit.data import ArrayRecords, Dataset, Records
from tacit.engine import Job
from tacit.engine.isolation import Pristine
from tacit.engine.worker import evaluate
from tacit.errors import UserError
from tacit.tasks import TASKS, Task
from tacit.tasks.answers import ask
from tacit.tasks.headline import KEPT


def refuse_odd(dataset: Dataset, task: str) -> None:
    """Refuse records that nothing can be trained on: none to test, features or labels that are no numbers."""
    for part, records in (("train", dataset.train), ("test", dataset.test)):
        if records is None or not len(records):
            raise UserError(f"{dataset.name}: it has no {part} records; give some ({part}=…)")
        if not isinstance(records, ArrayRecords):
            continue
        if records.x.dtype.kind not in "fiub" or records.y.dtype.kind not in "fiub":
            what = "x" if records.x.dtype.kind not in "fiub" else "y"
            raise UserError(
                f"{dataset.name}: {part} {what} holds {getattr(records, what).dtype}, not numbers; "
                "tacit.dataset(…) makes classes of words"
            )
        if records.x.dtype == np.float64:
            raise UserError(
                f"{dataset.name}: {part} x is float64, and models are float32; x.astype('float32')"
            )
        if records.x.dtype.kind == "f":
            for row in range(len(records)):
                if not np.isfinite(records.x[row]).all():
                    raise UserError(
                        f"{dataset.name}: {part} record {row} holds NaN or infinity; mend or drop it"
                    )
        labels = records.labels
        if task == "classification" and labels is not None and dataset.classes:
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= dataset.classes:
                mend = f"subtract {low}" if high - low < dataset.classes else f"give classes={high + 1}"
                raise UserError(
                    f"{dataset.name}: {part} labels run from {low} to {high}, and {dataset.classes} classes "
                    f"are 0 to {dataset.classes - 1}; tacit.dataset(…) numbers them, or {mend}"
                )


NEEDS = {"language": ("input_ids", "texts"), "speech": ("frames", "speech")}
"""What a batch must have for a task, and what records have it."""


def refuse_other_task(dataset: Dataset, task: str) -> None:
    """Refuse a task that records of this kind cannot be for; told by a test record, which nobody protects."""
    records = dataset.test if len(dataset.test) else dataset.train
    y = records.y if isinstance(records, ArrayRecords) else None
    if task == "classification" and y is not None and y.ndim == 1 and y.dtype.kind == "f":
        raise UserError(
            f"task: classification learns from classes, and {dataset.name} has {y.dtype} labels; set task: "
            "regression, or number the classes from 0 as integers"
        )
    if task not in (*NEEDS, "token-classification") or not len(records):
        return
    batch = records.prepare(records.take(np.array([0])))
    key, what = NEEDS.get(task, ("", ""))
    if key and key not in batch:
        raise UserError(f"task: {task} learns from {what}, and {dataset.name} holds none; leave it out")
    if task == "token-classification" and "y" in batch and batch["y"].ndim < 2:
        raise UserError(
            f"task: token-classification needs a class for each token, and {dataset.name} has one a record"
        )


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model whose parameters have no shape before it has seen a batch."""
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UserError(
            f"model: {type(model).__name__} has lazy layers that do not know their sizes yet; pass one batch "
            "through it first, or state them"
        )


def refuse_mismatch(model: nn.Module, task: Task, dataset: Dataset) -> None:
    """Ask a copy of the model about one record: it must understand it, and have an answer for every class.

    Whatever the copy shares with the model (a closure, say) is as it was before.
    """
    refuse_lazy(model)
    batch = dataset.train.prepare(dataset.train.take(np.array([0])))
    trial = copy.deepcopy(model).eval()
    before = Pristine({"model": trial})
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            answer = ask(trial, batch)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # what odd shapes and types raise
            shown = {name: tuple(value.shape) for name, value in batch.items()}
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"model: {type(model).__name__} cannot read a record of {dataset.name} ({shown}): {first}"
            ) from None
        except UserError:
            if type(task) in TASKS.values():
                raise
            return  # a task of one's own may understand that answer
        except Exception:  # what else its code may raise, it may have its reasons for
            return
        finally:
            before.restore()
        plain = type(task).__name__ == "Classification"
        if plain and answer.ndim < 2:
            raise UserError(
                f"model: {type(model).__name__} answers one record with a tensor {list(answer.shape)}; let "
                f"it be [records, {dataset.classes}], a logit for each of {dataset.name}'s classes"
            )
        if plain and answer.ndim == 2 and answer.shape[1] < dataset.classes:
            raise UserError(
                f"model: {type(model).__name__} has {answer.shape[1]} outputs, and {dataset.name} has "
                f"{dataset.classes} classes; give it that many"
            )


OURS = frozenset((
    "round", "lr", "clip", "clipped", "clients", "examples", "skipped", "absent", "train_loss", "update_norm",
    "update_norm_std", "layers", "gradient_layers", "clipped_layers", "server_layers", "bytes_up",
    "bytes_down", "epsilon", "delta", "seconds", "workers", KEPT,
))  # fmt: skip
"""What a round's record says beside the task's metrics, which must have other names."""


def refuse_odd_metrics(job: Job, test: Records) -> None:
    """Refuse metrics of a task of one's own that no record of a round can hold, and `evaluate.train` where
    they have no loss: a copy of the model is asked about one test record.
    """
    if type(job.task) in TASKS.values():
        return
    trial = copy.deepcopy(job.model)
    before = Pristine({"model": trial})
    with torch.random.fork_rng(devices=[]):
        try:
            found = job.task.summarise(evaluate(trial, job, test, np.array([0])))
        except Exception:  # whatever it is: training will tell, with its place
            return
        finally:
            before.restore()
    name = type(job.task).__name__
    if not isinstance(found, Mapping):
        what = type(found).__name__
        raise UserError(f"task: {name}.summarise returns a {what}; give a number by each name")
    for metric, value in found.items():
        if not isinstance(metric, str) or metric in OURS:
            raise UserError(
                f"task: {name}.summarise names a metric {metric!r}, which is no name or one of a round's "
                "own; call it something else"
            )
        if not isinstance(value, int | float):
            raise UserError(
                f"task: {name}.summarise gives {metric!r} as a {type(value).__name__}; make it a number, "
                "such as float(…)"
            )
    if len(job.probe) and "loss" not in found:
        raise UserError(
            f"evaluate.train: {name} has no loss among its metrics ({', '.join(found)}); let its `summarise` "
            "give one, or leave evaluate.train out"
        )
