"""Packages that import what they are asked for, when they are first asked; and torch itself, likewise.

torch takes seconds to import. A command that needs none of it, such as `tacit plan`, should not wait for it
because a neighbour in the same package does. Type checkers see ordinary imports under `TYPE_CHECKING`.

Modules that `tacit plan` needs, and that compute with torch elsewhere, say
`from tacit.lazy import Tensor, torch`; `Tensor` is then for annotations alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


def lazily(
    package: str, homes: Mapping[str, str], *others: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: `homes` has modules and, for each, its names with spaces
    between them; `others` are names that the package has by itself.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, found)  # asked once
        return found

    return find, lambda: sorted([*home, *others])


class Late(ModuleType):
    """A module that is imported when something of it is first used; it may be in `sys.modules` until then."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        found = getattr(import_module(self.__name__), name)
        setattr(self, name, found)  # asked once
        return found


if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    torch, Tensor = Late("torch"), Any
