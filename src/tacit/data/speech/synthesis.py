"""A synthetic corpus with the structure of a federation: a seed domain, and another domain of many speakers.

It resembles LibriSpeech and Common Voice (Pelikan et al., 2025), but is made here. The *seed* domain is a few
American voices in a quiet room. The *federated* domain has hundreds of speakers with other accents and
voices, each with its own pitch, pace and noise level, and a heavy-tailed number of utterances. Training,
validation and test have different speakers and different sentences. The speech is synthetic (espeak-ng), and
every name says so.

>>> cast = speakers("federated", 240, 20)
>>> sum(s.split == "train" for s in cast), len({(s.accent, s.variant) for s in cast}) == len(cast)
(240, True)
"""

from __future__ import annotations

import ctypes.util
import hashlib
import json
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np

from tacit import randomness
from tacit.data.speech import espeak, sentences, store
from tacit.data.speech.audio import Wave, resample
from tacit.data.speech.records import hear
from tacit.data.speech.tokens import alphabet
from tacit.errors import UserError
from tacit.fetching import cache

Domain = Literal["seed", "federated"]
DOMAINS: dict[str, Domain] = {"synthetic-speech": "federated", "synthetic-speech-seed": "seed"}
"""The data sets, by their names in a config."""

_VERSION = 1
"""The version of the recipe: increased whenever the same options would give another corpus."""
_SEED_ACCENT = "en-us"
_SEED_VARIANTS = "m1 m3 m7 f1 f2 f5 adam linda steph david belinda max Annie rob Michael Andrea"
_ACCENTS = "en en-029 en-gb-scotland en-gb-x-gbclan en-gb-x-gbcwmd en-gb-x-rp en-us-nyc"
_VARIANTS = (
    "Alex Alicia Andrea Andy Annie AnxiousAndy Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario "
    "Michael Mike Nguyen Reed Storm adam anika announcer antonio aunty belinda benjamin boris caleb david ed "
    "edward edward2 f1 f2 f3 f4 f5 grandma grandpa gustave ian iven iven2 iven3 iven4 john kaukovalta klatt "
    "klatt2 klatt3 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel mike2 norbert pablo paul pedro "
    "quincy rob robert sandro shelby steph steph2 steph3 travis victor zac"
)


@dataclass(frozen=True)
class Speaker:
    """One voice of the corpus, and how much it says."""

    name: str
    split: str
    utterances: int
    accent: str
    variant: str
    pitch: int
    range: int
    speed: int
    """Words a minute."""
    quiet: float
    """How far the room's hiss is below the voice, in dB."""


