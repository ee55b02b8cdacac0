"""Reference implementations of every method: NumPy in float64, literally from the papers' formulas, sharing
no code with tacit.

Each step names the line of its pseudo-code ("004 A2.8" is line 8 of Algorithm 2 of paper 004, in the
numbering of the recipes; other methods by their own papers), and says so where it departs from it.

The problem is softmax regression on two halves of each record, logits = A x₁ + a + B x₂ + b. It is convex and
has two layers, so per-layer rules and personal parts are meaningful. A step's batch is all of a client's
records, so the only randomness left is the noise, which the caller passes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
State = dict[str, Array]
Gradient = Callable[..., Array]
"""g(y, scale=1): a client's gradient at y, of records whose gradients are scaled by `scale`."""

FIRST, CLASSES = 10, 4
"""Inputs of the first half, and classes."""


def record_gradients(x: Array, labels: NDArray[np.int64], y: Array) -> Array:
    """∇ of each record's cross-entropy at y = (A, a, B, b), one row a record."""
    inputs = x.shape[1]
    sizes = np.cumsum([FIRST * CLASSES, CLASSES, (inputs - FIRST) * CLASSES])
    big_a, a, big_b, b = np.split(y, sizes)
    logits = x[:, :FIRST] @ big_a.reshape(CLASSES, -1).T + a + x[:, FIRST:] @ big_b.reshape(CLASSES, -1).T + b
    odds = np.exp(logits - logits.max(1, keepdims=True))
    residual = odds / odds.sum(1, keepdims=True) - np.eye(CLASSES)[labels]
    return np.concatenate(
        [
            (residual[:, :, None] * x[:, None, :FIRST]).reshape(len(x), -1),
            residual,
            (residual[:, :, None] * x[:, None, FIRST:]).reshape(len(x), -1),
            residual,
        ],
        axis=1,
    )


def tensors(inputs: int) -> list[slice]:
    """Where A, a, B and b are in y."""
    ends = np.cumsum([FIRST * CLASSES, CLASSES, (inputs - FIRST) * CLASSES, CLASSES]).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def shrunk(u: Array, bounds: Sequence[tuple[slice, float]]) -> Array:
    """u with each slice shrunk to its bound if it is longer."""
    u = u.copy()
    for part, c in bounds:
        u[part] *= min(1.0, c / np.linalg.norm(u[part]))
    return u


