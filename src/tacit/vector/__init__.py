"""Flat parameter vectors and their layout. Depends on torch only."""

from tacit.vector.flat import (
    Flat,
    Vectors,
    buffers_in,
    frozen_hash,
    read_buffers,
    read_values,
    write_buffers,
    write_values,
)
from tacit.vector.layout import Layout, Segment

__all__ = [
    "Flat",
    "Layout",
    "Segment",
    "Vectors",
    "buffers_in",
    "frozen_hash",
    "read_buffers",
    "read_values",
    "write_buffers",
    "write_values",
]
