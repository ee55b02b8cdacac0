"""What the planner says of a setting, said of the option that sets it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tacit.errors import UserError

OTHERS = {"target": "--epsilon", "fixed": "--sampling fixed", "stated": "--noise-on"}
"""Settings whose option has another name."""


def as_options(text: str) -> str:
    """A planner's sentence with options in place of its settings, which stand in backticks.

    >>> as_options("`target`: leave out `local_steps`")
    '--epsilon: leave out --local-steps'
    """
    return re.sub("`([a-z_]+)`", lambda m: OTHERS.get(m[1], f"--{m[1].replace('_', '-')}"), text)


@contextmanager
def naming_options() -> Iterator[None]:
    """Errors from inside name options instead of settings; also a decorator."""
    try:
        yield
    except UserError as error:
        raise UserError(as_options(str(error))) from None
