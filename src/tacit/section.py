"""What a section of a config is: a frozen, validated record that refuses keys it does not know, and numbers
that are not finite.

Each room owns the sections that configure it, as models (`Section`) or, where they are also made by hand, as
dataclasses (`@section`); `tacit.config` only composes them.

>>> @section
... class Cut:
...     at: int = 3
>>> Cut("4").at
4
>>> Cut(at=None)
Traceback (most recent call last):
tacit.errors.UserError: Cut: at: input should be a valid integer (got None); choose another
"""

from __future__ import annotations

import re
from functools import wraps
from typing import Any, TypeVar, dataclass_transform

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from tacit.errors import UserError

T = TypeVar("T")


class Section(BaseModel):
    """A part of a config."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass_transform(frozen_default=True)
def section(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are checked, in a config or in Python."""
    made: Any = dataclass(cls, frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
    unchecked = made.__init__

    @wraps(unchecked)
    def init(self: Any, *values: Any, **named: Any) -> None:
        try:
            unchecked(self, *values, **named)
        except ValidationError as error:  # in a config the loader explains it, with its place
            first = error.errors()[0]
            key, problem = ".".join(map(str, first["loc"])), first["msg"][0].lower() + first["msg"][1:]
            raise UserError(
                f"{cls.__name__}: {key}: {problem} (got {first['input']!r}); choose another"
            ) from None

    made.__init__ = init
    checked: type[T] = made
    return checked


def shaped(pattern: str, like: str) -> AfterValidator:
    """A text that the whole of a pattern fits; `like` tells a person what that is."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"must be {like} (got {text[:80]!r})")
        return text

    return AfterValidator(check)


IMPORT = "import:"
"""Begins a name that is an import path: `{import: "mymodule:Net"}` is kept as `import:mymodule:Net`."""


def as_name(value: Any) -> Any:
    """Raw values of a section with `import: m:f` written as `name: import:m:f`, and a bare name as one."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and "import" in value:
        if value.get("name") is not None:
            raise ValueError("give a name or an import path, not both")
        return {
            "name": f"{IMPORT}{value['import']}",
            **{k: v for k, v in value.items() if k not in ("import", "name")},
        }
    return value


class Open(BaseModel):
    """A section whose other keys are options of what it names."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Named(Open):
    """A name and the options that go with it; the bare name is short for no options."""

    name: str

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return as_name(value)
