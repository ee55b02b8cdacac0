"""Flat parameter vectors and their layout. Knows torch and nothing else."""

from torch import Tensor

from tacit.vector.flat import Flat, frozen_hash, read_buffers, read_values, write_buffers, write_values
from tacit.vector.layout import Layout, Segment

Vectors = dict[str, Tensor]
"""Named 1-D tensors: a message, an upload, a client's memory or the server's state."""

__all__ = [
    "Flat",
    "Layout",
    "Segment",
    "Vectors",
    "frozen_hash",
    "read_buffers",
    "read_values",
    "write_buffers",
    "write_values",
]