def speakers(domain: Domain, count: int, utterances: int, seed: int = 0) -> list[Speaker]:
    """The speakers: `count` for training, with about `utterances` each, and others for evaluation.

    Training speakers' numbers of utterances are log-normal, from 2 to ten times the mean; most speakers have
    few.
    """
    rng = randomness.generator(seed, "synthetic speakers", domain)
    if domain == "seed":
        pairs = [(_SEED_ACCENT, variant) for variant in _SEED_VARIANTS.split()]
    else:
        pairs = list(product(_ACCENTS.split(), _VARIANTS.split()))
    apart = {"validation": max(2, count // 10), "test": max(4, count // 6)}
    if count < 1 or count + sum(apart.values()) > len(pairs):
        raise UserError(
            f"{count} {domain} speakers, and others to judge by, cannot be had from {len(pairs)} synthetic "
            f"voices; use 1 to {len(pairs) * 3 // 4 if domain == 'federated' else 10}"
        )
    pairs = [pairs[i] for i in rng.permutation(len(pairs))]
    heavy = np.exp(rng.normal(-0.5, 1.0, count)) * utterances
    sizes = np.clip(np.round(heavy), 2, 10 * utterances).astype(int).tolist()
    cast = []
    for split, number in {"train": count, **apart}.items():
        for i in range(number):
            accent, variant = pairs.pop()
            wide = 1.0 if domain == "federated" else 0.3
            if domain == "seed":
                amount = utterances if split == "train" else 25
            else:
                amount = sizes[i] if split == "train" else 10
            cast.append(
                Speaker(
                    name=f"{domain}-{split}-{i:03d}",
                    split=split,
                    utterances=amount,
                    accent=accent,
                    variant=variant,
                    pitch=int(50 + wide * rng.uniform(-30, 30)),
                    range=int(50 + wide * rng.uniform(-25, 25)),
                    speed=int(175 + wide * rng.uniform(-40, 40)),
                    quiet=float(rng.uniform(12, 40) if domain == "federated" else 50.0),
                )
            )
    return cast


def build(domain: Domain, count: int, utterances: int, vocabulary: int, seed: int = 0) -> str:
    """Make the corpus unless it exists; returns the key of its cache entry. Takes about a minute at the usual
    size.
    """
    recipe = [_VERSION, domain, count, utterances, vocabulary, seed]
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    key = f"synthetic-speech-{domain}-{digest}"
    if cache.has(key):
        return key
    library = _library()
    cast = speakers(domain, count, utterances, seed)
    pool = sentences.short_sentences(longest=5, vocabulary=vocabulary)
    if len(pool) < 100:
        raise UserError(
            f"a vocabulary of {vocabulary} words makes only {len(pool)} sentences; use 50 or more"
        )
    # Validation and test sentences occur in neither domain's training.
    pool = [pool[i] for i in randomness.generator(seed, "synthetic sentences").permutation(len(pool))]
    cut = len(pool) // 8
    pools = {"validation": pool[:cut], "test": pool[cut : 2 * cut], "train": pool[2 * cut :]}
    shards = [
        partial(_speak, speaker, _choose(speaker, pools[speaker.split], seed), library, seed)
        for speaker in cast
    ]
    store.build(
        key,
        shards,
        [speaker.utterances for speaker in cast],
        f"speaking ({domain} domain, {len(cast)} voices)",
        {
            "language": "en",
            "licence": f"sentences {sentences.LICENCE}; sound made here by espeak-ng (GPL-3.0 program)",
            "origin": f"synthetic speech by espeak-ng of sentences from {sentences.ORIGIN}",
        },
    )
    return key


def _choose(speaker: Speaker, pool: list[str], seed: int) -> list[str]:
    """A speaker's sentences: none is repeated before all have been used."""
    rng = randomness.generator(seed, "said", speaker.name)
    order: list[int] = []
    while len(order) < speaker.utterances:
        order += rng.permutation(len(pool)).tolist()
    return [pool[i] for i in order[: speaker.utterances]]


def _speak(speaker: Speaker, said: list[str], library: tuple[str, str], seed: int) -> list[store.Outcome]:
    """All of one speaker's utterances, as features."""
    english = alphabet("en")
    rng = randomness.generator(seed, "hiss", speaker.name)
    outcomes: list[store.Outcome] = []
    for text, clean in zip(said, _voice(speaker, said, library), strict=True):
        level = np.sqrt(np.mean(clean**2)) * 10 ** (-speaker.quiet / 20)
        wave = (clean + level * rng.normal(size=len(clean))).astype(np.float32)
        outcomes.append((speaker.split, hear(wave, english.encode(text), speaker.name)))
    return outcomes


def _voice(speaker: Speaker, said: list[str], library: tuple[str, str]) -> list[Wave]:
    """Sentences as waves at 16 kHz, from a fresh espeak-ng process."""
    voice = {**asdict(speaker), "voice": f"{speaker.accent}+{speaker.variant}", "sentences": said}
    done = subprocess.run(
        [sys.executable, "-I", espeak.__file__, *library],
        input=json.dumps(voice).encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise UserError(f"espeak-ng failed: {done.stderr.decode(errors='replace').strip()[-200:]}")
    (rate,) = struct.unpack_from("<I", done.stdout)
    at, waves = 4, []
    for _ in said:
        (count,) = struct.unpack_from("<I", done.stdout, at)
        samples = np.frombuffer(done.stdout, "<i2", count, at + 4)
        waves.append(resample(samples / 32_768.0, rate))
        at += 4 + 2 * count
    return waves


def _library() -> tuple[str, str]:
    """Paths of espeak-ng's library and of its voices (empty: the library's default)."""
    try:
        import espeakng_loader

        return str(espeakng_loader.get_library_path()), str(espeakng_loader.get_data_path())
    except ImportError:
        found: Any = ctypes.util.find_library("espeak-ng")
        if found:
            return str(found), ""
    raise UserError(
        "synthetic speech needs espeak-ng: pip install 'tacit[speech]', or your system's package espeak-ng"
    )
