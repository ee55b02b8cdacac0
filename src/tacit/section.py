"""What a section of a config is: a frozen, validated record that refuses keys it does not know.

Each room owns the sections that configure it, as models (`Section`) or, where they are also made by hand, as
dataclasses (`@section`); `tacit.config` only composes them.

>>> @section
... class Cut:
...     at: int = 3
>>> Cut("4").at
4
"""

from __future__ import annotations

from typing import TypeVar, dataclass_transform

from pydantic import BaseModel, ConfigDict
from pydantic.dataclasses import dataclass

T = TypeVar("T")


class Section(BaseModel):
    """A part of a config."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass_transform(frozen_default=True)
def section(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are checked, in a config or in Python."""
    made: type[T] = dataclass(cls, frozen=True, config=ConfigDict(extra="forbid"))  # type: ignore[assignment]
    return made
