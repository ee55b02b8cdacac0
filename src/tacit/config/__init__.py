"""Configs: one typed YAML file, checked completely before anything starts."""

from typing import TYPE_CHECKING

from tacit.lazy import lazily

if TYPE_CHECKING:
    from tacit.config.loading import dump, load, parse_overrides
    from tacit.config.schema import Config

__all__ = ["Config", "dump", "load", "parse_overrides"]

__getattr__, __dir__ = lazily(
    __name__, {"tacit.config.loading": "dump load parse_overrides", "tacit.config.schema": "Config"}
)
