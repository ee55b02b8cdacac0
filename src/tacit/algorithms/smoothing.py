"""FedAvg with Laplacian smoothing of each gradient.

Liang, Wang, Gu, Osher and Yao 2020, arXiv:2005.00218.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.algorithms.base import Algorithm, Work
from tacit.lazy import Tensor, torch
from tacit.vector import Vectors


@dataclass(frozen=True)
class FedAvgLS(Algorithm):
    """DP-FedAvg-LS (Liang et al., 2020): y −= η (A⁻¹ g + λ y) per tensor, A = I − σ_ls·(circulant Laplacian).

    Smoothing averages out some of the noise of neighbouring coordinates and keeps each tensor's sum. It is
    post-processing, so it costs no privacy. Weight decay has no noise and is not smoothed.
    """

    sigma_ls: float = 1.0

    def client(self, msg: Vectors, state: Vectors, work: Work) -> tuple[Vectors, Vectors]:
        theta = msg["theta"]
        y = work.load(theta)
        for lr in work.steps():
            g = work.gradient(with_decay=False)
            for segment in work.layout.shared_segments:
                g[segment.slice] = laplacian_smoothing(g[segment.slice], self.sigma_ls)
            if work.weight_decay:
                g.add_(y, alpha=work.weight_decay)
            y.sub_(g, alpha=lr)
        return {"delta": y - theta}, {}


def laplacian_smoothing(u: Tensor, sigma: float) -> Tensor:
    """A⁻¹u = ifft(fft(u)/(1 + 2σ(1 − cos ω))) for a vector u.

    >>> laplacian_smoothing(torch.tensor([4.0, 0.0, 0.0, 0.0]), 1.0).sum()
    tensor(4.)
    """
    omega = 2 * torch.pi * torch.fft.rfftfreq(u.numel(), device=u.device)
    smooth: Tensor = torch.fft.irfft(
        torch.fft.rfft(u) / (1 + 2 * sigma * (1 - torch.cos(omega))), n=u.numel()
    )
    return smooth