@dataclass
class Problem:
    """Clients, initial parameters, and the privacy settings."""

    data: list[tuple[Array, NDArray[np.int64]]]
    theta: Array
    steps: int
    lr: Sequence[float]
    """η of each round; there are as many rounds."""
    cohorts: Sequence[Sequence[int]]
    public: tuple[Array, NDArray[np.int64]] | None = None
    local_clip: float = np.inf
    decay: float = 0.0
    """λ of the clients' SGD (000 Table 20, column "Weight Decay"; 004 Appendix C): λ y with each gradient."""
    example_bounds: Sequence[tuple[slice, float]] | None = None
    """Example level: C for each slice of a record's gradient."""
    example_noise: Callable[[int, int], Iterator[Array]] | None = None
    """σC·N(0, I) for each gradient that a client computes in a round."""
    client_bounds: Callable[[str], Sequence[tuple[slice, float]]] | float | None = None
    """Client level: C for all uploads together, or C for each slice of an upload."""
    client_noise: Callable[[int], Iterator[Array]] | None = None
    noise_variance: float = 0.0

    @property
    def clients(self) -> int:
        return len(self.data)

    def rounds(self) -> Iterator[tuple[int, float, Sequence[int]]]:
        return ((r, self.lr[r], self.cohorts[r]) for r in range(len(self.lr)))

    def gradient(self, r: int, i: int) -> Gradient:
        """g, or g̃ = (1/B)[Σ clip_C(g_j) + noise] at example level (B: all of the client's records).

        000 A2.8 (each record's gradient), A2.9 (clipped) and A2.11 (sum, noise, 1/sR). A2.11 prints a factor
        C before N(0, σ²C²): left out, as its own bias term (σC/sR)² has it.
        """
        x, labels = self.data[i]
        noise = self.example_noise(r, i) if self.example_noise else None

        def g(y: Array, scale: Array | float = 1.0, bare: bool = False) -> Array:
            rows = record_gradients(x, labels, y) * scale
            if self.example_bounds is not None:
                rows = np.stack([shrunk(row, self.example_bounds) for row in rows])
            total = rows.sum(0) + (0.0 if noise is None else next(noise))
            mean = total / len(x) + (0.0 if bare else self.decay * y)
            return mean * min(1.0, self.local_clip / np.linalg.norm(mean))

        return g

    def public_gradient(self, y: Array) -> Array:
        assert self.public is not None
        return record_gradients(*self.public, y).mean(0)

    def mean(self, r: int, **uploads: list[Array]) -> list[Array]:
        """The mean of each upload; at client level (1/m)[Σ clip_C(uploads) + noise].

        002 A2.18 (clip) and A2.19, A2.25 (N(0, σ²C²/rN) on each of rN updates is N(0, σ²C²) on their sum);
        003 A1.11 to A1.13, and its Definition 3 for bounds by layer.
        """
        if self.client_bounds is None:
            return [np.mean(vectors, axis=0) for vectors in uploads.values()]
        bounded: list[dict[str, Array]] = []
        for each in zip(*uploads.values(), strict=True):
            upload = dict(zip(uploads, each, strict=True))
            if isinstance(self.client_bounds, float):
                norm = np.sqrt(sum(np.sum(u**2) for u in upload.values()))
                upload = {name: u * min(1.0, self.client_bounds / norm) for name, u in upload.items()}
            else:
                upload = {name: shrunk(u, self.client_bounds(name)) for name, u in upload.items()}
            bounded.append(upload)
        noise = self.client_noise(r) if self.client_noise else None
        return [
            (sum(upload[name] for upload in bounded) + (0.0 if noise is None else next(noise)))
            / len(self.cohorts[r])
            for name in uploads
        ]


def fedavg(
    p: Problem,
    mu: float = 0.0,
    rho: float = 0.0,
    smooth: Callable[[Array], Array] | None = None,
    momentum: float = 0.0,
):
    """y −= η g (McMahan et al. 2017, ClientUpdate); FedProx adds μ(y − θ) to g (Li et al. 2020, Eq. 2);
    FedSAM takes g at y + ρ g/‖g‖ (002 Eqs. 11, 12); LS smooths g (Liang et al. 2020); momentum is heavy ball
    (002, Section 5.1).
    """
    theta, out = p.theta, []
    for r, eta, cohort in p.rounds():
        deltas = []
        for i in cohort:
            g, y, u = p.gradient(r, i), theta, np.zeros_like(theta)
            for _ in range(p.steps):
                step = g(y, bare=True)
                if rho:  # Foret et al. 2021, Eq. 1: the maximum is over the loss, λ‖y‖² stands outside of it
                    step = g(y + rho * step / np.linalg.norm(step), bare=True)
                if smooth:
                    step = smooth(step)
                u = momentum * u + step + p.decay * y + mu * (y - theta)
                y = y - eta * u
            deltas.append(y - theta)
        (delta,) = p.mean(r, delta=deltas)
        theta = theta + delta
        out.append({"theta": theta})
    return out


def laplacian_smoothing(inputs: int, sigma: float) -> Callable[[Array], Array]:
    """A⁻¹ for each tensor, A = I − σ·(second difference on a circle), as a matrix."""

    def smooth(u: Array) -> Array:
        parts = []
        for part in tensors(inputs):
            n = part.stop - part.start
            laplacian = np.roll(np.eye(n), 1, 0) + np.roll(np.eye(n), -1, 0) - 2 * np.eye(n)
            parts.append(np.linalg.solve(np.eye(n) - sigma * laplacian, u[part]))
        return np.concatenate(parts)

    return smooth


