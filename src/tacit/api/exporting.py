"""`tacit.trained` and `tacit.export`: a run's model, as a module or as files for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from tacit.algorithms import Algorithm
from tacit.api.folders import recorded_config
from tacit.config import Config
from tacit.config.build import build_base, build_dataset, build_model
from tacit.config.methods import build_algorithm
from tacit.data import ArrayRecords, Dataset
from tacit.data.tokens import BYTES_AROUND, Bytes
from tacit.errors import UserError
from tacit.federation.checkpoint import load_model
from tacit.federation.files import write_atomically
from tacit.federation.passed import mark, own_copy, refuse_others
from tacit.federation.statements import STATEMENT, read_statement
from tacit.models.export import (
    CAUSAL,
    auto_class,
    copy_tokenizer,
    name_labels,
    name_task,
    outputs,
    save_adapter,
    save_model,
)
from tacit.models.weights import home_of, hub_name, locate
from tacit.privacy.groups import SIZES
from tacit.report.card import card, loading
from tacit.report.compare import read_run
from tacit.section import IMPORT


def trained(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    algorithm: Algorithm | None = None,
) -> nn.Module:
    """The model of a run's newest checkpoint, in evaluation mode.

    Args:
        folder: the run's.
        model: as given to `run`, if it was; a copy of it is filled.
        dataset: as given to `run`, if it was; it can be left out where `model` is given.
        algorithm: as given to `run`, if it was.

    Returns:
        The module. It records which run trained it: a new run that starts from it counts that run's cost.

    Raises:
        UserError: there is no checkpoint, or another object was given.
    """
    folder = Path(folder)
    given = {"model": model, "algorithm": algorithm, "dataset": dataset}
    if model is not None and dataset is None:
        del given["dataset"]  # a model that is given need not be built for its records
    refuse_others(folder, given, "trained")
    return _trained(folder, recorded_config(folder), model, dataset, algorithm)


def _trained(
    folder: Path,
    config: Config,
    model: nn.Module | None,
    dataset: Dataset | None,
    algorithm: Algorithm | None,
) -> nn.Module:
    model = None if model is None else own_copy(model)
    algorithm = algorithm or build_algorithm(config.method.name, config.method.options)
    model = model or build_model(config, dataset or build_dataset(config))
    load_model(folder, model, algorithm.personal_part)
    return mark(model, folder).eval()


def export(
    folder: str | Path,
    into: str | Path,
    *,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    algorithm: Algorithm | None = None,
) -> tuple[str, ...]:
    """Save a run's model for plain transformers and peft: the adapter with LoRA, otherwise the whole model.

    The export includes the names of the classes (`id2label`) and a model card, README.md, with the statement.

    Args:
        folder: the run's.
        into: a folder that does not exist yet.
        model: as given to `run`, if it was.
        dataset: as given to `run`, if it was.
        algorithm: as given to `run`, if it was.

    Returns:
        Patterns of the parameters that each client trained for itself; the export has their initial values.

    Raises:
        UserError: the folder exists, there is no checkpoint, or another object was given.
    """
    folder, into = Path(folder), Path(into)
    config = recorded_config(folder)
    if into.exists():
        raise UserError(f"{into} exists already; choose another folder")
    # Every check comes before anything is created.
    run = read_run(folder)
    said = None if config.privacy is None else read_statement(folder, SIZES)
    refuse_others(folder, {"model": model, "algorithm": algorithm, "dataset": dataset}, "export")
    given_model = model is not None
    algorithm = algorithm or build_algorithm(config.method.name, config.method.options)
    dataset = dataset or build_dataset(config)
    model = _trained(folder, config, model, dataset, algorithm)
    partial = into.with_name(f"{into.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        how_to = _save(config, model, given_model, dataset, partial, into.resolve())
        if config.model.hub is not None and not given_model:
            copy_tokenizer(locate(config.model.hub, offline=True), partial)
        # The statement is exported. The ledger and the lineage are not: a record's hash would show anyone
        # who has the record that it was trained on, and they contain names.
        if (folder / STATEMENT).exists():
            shutil.copyfile(folder / STATEMENT, partial / STATEMENT)
        personal = algorithm.personal_part
        base = None if config.model.hub is None or given_model else hub_name(config.model.hub)
        adapter = config.model.lora is not None and not given_model
        inputs = _inputs(dataset)
        text = card(run, said, dataset.label_names, how_to, base, inputs, personal, adapter=adapter)
        write_atomically(partial / "README.md", text)
        partial.rename(into)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{into}: the model cannot be saved ({error.strerror or error})") from None
    return algorithm.personal_part


def _inputs(dataset: Dataset) -> str:
    """What inputs the model expects: without this, its weights are of little use to anybody else."""
    if dataset.tokenizer is not None:
        own = isinstance(dataset.tokenizer, Bytes)
        told = f" Tokens are a text's UTF-8 bytes, {BYTES_AROUND}." if own else ""
        return f"It reads texts as tokens, at most {dataset.shape[0]:,} of them.{told}"
    records = dataset.train
    if not isinstance(records, ArrayRecords) or records.x.dtype.kind not in "fu":
        return ""
    said = f"It takes float32 [batch, {', '.join(map(str, dataset.shape))}]"
    said += " of pixels ÷ 255" if records.x.dtype == np.uint8 else ""
    if len(dataset.features) == dataset.shape[0]:
        said += f": {', '.join(dataset.features)} (in this order)"
    for how, given in (("minus", records.mean), ("divided by", records.std)):
        numbers = np.ravel(given).tolist() if given is not None else []
        told = ", ".join(f"{number:g}" for number in numbers)
        said += f", {how} {told if len(numbers) == 1 else f'({told})'}" if numbers else ""
    return f"{said}."


def _save(config: Config, model: nn.Module, given: bool, dataset: Dataset, partial: Path, into: Path) -> str:
    """Write the model; returns the Python code that loads it from its final place."""
    section = config.model
    task = dataset.task if config.task is None else config.task.name
    name_labels(model, dataset.label_names)
    name_task(model, task)
    how: dict[str, Any] = {"shape": dataset.shape, "classes": dataset.classes}
    if given or section.name is None or section.name.startswith(IMPORT):
        how = {"class": f"{type(model).__module__}.{type(model).__qualname__}", **section.options, **how}
    else:
        how = {"tacit": section.name, **section.options, **how}
    known = hasattr(model, "save_pretrained")
    kind = "transformers" if known else "tacit" if "tacit" in how else "own"
    module = type(model).__name__ if known or kind == "own" else None
    if section.lora is None or given:
        save_model(model, how, partial)
        return loading(kind, into.name, module)
    base = build_base(config, dataset)
    name_labels(base, dataset.label_names)
    name_task(base, task)
    home = home_of(section.hub) if section.hub is not None and section.start is None else None
    auto = auto_class(model)
    # Loading by name alone works where the base has the same outputs; otherwise the base is exported, too.
    if home is not None and (auto == CAUSAL or outputs(locate(home, offline=True)) == dataset.classes):
        save_adapter(model, base, section.lora, home, partial)
        return loading("peft", into.name, auto)
    save_adapter(model, base, section.lora, str(into / "base"), partial)
    save_model(base, how, partial / "base")
    adapted = f"from peft import PeftModel\n\nmodel = PeftModel.from_pretrained(model, {into.name!r})"
    return f"{loading(kind, f'{into.name}/base', module)}\n\n{adapted}"
