"""The tasks that models are trained for: losses per record, and metrics. Configs name them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from tacit.errors import UserError
from tacit.tasks.answers import ask
from tacit.tasks.base import Task
from tacit.tasks.classification import Classification
from tacit.tasks.headline import Headline, headline
from tacit.tasks.language import Language
from tacit.tasks.multilabel import MultiLabel
from tacit.tasks.regression import Regression
from tacit.tasks.speech import Speech
from tacit.tasks.tokens import TokenClassification

TASKS: dict[str, Callable[..., Task]] = {
    "classification": Classification,
    "language": Language,
    "multi-label": MultiLabel,
    "regression": Regression,
    "speech": Speech,
    "token-classification": TokenClassification,
}
"""Every task by name; its options are keyword arguments."""


def build(name: str, **options: Any) -> Task:
    """The task called `name`.

    >>> build("clasification")
    Traceback (most recent call last):
    tacit.errors.UserError: unknown task 'clasification'; did you mean 'classification'?
    """
    if name not in TASKS:
        near = get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(TASKS)}"
        raise UserError(f"unknown task {name!r}; {hint}")
    known = inspect.signature(TASKS[name]).parameters
    for option in options:
        if option not in known:
            takes = ", ".join(known) or "none"
            raise UserError(f"task {name!r} has no option {option!r}; its options are: {takes}")
    return TASKS[name](**options)


__all__ = [
    "TASKS",
    "Classification",
    "Headline",
    "Language",
    "MultiLabel",
    "Regression",
    "Speech",
    "Task",
    "TokenClassification",
    "ask",
    "build",
    "headline",
]