def scaffold(p: Problem):
    """Karimireddy et al. 2020, Algorithm 1: line 10 (step), line 12 option II (c_i⁺), lines 16, 17 (server,
    η_g 1).
    """
    theta, c = p.theta, np.zeros_like(p.theta)
    kept: dict[int, Array] = {}
    out: list[State] = []
    for r, eta, cohort in p.rounds():
        deltas, changes = [], []
        for i in cohort:
            g, y, own = p.gradient(r, i), theta, kept.get(i, np.zeros_like(c))
            for _ in range(p.steps):
                y = y - eta * (g(y) - own + c)
            kept[i] = own - c - (y - theta) / (p.steps * eta)
            deltas.append(y - theta)
            changes.append(kept[i] - own)
        delta, change = p.mean(r, delta=deltas, c=changes)
        theta, c = theta + delta, c + len(cohort) / p.clients * change
        out.append({"theta": theta, "c": c, **{f"c of {i}": kept[i] for i in kept}})
    return out


def fedcm(p: Problem, alpha: float = 0.1):
    """Xu et al. 2021, Algorithm 1: v = αg + (1 − α)Δ_t, and Δ_{t+1} = −mean(Δ)/(Kη)."""
    theta, direction, out = p.theta, np.zeros_like(p.theta), []
    for r, eta, cohort in p.rounds():
        deltas = []
        for i in cohort:
            g, y = p.gradient(r, i), theta
            for _ in range(p.steps):
                y = y - eta * (alpha * g(y) + (1 - alpha) * direction)
            deltas.append(y - theta)
        (delta,) = p.mean(r, delta=deltas)
        theta, direction = theta + delta, -delta / (p.steps * eta)
        out.append({"theta": theta, "direction": direction})
    return out


def fedopt(
    p: Problem, rule: str, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
):
    """Reddi et al. 2021, Algorithm 2: FedAdagrad, FedYogi, FedAdam; η_g 0.01 by 004 (Appendix C), β2 and τ by
    Reddi.
    """
    theta, m, v, out = p.theta, np.zeros_like(p.theta), np.zeros_like(p.theta), []
    for r, eta, cohort in p.rounds():
        deltas = []
        for i in cohort:
            g, y = p.gradient(r, i), theta
            for _ in range(p.steps):
                y = y - eta * g(y)
            deltas.append(y - theta)
        (delta,) = p.mean(r, delta=deltas)
        m = beta1 * m + (1 - beta1) * delta
        if rule == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        if rule == "yogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        if rule == "adagrad":
            v = v + delta**2
        theta = theta + lr * m / (np.sqrt(v) + tau)
        out.append({"theta": theta, "m": m, "v": v})
    return out


def fedlada(p: Problem, alpha: float = 0.1, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8):
    """Sun et al. 2023, Algorithm 1: local AdamW moments, v from its average, amended by the last global
    direction.
    """
    theta, v_bar, direction, out = p.theta, np.zeros_like(p.theta), np.zeros_like(p.theta), []
    for r, eta, cohort in p.rounds():
        deltas, moments = [], []
        for i in cohort:
            g, y, m, v = p.gradient(r, i), theta, 0.0, v_bar
            for _ in range(p.steps):
                here = g(y)
                m = beta1 * m + (1 - beta1) * here
                v = beta2 * v + (1 - beta2) * here**2
                y = y - eta * (alpha * m / (np.sqrt(v) + eps) + (1 - alpha) * direction)
            deltas.append(y - theta)
            moments.append(v)
        delta, v_bar = p.mean(r, delta=deltas, v=moments)
        theta, direction = theta + delta, -delta / (p.steps * eta)
        out.append({"theta": theta, "v": v_bar, "direction": direction})
    return out


