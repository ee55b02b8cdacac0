"""One federated round of the full-size recogniser: `python bench/speech.py`.

Paper 003's 255M model, two clients of one step each (some seconds of sound), client-level privacy with
per-layer clipping, and LAMB on the server. Prints the round's time, the peak memory of the process, and the
cost of the layer statistics (goal: at most 2 % of a round). The sound is random: nothing is learnt.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import tacit
from tacit.data import Dataset
from tacit.data.speech.records import Heard, gather
from tacit.vector import Layout, read_values


def corpus(clients: int, utterances: int, seconds: float) -> Dataset:
    """Random features and transcripts of a plausible length."""
    rng = np.random.default_rng(0)
    frames = int(100 * seconds)

    def said(speaker: str) -> Heard:
        x = rng.normal(size=(frames, 80)).astype(np.float16)
        return Heard(x, rng.integers(2, 30, int(14 * seconds)), speaker, seconds)

    train = gather(said(f"speaker {c}") for c in range(clients) for _ in range(utterances))
    return Dataset("noise", train, gather([said("judge")]), classes=30, shape=(80,), task="speech")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="base", help="base, narrow, wide, shallow, deep or tiny")
    parser.add_argument("--utterances", type=int, default=2, help="of a client, all in its one step")
    parser.add_argument("--seconds", type=float, default=10.0, help="of sound in an utterance")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config = tacit.load(
        {
            "rounds": 1,
            "data": {"name": "synthetic-speech", "partition": {"kind": "natural"}},
            "model": {"name": "ctc-transformer", "size": given.size},
            "method": "dp-fedlamb",
            "privacy": {"entropy": "seed"},
            "cohort": {"size": 2},
            "local": {"steps": 1, "seconds": given.utterances * given.seconds, "lr": 0.2},
            "evaluate": {"layers": True, "batch": 1},
            "engine": {"workers": 0, "threads": given.threads},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        result = tacit.run(config, Path(folder) / "run", dataset=corpus(2, given.utterances, given.seconds))
        whole = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    record = result.metrics[-1]
    layout = Layout.of(result.model)
    delta = read_values(result.model, layout)
    layout.layer_norms(delta)
    start = time.perf_counter()
    layout.layer_norms(delta)
    statistics = record["clients"] * (time.perf_counter() - start)
    print(f"{layout.size:,} parameters, {record['clients']} clients of one step on {given.utterances} × "
          f"{given.seconds:g} s, {given.threads} threads")  # fmt: skip
    print(f"round (training, clipping, noise, LAMB, one test utterance): {record['seconds']:.1f} s")
    print(f"everything (model built, round, 3 vectors saved): {whole:.1f} s; peak memory {peak:.1f} GB")
    print(f"layer statistics: {statistics:.2f} s, {100 * statistics / record['seconds']:.2f} % of the round")


if __name__ == "__main__":
    main()
