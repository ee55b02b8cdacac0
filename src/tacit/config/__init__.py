"""Configs: one YAML file, typed, checked whole before anything starts."""

from tacit.config.loading import dump, load, parse_overrides
from tacit.config.schema import Config

__all__ = ["Config", "dump", "load", "parse_overrides"]