def fafed(p: Problem, alpha: float = 0.1, beta: float = 0.999, rho: float = 1e-3):
    """Wu et al. 2023 (FAFED), Algorithm 1: a momentum-based variance-reduced m, a denominator fixed within a
    round.
    """
    theta, m_bar, v_bar, out = p.theta, np.zeros_like(p.theta), np.zeros_like(p.theta), []
    for r, eta, cohort in p.rounds():
        deltas, ms, vs = [], [], []
        for i in cohort:
            g, m, v, y, before = p.gradient(r, i), m_bar, v_bar, theta, theta
            for _ in range(p.steps):
                here = g(y)
                m = here + (1 - alpha) * (m - g(before))
                v = beta * v + (1 - beta) * here**2
                before, y = y, y - eta * m / (np.sqrt(v_bar) + rho)
            deltas.append(y - theta)
            ms.append(m)
            vs.append(v)
        delta, m_bar, v_bar = p.mean(r, delta=deltas, m=ms, v=vs)
        theta = theta + delta
        out.append({"theta": theta, "m": m_bar, "v": v_bar})
    return out


def adamw(
    p: Problem,
    starts: str = "",
    alpha: float = 0.0,
    l2: float = 0.0,
    decay: float = 0.0,
    debias: bool = False,
    floor: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
):
    """Local Adam(W) (004 A1), FedAdamW (004 A2), DP-LocalAdamW (000 A2), DP-FedAdamW (001) and 004 Table 7's
    variants.

    `starts`: which of m, v and b (block means of v) begin a round as the average of their last values.
    """
    inputs = p.data[0][0].shape[1]
    blocks = tensors(inputs)
    theta, direction = p.theta, np.zeros_like(p.theta)
    bar = {"m": np.zeros_like(theta), "v": np.zeros_like(theta), "b": np.zeros(len(blocks))}
    out: list[State] = []
    for r, eta, cohort in p.rounds():
        uploads: dict[str, list[Array]] = {"delta": []} | {name: [] for name in starts}
        for i in cohort:
            g, y = p.gradient(r, i), theta
            m = bar["m"] if "m" in starts else np.zeros_like(theta)
            v = bar["v"] if "v" in starts else np.zeros_like(theta)
            if "b" in starts:
                v = np.concatenate(
                    [np.full(s.stop - s.start, b) for s, b in zip(blocks, bar["b"], strict=True)]
                )
            window = 0  # how many gradients v is taken to have seen when the round begins
            if "m" in starts and "v" not in starts and r > 0:  # ours: the paper prints no rule for Agg-m
                window = round(1 / (1 - beta1))
                v = (1 - beta2**window) * (m / (1 - beta1 ** (r * p.steps))) ** 2
            for k in range(1, p.steps + 1):
                t = r * p.steps + k
                here = g(y) + l2 * y  # 004 A2.7; Adam's L2 term where there is one
                m = beta1 * m + (1 - beta1) * here  # 004 A2.8, 000 A2.12
                v = beta2 * v + (1 - beta2) * here**2  # 004 A2.9, 000 A2.13
                # 004 A2.11 and A2.12: m by its own steps k, v by all steps t; 000 A2.14 and A2.15, where both
                # restart.
                m_hat = m / (1 - beta1 ** (t if "m" in starts else k))
                v_hat = v / (1 - beta2 ** (t if "v" in starts or "b" in starts else window + k))
                if debias:  # 001: √(v̂ − (σC/sR)²) + τ; the floor is ours, for v̂ below (σC/sR)²
                    v_hat = np.maximum(v_hat - p.noise_variance, floor * p.noise_variance)
                # 004 A2.13, A2.14; 000 A2.16. They print −λx inside −η(…), which would grow the weights: +λx
                # here.
                y = y - eta * (m_hat / (np.sqrt(v_hat) + eps) + alpha * direction + decay * y)
            uploads["delta"].append(y - theta)
            for name in starts:
                ends = {"m": m, "v": v, "b": np.array([v[s].mean() for s in blocks])}
                uploads[name].append(ends[name])
        delta, *moments = p.mean(r, **uploads)
        bar |= dict(zip(starts, moments, strict=True))  # 004 A2.16 and A2.20
        theta, direction = theta + delta, -delta / (p.steps * eta)  # 004 A2.19 and A2.18
        state = {"theta": theta} | {("v" if name == "b" else name): bar[name] for name in starts}
        out.append(state | ({"direction": direction} if alpha else {}))
    return out


