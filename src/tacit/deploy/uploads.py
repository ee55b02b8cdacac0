"""What a run's messages consist of, and the form of uploads on the wire: whole numbers, packed in as many
bits each as their bound needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor

from tacit.deploy.messages import BadMessage, Vector
from tacit.engine import Job
from tacit.privacy import Bounding
from tacit.secure import Refused
from tacit.secure.masks import centred, lanes, packed, packed_size, unpacked
from tacit.vector import Layout, Vectors, read_buffers, read_values

STRETCH = 1 << 20
"""How many numbers are packed at a time: a multiple of 8, so that chunks end on whole bytes."""


def layout_hash(layout: Layout) -> str:
    """A hash of names, shapes and order of the trained parameters, and of how much of them is shared."""
    parts = [(segment.name, tuple(segment.shape)) for segment in layout.segments]
    return sha256(repr((parts, layout.shared)).encode()).hexdigest()


def expected_message(job: Job) -> tuple[Vector, ...]:
    """The vectors of a run's message."""
    theta = read_values(job.model, job.layout)[: job.layout.shared].float()
    message = job.algorithm.message(job.algorithm.init(theta, job.layout))
    message = {**message, **read_buffers(job.model)}
    return tuple((name, "f4", message[name].numel()) for name in sorted(message))


def expected_upload(job: Job, bounding: Bounding | None) -> tuple[Vector, ...]:
    """The vectors of a client's answer: float32, or under a bound whole numbers in as many bits each as the
    bound needs. Their size is the same for every upload, since the network sees it.
    """
    bits = upload_bits(bounding)
    if bits is None:
        return tuple((name, "f4", size) for name, size in sorted(job.upload_sizes.items()))
    return tuple((name, "u1", packed_size(size, bits)) for name, size in sorted(job.upload_sizes.items()))


def upload_bits(bounding: Bounding | None) -> int | None:
    """Bits of a number between −2ᵇ and 2ᵇ; None if uploads are not whole numbers."""
    return None if bounding is None or bounding.grid is None else bounding.grid.bits + 2


def narrowed(upload: Vectors, bounding: Bounding | None) -> Vectors:
    """An upload in its form on the wire: see `expected_upload`."""
    bits = upload_bits(bounding)
    if bits is None:
        return upload
    return {name: _narrow(vector, bits) for name, vector in upload.items()}


def widened(sent: Vectors, bounding: Bounding | None, sizes: Mapping[str, int]) -> Vectors:
    """The upload that `narrowed` packed; `BadMessage` if it cannot be unpacked."""
    bits = upload_bits(bounding)
    if bits is None:
        return sent
    try:
        return {name: _wide(vector, sizes[name], bits) for name, vector in sent.items()}
    except Refused as error:
        raise BadMessage(str(error)) from None


def _narrow(vector: Tensor, bits: int) -> Tensor:
    sent = torch.empty(packed_size(len(vector), bits), dtype=torch.uint8)
    for number, part in enumerate(torch.split(vector, STRETCH)):
        content = bytearray(packed(lanes(part.numpy(), bits), bits))
        at = number * STRETCH * bits // 8
        sent[at : at + len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    return sent


def _wide(sent: Tensor, length: int, bits: int) -> Tensor:
    vector = torch.empty(length, dtype=torch.int64)
    for part, content in zip(
        torch.split(vector, STRETCH), torch.split(sent, STRETCH * bits // 8), strict=True
    ):
        part.copy_(torch.from_numpy(centred(unpacked(content.numpy().tobytes(), len(part), bits), bits)))
    return vector


def checked_norm(upload: Vectors, bounding: Bounding | None) -> float:
    """The norm of a client's upload, if it may be added; whole numbers must be within their radius.

    Sensitivity: with a grid, Σk² ≤ 2²ᵇ in whole numbers, or it is a `BadMessage`.
    """
    if bounding is not None and bounding.grid is not None:
        radius, square = bounding.grid.radius, 0
        for vector in upload.values():
            if (vector.numel() and int(vector.abs().max()) > radius) or bool((vector < -radius).any()):
                raise BadMessage("its update is longer than the clipping norm")
            for part in torch.split(vector.long(), 1 << 15):
                if float(part.double().square().sum()) > 2.0 * radius**2:
                    raise BadMessage("its update is longer than the clipping norm")
                square += int(part.mul(part).sum())
        if square > radius**2:
            raise BadMessage("its update is longer than the clipping norm")
        return math.nan
    norm = math.sqrt(sum(float(torch.linalg.vector_norm(v.float())) ** 2 for v in upload.values()))
    if not math.isfinite(norm):
        raise BadMessage("its update is infinite or not a number")
    if bounding is not None and bounding.bound.scales(upload)[1] != [1.0] * len(bounding.bound.groups):
        raise BadMessage("its update is longer than the clipping norm")
    return norm
