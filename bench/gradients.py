"""Private steps compared with plain ones, and with Opacus and opake: time and memory as multiples of a plain
step.

    python bench/gradients.py                      every model; about fifteen minutes on two quiet cores
    python bench/gradients.py --models cnn vit_tiny --rounds 7
    python bench/gradients.py --quick              two small models, in a minute

A plain step is a forward pass, a backward pass and SGD's update. A private step is the sum of clipped
gradients, its noise, and the same update. Ours adds the noise of a run: a rounded Gaussian on a grid, from
the cipher. The others add torch's normal numbers, as they do by default.

Time: all methods take turns in one process, and the best of several rounds counts. Memory: each method runs
three steps in its own process. The figure is the peak resident memory (VmHWM) above what was resident before
the first step. By then the model, the flat vectors and the batch are loaded, and so are the libraries that a
method loads at its first use (the last line gives the size of ours: torch's rules for tensors without data).
The three steps include each method's first one, with everything that ours finds out in it. All methods run
with the allocator setting of tacit's workers, which keeps freed memory for the next step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.engine.allocator import keep_freed_memory
from tacit.gradients import Batch, ClippedGradient, Losses, plain_gradient
from tacit.models import build, convolutional
from tacit.privacy import Bits, Clip, ExampleLevel, Poisson
from tacit.vector import Flat

GOALS = {  # time, memory
    "mlp": (1.5, 1.3),
    "cnn": (1.35, 1.3),
    "resnet18": (1.25, 1.3),
    "vit_tiny": (1.2, 1.3),
    "roberta": (1.15, 1.3),
    "roberta-lora": (1.03, 1.05),
}
TOO_LARGE = {("roberta", "hooks"), ("roberta", "opake")}
"""Needs a whole model's gradient for each of 16 texts, several times over: more than 24 GB."""
METHODS = ("plain", "tacit", "hooks", "ew", "ghost", "opake")
LR, BOUND, NOISE = 1e-6, 1.0, 1.0
SMALLEST = "smallest"
"""A model of a few numbers, whose first step has a method load its libraries."""


def classify(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"], reduction="none")


def classify_text(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(input_ids=batch["x"]).logits, batch["y"], reduction="none")


def problem(name: str) -> tuple[nn.Module, Batch, Losses]:
    """A freshly initialised model, random records of the right shape, and the losses."""
    torch.manual_seed(0)
    if name == SMALLEST:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
        return model, {"x": torch.randn(4, 1, 4, 4), "y": torch.arange(4) % 2}, classify
    if name == "mlp":
        model = build("mlp", shape=(1, 28, 28), classes=10, hidden=(200,))
        return model, {"x": torch.randn(50, 1, 28, 28), "y": torch.arange(50) % 10}, classify
    if not name.startswith("roberta"):
        model = build(name, shape=(3, 32, 32), classes=100 if name == "vit_tiny" else 10)
        return model, {"x": torch.randn(50, 3, 32, 32), "y": torch.arange(50) % 10}, classify
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, num_labels=2)
    text: nn.Module = RobertaForSequenceClassification(config).train()
    if name == "roberta-lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, target_modules=["query", "value"], modules_to_save=["classifier"])
        text = get_peft_model(text, adapters)
    return text, {"x": torch.randint(3, 50000, (16, 128)), "y": torch.arange(16) % 2}, classify_text


def step(method: str, name: str) -> Callable[[], None]:
    """One SGD step of `method` on a fresh model, ready to run."""
    model, batch, losses = problem(name)
    if method in ("plain", "tacit"):
        flat = Flat(model)
        clipped = ClippedGradient(flat) if method == "tacit" else None
        mechanism = ExampleLevel(NOISE, 1e-5, Clip(BOUND), Poisson(1.0))
        bits, size = Bits.secret(), len(batch["y"])

        def ours() -> None:
            if clipped is None:
                plain_gradient(flat, batch, losses)
            else:
                clipped(batch, losses, BOUND)
                mechanism.privatize_(flat.grad, bits, size)
            flat.values.sub_(flat.grad, alpha=LR)

        return ours
    if method == "opake":
        return opake_step(model, batch, losses)
    return opacus_step(method, model, batch, losses)