def fedadamw_theory(p: Problem, alpha: float = 0.5, beta2: float = 0.999, eps: float = 1e-8):
    """004 A3 (lines 4, 7, 9, 11, 12, 13: β1 = 0, λ = 0), with γ = Kη, so that θ −= γ Δ_G is θ += mean(Δ)."""
    blocks = tensors(p.data[0][0].shape[1])
    theta, direction, means, out = p.theta, np.zeros_like(p.theta), np.zeros(len(blocks)), []
    for r, eta, cohort in p.rounds():
        deltas, moments = [], []
        for i in cohort:
            g, y = p.gradient(r, i), theta  # A3.4, and v from its means
            v = np.concatenate([np.full(s.stop - s.start, b) for s, b in zip(blocks, means, strict=True)])
            for k in range(1, p.steps + 1):
                here = g(y)  # A3.7, A3.8
                v = beta2 * v + (1 - beta2) * here**2  # A3.9
                v_hat = v / (1 - beta2 ** (r * p.steps + k))  # A3.11
                y = y - eta * (
                    alpha * here / (np.sqrt(v_hat) + eps) + (1 - alpha) * direction
                )  # A3.12, A3.13
            deltas.append(y - theta)  # A3.15
            moments.append(np.array([v[s].mean() for s in blocks]))
        delta, means = p.mean(r, delta=deltas, v=moments)  # A3.19
        direction = -delta / (p.steps * eta)  # A3.17
        theta = theta - p.steps * eta * direction  # A3.18
        out.append({"theta": theta, "v": means, "direction": direction})
    return out


def adadps(p: Problem, beta: float = 0.9, eps: float = 1e-3):
    """Li et al. 2022 (AdaDPS), Algorithm 1 with public data: each record's gradient is scaled, then
    clipped.
    """
    theta, v_bar, out = p.theta, np.zeros_like(p.theta), []
    for r, eta, cohort in p.rounds():
        deltas, moments = [], []
        for i in cohort:
            g, y, v = p.gradient(r, i), theta, v_bar
            for k in range(1, p.steps + 1):
                v = beta * v + (1 - beta) * p.public_gradient(y) ** 2
                v_hat = v / (1 - beta ** (r * p.steps + k))
                y = y - eta * g(y, scale=1 / (np.sqrt(v_hat) + eps))
            deltas.append(y - theta)
            moments.append(v)
        delta, v_bar = p.mean(r, delta=deltas, v=moments)
        theta = theta + delta
        out.append({"theta": theta, "v": v_bar})
    return out


