"""Curvature of the loss along each block of parameters: leading eigenvalues of the Hessian, by Lanczos.

Paper 004 (Figures 3, 7, 8) groups parameters by the structure of their Hessian. No Hessian is ever stored:
one product with it costs two backward passes. From a few such products, Lanczos (1950) finds the ends of the
spectrum of H restricted to a block; each step is made orthogonal to all earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tacit.data.records import Batch
from tacit.errors import UserError
from tacit.tasks import Task
from tacit.vector import Layout
from tacit.vector.blocks import Blocks

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Spectrum:
    """The ends of one block's spectrum."""

    block: str
    size: int
    eigenvalues: tuple[float, ...]
    """By absolute value, largest first."""


def hessian_product(model: nn.Module, layout: Layout, task: Task, batch: Batch) -> Product:
    """v ↦ H v, H of the batch's mean loss over the shared parameters at the model's values, dropout off."""
    named = dict(model.named_parameters())
    parameters = [named[segment.name] for segment in layout.shared_segments]
    model.eval()
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # other kernels have no second derivative
        loss = task.losses(model, batch).mean()
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)
        flat = torch.cat([g.reshape(-1) for g in gradient])

    def product(v: Tensor) -> Tensor:
        with torch.enable_grad():
            parts = torch.autograd.grad(flat, parameters, v, retain_graph=True, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in parts]).detach()

    return product


def leading(product: Product, mask: Tensor, steps: int, seed: int = 0) -> tuple[float, ...]:
    """Ritz values of the symmetric operator restricted to the coordinates where `mask` is 1.

    With as many steps as the block has coordinates, these are its eigenvalues; the outer ones converge first.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(mask.shape, generator=generator) * mask
    q = q / torch.linalg.vector_norm(q)
    basis, alphas, betas = [q], [], []
    for _ in range(min(steps, int(mask.sum()))):
        w = product(basis[-1]) * mask
        alphas.append(float(w @ basis[-1]))
        for _ in range(2):  # two passes are enough, one is not (Parlett)
            for old in basis:
                w = w - (w @ old) * old
        beta = float(torch.linalg.vector_norm(w))
        if beta < 1e-6 * max(1e-12, *map(abs, alphas)):
            break
        betas.append(beta)
        basis.append(w / beta)
    off = betas[: len(alphas) - 1]
    ritz = np.linalg.eigvalsh(np.diag(alphas) + np.diag(off, 1) + np.diag(off, -1))
    return tuple(sorted(ritz.tolist(), key=abs, reverse=True))


def by_block(product: Product, blocks: Blocks, steps: int = 10, most: int | None = None) -> list[Spectrum]:
    """The spectrum of each of the first `most` blocks."""
    found = []
    for number, name in enumerate(blocks.names[:most]):
        one = torch.zeros(len(blocks))
        one[number] = 1.0
        found.append(Spectrum(name, int(blocks.sizes[number]), leading(product, blocks.spread(one), steps)))
    return found


def draw(spectra: Sequence[Spectrum], file: Path, title: str) -> None:
    """Each block's leading eigenvalues as a column of points, in the order of the model."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    figure = Figure(figsize=(max(6, 0.16 * len(spectra)), 5), layout="constrained")
    axes = figure.add_subplot()
    for place, spectrum in enumerate(spectra):
        values = np.abs(spectrum.eigenvalues)
        axes.plot([place] * len(values), values, "o", markersize=3, alpha=0.6, color="C0")
        axes.plot(place, values[0], "o", markersize=5, color="C1")
    axes.set_yscale("log")
    axes.set_xticks(range(len(spectra)), [s.block for s in spectra], rotation=90, fontsize=6)
    axes.set_ylabel("|eigenvalue| of the Hessian's block")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: the picture cannot be written ({error})") from None