def opake_step(model: nn.Module, batch: Batch, losses: Losses) -> Callable[[], None]:
    """The same step by opake's functions: clip, sum, noise, and a hand-written update."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.random import key
    from torch.func import functional_call

    values = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}

    class Bound(nn.Module):
        """What `losses` calls as the model: the module with the parameters that are to be differentiated."""

        def __init__(self, parameters: dict[str, Tensor]) -> None:
            super().__init__()
            self.parameters_ = parameters

        def __call__(self, *args: Tensor, **names: Tensor) -> object:
            return functional_call(model, {**frozen, **self.parameters_}, args, names)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return losses(Bound(parameters), {"x": x.unsqueeze(0), "y": y.unsqueeze(0)}).sum()

    size = len(batch["y"])
    gradient, clipping = clipped_grad(loss, clipping_norm=BOUND, batch_argnums=(1, 2), normalize_by=size)
    noise, noising = gaussian_noise(noise_multiplier=NOISE, key=key(0))

    def functional_step() -> None:
        nonlocal clipping, noising
        # Our CNN's channels-last layout is more than vmap knows.
        with patch.object(convolutional, "LAYOUT", torch.contiguous_format):
            summed, clipping = gradient(values, batch["x"], batch["y"], state=clipping)
        noised, noising = noise(summed, noising)
        for name, grad in noised.pytree.items():
            values[name].sub_(grad, alpha=LR)

    return functional_step


def opacus_step(mode: str, model: nn.Module, batch: Batch, losses: Losses) -> Callable[[], None]:
    """The same step by Opacus's own recipe for the mode."""
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleExpandedWeights, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

    size = len(batch["y"])
    trainable = [p for p in model.parameters() if p.requires_grad]
    options = {"noise_multiplier": NOISE, "max_grad_norm": BOUND, "expected_batch_size": size}
    sgd = torch.optim.SGD(trainable, lr=LR)
    if mode == "ghost":
        fast = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=BOUND, use_ghost_clipping=True, loss_reduction="sum"
        )
        clip = DPOptimizerFastGradientClipping(sgd, loss_reduction="sum", **options)

        def two_passes() -> None:
            clip.zero_grad()
            found = losses(fast, batch)
            found.sum().backward(retain_graph=True)
            clip.zero_grad()
            factors = fast.get_clipping_coef()
            fast.disable_hooks()
            (found * factors).sum().backward()
            fast.enable_hooks()
            clip.step()

        return two_passes
    wrap = GradSampleModule if mode == "hooks" else GradSampleModuleExpandedWeights
    sampled = wrap(model, loss_reduction="sum")
    optimizer = DPOptimizer(sgd, loss_reduction="sum", **options)

    def one_pass() -> None:
        optimizer.zero_grad()
        losses(sampled, batch).sum().backward()
        optimizer.step()

    return one_pass


def times(name: str, methods: list[str], rounds: int) -> dict[str, float]:
    """Best seconds of each method, all taking turns; a method that cannot run the model is left out."""
    ready, best = {}, {}
    for method in methods:
        if (name, method) in TOO_LARGE:
            print(f"  {name}: {method} left out: more than 24 GB", file=sys.stderr)
            continue
        try:
            ready[method] = step(method, name)
            ready[method]()
            best[method] = float("inf")
        except Exception as error:
            print(f"  {name}: {method} cannot: {str(error).splitlines()[0][:90]}", file=sys.stderr)
            ready.pop(method, None)
    for _ in range(rounds):
        for method, run in ready.items():
            start = time.perf_counter()
            run()
            best[method] = min(best[method], time.perf_counter() - start)
    return best


def status(field: str) -> float:
    """A line of /proc/self/status, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) / 1024
    return float("nan")


def peak(name: str, method: str) -> float:
    """MB that three steps take above the loaded model; meant to run in a process of its own."""
    if name != SMALLEST:
        step(method, SMALLEST)()
    run = step(method, name)
    give_back_freed_memory()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of building the model
    for _ in range(3):
        run()
    return status("VmHWM") - before


def give_back_freed_memory() -> None:
    """What building the model left behind would otherwise be used by the steps without being counted."""
    with suppress(AttributeError, TypeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def peak_elsewhere(name: str, method: str, threads: int) -> float:
    command = [sys.executable, __file__, "--peak", name, method, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(json.loads(done.stdout)) if done.returncode == 0 else float("nan")


def machine() -> str:
    cpu = next(
        (
            s.split(":")[1].strip()
            for s in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in s
        ),
        platform.processor(),
    )
    return f"{cpu}, {os.cpu_count()} cores; torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two small models, three rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "METHOD"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.models, given.rounds = ["mlp", "cnn"], 3
    warnings.simplefilter("ignore")
    keep_freed_memory()
    torch.set_num_threads(given.threads)
    if given.peak:
        print(json.dumps(peak(*given.peak)))
        return
    methods = list(dict.fromkeys(["plain", "tacit", *given.methods]))
    others = [m for m in methods if m not in ("plain", "tacit")]
    print(f"{machine()}; {given.threads} threads\n")
    print("Multiples of a plain SGD step (last column); hooks, ew and ghost are Opacus's modes.")
    print(
        f"{'model':13}{'':7}{'goal':>6}{'tacit':>8}" + "".join(f"{m:>8}" for m in others) + f"{'plain':>12}"
    )
    for name in given.models:
        seconds = times(name, methods, given.rounds)
        megabytes = {m: peak_elsewhere(name, m, given.threads) for m in seconds}
        for what, found, goal, unit in (
            ("time", seconds, GOALS[name][0], f"{seconds['plain']:.2f} s"),
            ("memory", megabytes, GOALS[name][1], f"{megabytes['plain']:.0f} MB"),
        ):
            ratios = {m: found[m] / found["plain"] for m in found}
            line = f"{name:13}{what:7}{goal:>6}{ratios['tacit']:>8.2f}"
            line += "".join(f"{ratios[m]:>8.2f}" if m in ratios else f"{'–':>8}" for m in others)
            print(f"{line}{unit:>12}", flush=True)
    loaded = peak_elsewhere(SMALLEST, "tacit", given.threads) - peak_elsewhere(
        SMALLEST, "plain", given.threads
    )
    print(f"\nLibraries that a first private step loads, not counted above: {loaded:.0f} MB.")


if __name__ == "__main__":
    main()