def dp2_fedsam(
    p: Problem,
    rho: float,
    head_lr: Sequence[float],
    momentum: float = 0.0,
    head_steps: int = 0,
    body_steps: int = 0,
):
    """002 A2.6 to A2.9: SGD on the head h (B and b); A2.10 to A2.15: SAM on the body φ (A and a), p by A2.13
    (Eq. 11) and the step by A2.14 (Eq. 12); A2.17: only φ's move is sent; A2.22 to A2.24: who was not drawn
    keeps its head.
    """
    body = FIRST * CLASSES + CLASSES
    phi, initial = p.theta[:body], p.theta[body:]
    heads: dict[int, Array] = {}
    out: list[State] = []
    for r, eta, cohort in p.rounds():
        deltas = []
        for i in cohort:
            g, h = p.gradient(r, i), heads.get(i, initial)  # A2.5
            u = np.zeros_like(h)
            for _ in range(head_steps or p.steps):  # A2.6
                u = momentum * u + g(np.concatenate([phi, h]))[body:]  # A2.7, at φ^t
                h = h - head_lr[r] * u  # A2.8
            y, u = phi, np.zeros_like(phi)  # A2.10
            for _ in range(body_steps or p.steps):  # A2.11
                step = g(np.concatenate([y, h]))[:body]  # A2.12, at φ^{t,s} as Eq. 11 has it, not at φ^t
                if rho:  # A2.13 by Eq. 11, A2.14 by Eq. 12
                    step = g(np.concatenate([y + rho * step / np.linalg.norm(step), h]))[:body]
                u = momentum * u + step
                y = y - eta * u
            deltas.append(y - phi)  # A2.16, A2.17
            heads[i] = h  # A2.10; A2.23 for everyone else
        (delta,) = p.mean(r, delta=deltas)  # A2.18, A2.19
        phi = phi + delta  # A2.25
        out.append({"theta": phi, **{f"personal of {i}": heads[i] for i in heads}})
    return out


def fedlamb(p: Problem, lr: float, beta1: float = 0.9, beta2: float = 0.999, xi: float = 1e-6):
    """003 A1: clients' SGD with local clip (line 10); LAMB on the server (its Eqs. 8 to 11; You et al. 2020,
    Algorithm 2), each tensor with its own trust ratio.
    """
    theta, m, v, out = p.theta, np.zeros_like(p.theta), np.zeros_like(p.theta), []
    for r, eta, cohort in p.rounds():
        deltas = []
        for i in cohort:
            g, y = p.gradient(r, i), theta
            for _ in range(p.steps):
                y = y - eta * g(y)
            deltas.append(y - theta)
        (delta,) = p.mean(r, delta=deltas)  # the paper's Δ has the other sign
        m = beta1 * m + (1 - beta1) * -delta  # Eq. 9
        v = beta2 * v + (1 - beta2) * delta**2
        # Eq. 8, λ = 0; the bias is corrected as in You et al. and in optax, though Eq. 9 does not print it.
        u = (m / (1 - beta1 ** (r + 1))) / (np.sqrt(v / (1 - beta2 ** (r + 1))) + xi)
        theta = theta.copy()
        for part in tensors(p.data[0][0].shape[1]):
            theta[part] -= lr * np.linalg.norm(theta[part]) / np.linalg.norm(u[part]) * u[part]
        out.append({"theta": theta})
    return out


def local_layerwise(
    p: Problem, rule: str, trust: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, xi: float = 1e-6
):
    """LARS (You et al., 2017, Algorithm 1) or LAMB (You et al., 2020, Algorithm 2) on each client, from
    zero.
    """
    theta, out = p.theta, []
    for r, eta, cohort in p.rounds():
        deltas = []
        for i in cohort:
            g, y, m, v = p.gradient(r, i), theta, np.zeros_like(theta), np.zeros_like(theta)
            for k in range(1, p.steps + 1):
                here, new = g(y), y.copy()
                v = beta2 * v + (1 - beta2) * here**2
                if rule == "lamb":
                    m = beta1 * m + (1 - beta1) * here
                    u = m / (1 - beta1**k) / (np.sqrt(v / (1 - beta2**k)) + xi)
                for part in tensors(p.data[0][0].shape[1]):
                    size = np.linalg.norm(y[part])
                    if rule == "lamb":
                        new[part] -= eta * size / np.linalg.norm(u[part]) * u[part]
                    else:
                        m[part] = (
                            beta1 * m[part] + eta * trust * size / np.linalg.norm(here[part]) * here[part]
                        )
                        new[part] -= m[part]
                y = new
            deltas.append(y - theta)
        (delta,) = p.mean(r, delta=deltas)
        theta = theta + delta
        out.append({"theta": theta})
    return out
