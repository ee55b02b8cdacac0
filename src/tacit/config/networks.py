"""From a checked config to the network: built, initialised, adapted, and checked against its tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tacit import models, randomness
from tacit.config.imports import made
from tacit.config.schema import Config
from tacit.data import Dataset
from tacit.data.records import ArrayRecords
from tacit.errors import UserError
from tacit.federation.start import start_from
from tacit.models import hub
from tacit.models.lora import adapt, half_frozen, train_only
from tacit.section import IMPORT

LANGUAGE = "language"
"""The task whose models predict the next token."""
WORDS = "token-classification"
"""The task whose models output a class for each token."""
OFFSET = ("roberta", "xlm-roberta", "camembert")
"""Models whose position ids start after the padding's id, so they have fewer positions than their config
says.
"""


def build_model(config: Config, dataset: Dataset, weights: bool = True) -> nn.Module:
    """The network, with weights from the run's seed or from `model.start`; trained parameters need a
    gradient.

    With `weights=False` it has only shapes and types, and no file of weights is read.
    """
    section = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.torch_seed(config.seed, "model"))
        model = _network(config, dataset, weights)
        if section.start is not None and weights:
            start_from(model, section.start)
        if section.lora is not None:
            adapt(model, section.lora)
        if section.frozen != "float32":
            half_frozen(model)
    refuse_tokens(model, dataset)
    if section.train is not None:
        train_only(model, section.train, adapted=section.lora is not None)
    return model


def build_base(config: Config, dataset: Dataset) -> nn.Module:
    """The network of `build_model` before any adapter is added."""
    return build_model(
        config.model_copy(update={"model": config.model.model_copy(update={"lora": None, "train": None})}),
        dataset,
    )


def _network(config: Config, dataset: Dataset, weights: bool = True) -> nn.Module:
    section, task = config.model, dataset.task if config.task is None else config.task.name
    sizes = (dataset.shape, dataset.classes)
    if section.hub is not None:
        frozen = section.frozen if weights else "empty"
        return hub.from_hub(
            section.hub,
            *sizes,
            language=task == LANGUAGE,
            offline=config.data.offline,
            frozen=frozen,
            words=task == WORDS,
            dropout=section.hub_dropout,
        )
    if section.config is not None:
        return hub.from_config(
            sized_for_tokens(section.config, dataset), *sizes, task == LANGUAGE, task == WORDS
        )
    assert section.name is not None  # the schema asks for one of the three
    if section.name.startswith(IMPORT):
        model = made(section.name, "model", section.options, shape=dataset.shape, classes=dataset.classes)
        if not isinstance(model, nn.Module):
            raise UserError(
                f"model.import: {section.name} gives a {type(model).__name__}, not a torch module"
            )
        return model
    try:
        network = models.build(section.name, *sizes, **section.options)
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{key}: {value!r}" for key, value in section.options.items())
        raise UserError(
            f"model: {section.name} cannot be built with {given or 'its defaults'} ({error})"
        ) from None
    if dataset.tokenizer is not None and not hasattr(network, "config"):  # transformers' networks have one
        raise UserError(
            f"model: {section.name} takes numbers or pictures, and the records of {dataset.name} are texts; "
            "take a model of texts, such as {hub: minilm}"
        )
    return network


def sized_for_tokens(config: dict[str, Any] | str, dataset: Dataset) -> dict[str, Any] | str:
    """A transformers config as given, completed by what the tokenizer decides."""
    if dataset.tokenizer is None or isinstance(config, str):
        return config
    tokenizer = dataset.tokenizer
    # An architecture's default start and end ids belong to its own tokenizer, and matter only for generation.
    own = {"pad_token_id": tokenizer.pad, "bos_token_id": None, "eos_token_id": None}
    return {"vocab_size": tokenizer.vocabulary, **own, **config}


def refuse_tokens(model: nn.Module, dataset: Dataset) -> None:
    """Refuse a model whose embedding tables are too small: it would fail at the first rare token or long
    text.
    """
    config = getattr(model, "config", None)
    if config is None:
        return
    if dataset.tokenizer is None:
        numbers = isinstance(dataset.train, ArrayRecords) and len(dataset.shape) == 1
        if numbers and getattr(config, "vocab_size", None) is not None:
            raise UserError(
                f"model: it reads tokens of texts, and the records of {dataset.name} are "
                f"{dataset.shape[0]} numbers each; take mlp or logistic, or name a column of texts"
            )
        return
    known, wanted = getattr(config, "vocab_size", None), dataset.tokenizer.vocabulary
    if known is not None and known < wanted:
        raise UserError(
            f"data.tokenizer: the tokenizer has {wanted} tokens and the model {known}; they belong together, "
            "so name the model's own, or give model.config a vocab_size"
        )
    places = getattr(config, "max_position_embeddings", None)
    if places is not None and config.model_type in OFFSET:
        places -= config.pad_token_id + 1
    if places is not None and dataset.shape[0] > places:
        raise UserError(
            f"data.max_length: the model reads at most {places} tokens, not {dataset.shape[0]}; lower it"
        )
