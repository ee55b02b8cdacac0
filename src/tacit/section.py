"""What a section of a config is: a frozen, validated record that refuses keys it does not know.

Each room owns the sections that configure it; `tacit.config` only composes them.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a config."""

    model_config = ConfigDict(extra="forbid", frozen=True)
