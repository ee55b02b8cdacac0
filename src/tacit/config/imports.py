"""A user's own model, data, algorithm or task by import path: `model: {import: "mymodule:Net", width: 64}`.

The config stores it as the name `import:mymodule:Net` (`tacit.section`). The module is searched as Python
would search from the folder where the command was started.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tacit.errors import UserError
from tacit.section import IMPORT


def imported(name: str, what: str) -> Any:
    """The object that `import:module:attribute` names."""
    module, _, attribute = name.removeprefix(IMPORT).partition(":")
    if not module or not attribute:
        raise UserError(f"{what}.import: write it as module:name, for example mymodule:Net (got {name!r})")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a command has its installation folder on the path, not the current one
    try:
        found = import_module(module)
    except ImportError as error:
        raise UserError(
            f"{what}.import: {module!r} cannot be imported ({error}); looked in {here} too"
        ) from None
    except Exception as error:
        raise UserError(
            f"{what}.import: {module!r} fails when it is imported ({type(error).__name__}: {error})"
        ) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{what}.import: {module} has no {attribute!r}")
        found = getattr(found, part)
    return found


def made(name: str, what: str, options: dict[str, Any], **known: Any) -> Any:
    """The object: the callable that the import path names, called with its options and with those of `known`
    that it has parameters for.
    """
    found = imported(name, what)
    if not callable(found) or (not isinstance(found, type) and not inspect.isroutine(found) and not options):
        return found
    try:
        takes = inspect.signature(found).parameters
    except ValueError:  # not all built-ins have a signature
        raise UserError(
            f"{what}: {name.removeprefix(IMPORT)} does not say what it takes; name a class of your own"
        ) from None
    given = {key: value for key, value in known.items() if key in takes and key not in options}
    try:
        inspect.signature(found).bind(**given, **options)
    except TypeError as error:
        raise UserError(
            f"{what}: {name.removeprefix(IMPORT)}: {error}; its options are {', '.join(takes) or 'none'}"
        ) from None
    return found(**given, **options)
