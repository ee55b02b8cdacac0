"""`tacit fit` compared with the real peak memory of a worker and of the server.

    python bench/fit.py                       every case; about half an hour on one core
    python bench/fit.py --only resnet18 vit   those whose name has one of these words
    python bench/fit.py --list

Two measurements, each in separate processes:

- *allocated*: the C library is told to give every block of 64 KB and more its own mapping, which is returned
  when the block is freed. The peak of resident memory is then that of the memory in use, which `fit` counts.
- *resident*: as tacit runs. The heap keeps gaps between blocks in use; how many is partly luck.

A process first does the same with batches of two records, so that libraries have allocated what they keep,
and then returns freed memory. A worker trains two clients. The server runs two rounds with one worker
process; it is not measured again for each way to train, only where it holds different data. Records are made
up; the weights of `minilm` and `smollm2-135m` come from the package registries.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

APART = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""Variables with which resident memory is what is in use."""
VALUES: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "own", "partition": {"kind": "iid", "clients": 2}},
    "model": "mlp",
    "cohort": 2,
    "local": {"steps": 2, "batch": 16, "lr": 0.01},
    "evaluate": {"every": 2, "batch": 4},
    "engine": {"kind": "in-process"},
}
CLIENT = {
    "privacy": {"unit": "client", "noise": 1.0, "delta": 1e-3, "clip": 0.5, "entropy": "seed"},
    "cohort": {"size": 2, "sampling": "fixed"},
}
EXAMPLE = {"privacy": {"unit": "example", "noise": 1.0, "delta": 1e-3, "clip": 0.5, "entropy": "seed"}}
LEVELS: dict[str, dict[str, Any]] = {"none": {}, "client": CLIENT, "example": EXAMPLE}
BF16 = {"engine.precision": "bf16"}
FORGET = {"engine.activation_checkpointing": True}

MLP = {"model": {"name": "mlp", "hidden": [3072, 3072]}}
CNN = {"model": {"name": "cnn"}, "local.batch": 128}
RESNET = {"model": {"name": "resnet18"}, "local.batch": 16}
VIT = {"model": {"name": "vit-tiny"}, "local.batch": 16}
LORA = {"rank": 8, "alpha": 16}
MINILM = {"model": {"hub": "minilm", "lora": {**LORA, "targets": ["query", "value"]}}, "local.batch": 16}
SMOL = {"model": {"hub": "smollm2-135m", "lora": {**LORA, "targets": ["q_proj", "v_proj"]}}, "local.batch": 4}
CTC = {"model": {"name": "ctc-transformer", "size": "tiny"}, "local.batch": 8}

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "mlp": (MLP, "none client example"),
    "mlp + FedAdamW": (MLP | {"method": "fedadamw"}, "none"),
    "cnn": (CNN, "none client example"),
    "resnet18": (RESNET, "none client example"),
    "vit-tiny": (VIT, "none client example"),
    "vit-tiny, bf16": (VIT | BF16, "client example"),
    "vit-tiny, checkpointing": (VIT | FORGET, "client example"),
    "vit-tiny, both": (VIT | BF16 | FORGET, "client"),
    "minilm + LoRA": (MINILM, "client example"),
    "minilm + LoRA, checkpointing": (MINILM | FORGET, "client example"),
    "smollm2 + LoRA": (SMOL, "client example"),
    "smollm2 + LoRA, bf16": (SMOL | BF16, "client"),
    "smollm2 + LoRA, checkpointing": (SMOL | FORGET, "client"),
    "ctc-transformer": (CTC, "none client example"),
}


def dataset(model: Mapping[str, Any]) -> Any:
    """Made-up records of the kind that a model reads."""
    import numpy as np

    import tacit
    from tacit.data import ArrayRecords, Dataset
    from tacit.data.speech.tiny import tiny

    if model.get("name") == "ctc-transformer":
        return tiny(speakers=2, utterances=64)
    rng = np.random.default_rng(0)
    if "hub" in model or "config" in model:
        words = np.array(["a", "the", "cat", "house", "runs", "sees", "red", "old", "again", "and", "then"])
        texts = [" ".join(rng.choice(words, 60)) for _ in range(256)]
        rows = [{"text": text, "y": number % 2} for number, text in enumerate(texts)]
        named = model.get("hub", model.get("config", {}).get("model_type"))
        what: dict[str, Any] = {"label": "y"} if named in ("minilm", "bert") else {"task": "language"}
        tokenizer = model.get("hub", "bytes")
        return tacit.dataset(rows, text="text", tokenizer=tokenizer, max_length=64, **what)
    shape = (1, 16, 16) if model.get("name") == "mlp" else (3, 32, 32)

    def part(count: int) -> ArrayRecords:
        return ArrayRecords(rng.normal(size=(count, *shape)).astype(np.float32), np.arange(count) % 4)

    return Dataset("own", part(1024), part(8), 4, shape, licence="", origin="")


def resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def play_worker(config: Any, data: Any, folder: Path) -> int:
    """Train two clients, and say what that and the model took."""
    import torch

    from tacit.config.build import build_job
    from tacit.engine import InProcess, Order, Participant

    job = build_job(config, folder, None, data)
    state = job.algorithm.init(torch.zeros(job.layout.shared), job.layout)
    message = job.algorithm.message(state)
    for parameter in job.model.parameters():
        parameter.detach().flatten()[::512].sum()  # weights that are mapped are there once they are read
    before = resident("VmRSS:")
    forget_peak()
    engine = InProcess(job, compute=config.engine.one())
    bounding = None
    if job.privacy is not None:
        bounding = job.privacy.bounding(job.privacy.init(), job.upload_sizes, job.layout, 1)
    engine.sum(Order(0, 0.01, bounding=bounding), message, [Participant(0), Participant(1)])
    model = sum(p.nbytes for p in job.model.parameters())  # was there before the engine
    return resident("VmHWM:") - before + model


def play_server(config: Any, data: Any, folder: Path) -> int:
    """Run two rounds, and say what they took in this process, the model among it."""
    import tacit
    from tacit.engine import PoolSettings

    before = resident("VmRSS:")
    forget_peak()
    own = config.engine
    pool = PoolSettings(
        workers=1, precision=own.precision, activation_checkpointing=own.activation_checkpointing
    )
    tacit.run(config, folder, dataset=data, engine=pool, progress=False)
    return resident("VmHWM:") - before


def play(role: str, options: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes measured and estimated, in this very process."""
    import torch

    import tacit
    from tacit.api.fitting import fit

    torch.set_num_threads(1)
    config = tacit.load(VALUES, dict(options))
    run = play_worker if role == "worker" else play_server
    data = dataset(options["model"])
    found = fit(config if role == "server" else config.model_copy(update={"rounds": 1}), data)
    with tempfile.TemporaryDirectory() as scratch:
        run(tacit.load(VALUES, {**options, "rounds": 1, "local.batch": 2}), data, Path(scratch) / "warm")
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        measured = run(config, data, Path(scratch) / "real")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return measured, (found.worker if role == "worker" else found.server).peak


def measure(role: str, cases: Sequence[Mapping[str, Any]], apart: bool) -> list[tuple[int, int]]:
    """Bytes measured and estimated for each case, all in one process; `apart`: what is allocated."""
    command = [sys.executable, __file__, "--one", role, json.dumps([dict(case) for case in cases])]
    environment = {**os.environ, **(APART if apart else {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [(measured, estimated) for measured, estimated in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--roles", nargs="*", default=["worker", "server"])
    parser.add_argument("--batch", type=int, help="records a batch, instead of each case's own number")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps([play(given.one[0], options) for options in json.loads(given.one[1])]))
        return
    print("| model | privacy | role | `fit`, MB | allocated | resident |\n|---|---|---|---|---|---|")
    for name, (options, levels) in CASES.items():
        if not any(word in name for word in given.only):
            continue
        for level in levels.split():
            if given.list:
                print(name, level)
                continue
            if given.batch:
                options = options | {"local.batch": given.batch}
            plain = level != "example" and "," not in name
            for role in given.roles if plain else ["worker"]:
                ((allocated, estimated),) = measure(role, [options | LEVELS[level]], apart=True)
                ((resident, _),) = measure(role, [options | LEVELS[level]], apart=False)
                parts = [name, level, role, f"{estimated / 1e6:.0f}"]
                parts += [f"{size / 1e6:.0f} ({estimated / size - 1:+.0%})" for size in (allocated, resident)]
                print(f"| {' | '.join(parts)} |", flush=True)


if __name__ == "__main__":
    main()
