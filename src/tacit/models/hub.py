"""Classifiers and language models of transformers, pretrained (from a folder or the hub) or built from a
config.

The data set decides the number of classes and the kind of model. Pictures (channels, height, width) get an
image classifier, and anything else a text classifier. The task `language` gets a model of the next token, and
`token-classification` one with a class for each token. All weights are 32-bit floats. Weights that a
checkpoint lacks (a new classifier) come from torch's generator.

>>> tiny = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
...         "intermediate_size": 16, "patch_size": 4}
>>> import torch
>>> model = from_config(tiny, shape=(1, 8, 8), classes=5)
>>> model(torch.zeros(2, 1, 8, 8)).logits.shape
torch.Size([2, 5])
>>> from_config({**tiny, "hiden_size": 16}, shape=(1, 8, 8), classes=5)
Traceback (most recent call last):
tacit.errors.UserError: model.config: a vit has no 'hiden_size'; did you mean 'hidden_size'?
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tacit.errors import UserError
from tacit.models.weights import locate
from tacit.reading import from_json, read_text
from tacit.vector.layout import output_layers

Shape = tuple[int, ...]


Frozen = Literal["float32", "bf16", "4bit", "empty"]


def from_hub(
    name: str,
    shape: Shape,
    classes: int,
    language: bool = False,
    offline: bool = False,
    frozen: Frozen = "float32",
    words: bool = False,
    dropout: float | None = None,
) -> nn.Module:
    """The pretrained model `name` (see `weights.locate`), with a fresh output layer if it needs one.

    Its files are memory-mapped and read once, tensor by tensor, in the type that `frozen` asks for; `empty`
    reads only the config. `dropout` replaces every dropout probability of its config; with 0, no layers are
    dropped either.
    """
    transformers = library()
    folder = locate(name, offline)
    config = _read_config(folder)
    auto = _kind(config, shape, language, words, f"model.hub: {name}")
    _refuse_other_pictures(config, shape, name)
    given: dict[str, Any] = {"use_cache": False} if language else {"num_labels": classes}
    given |= _dropouts(config, dropout)
    if frozen == "empty":
        for key, value in given.items():
            setattr(config, key, value)
        with quiet(transformers):
            return _checked(auto.from_config(config, dtype=torch.float32))
    if frozen == "4bit":
        with torch.device("meta"), quiet(transformers):
            heads = output_layers(auto.from_config(config))
        given |= _four_bits(transformers, heads)
    with quiet(transformers):
        try:
            model, report = auto.from_pretrained(
                folder,
                **given,
                local_files_only=True,
                trust_remote_code=False,  # otherwise a user at a terminal is asked whether to run it
                dtype=torch.float32 if frozen == "float32" else torch.bfloat16,
                ignore_mismatched_sizes=True,  # replaces a classifier with other classes
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"model.hub: the weights in {folder} cannot be loaded ({reason})") from None
    _refuse_strangers(model, report, folder)
    return _checked(model)


def from_config(
    config: Mapping[str, Any] | str,
    shape: Shape,
    classes: int,
    language: bool = False,
    words: bool = False,
) -> nn.Module:
    """A model without pretrained weights, from the values of a transformers config or the path of a
    `config.json`.

    For pictures, size and channels are the data set's unless given.
    """
    transformers = library()
    values = _config_file(config) if isinstance(config, str) else dict(config)
    kind = values.pop("model_type", None)
    if kind is None:
        raise UserError("model.config: say which architecture as model_type, for example roberta or vit")
    try:
        default = transformers.AutoConfig.for_model(kind)
    except ValueError:
        close = get_close_matches(str(kind), transformers.CONFIG_MAPPING.keys(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"model.config: transformers has no model_type {kind!r}{hint}") from None
    if not isinstance(config, str):  # a file comes from a program, and may have keys unknown here
        _refuse_unknown(default, values)
    if len(shape) == 3:
        values = _picture_sizes(default, shape) | values
    values |= {"use_cache": False} if language else {"num_labels": classes}
    try:
        built = transformers.AutoConfig.for_model(kind, **values)
        auto = _kind(built, shape, language, words, f"model.config: {kind}")
        if len(shape) == 3:
            _refuse_other_pictures(built, shape, kind)
            _refuse_cut_pictures(built, shape)
        with quiet(transformers):
            return _checked(auto.from_config(built))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"model.config: no {kind} can be built from it ({first_line(error)})") from None


def _dropouts(config: Any, dropout: float | None) -> dict[str, float]:
    """The config's dropout probabilities by name, each with its new value."""
    if dropout is None:
        return {}
    kinds = ("dropout", "pdrop") if dropout else ("drop",)
    return {
        key: dropout
        for key, value in config.to_dict().items()
        if any(kind in key for kind in kinds) and isinstance(value, int | float) and value is not False
    }


def _four_bits(transformers: Any, heads: Sequence[str]) -> dict[str, Any]:
    """Options that keep all matrices except the output layers' in 4 bits (NF4; Dettmers et al.,
    arXiv:2305.14314).
    """
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "model.frozen: 4bit needs bitsandbytes; `pip install bitsandbytes`, or set model.frozen to bf16"
        )
    quantised = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=list(heads),
    )
    # Packed on the device that will use it: a GPU's layout differs from a CPU's.
    place = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    return {"quantization_config": quantised, "device_map": {"": place}}


def library() -> Any:
    """The transformers package; if it is missing, an error that says what to install."""
    try:
        import transformers
    except ImportError:
        raise UserError("this model needs transformers; `pip install 'tacit[transformers]'`") from None
    return transformers


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _read_config(folder: Path) -> Any:
    try:
        return library().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"model.hub: {folder / 'config.json'}: {first_line(error)}") from None


def _config_file(name: str) -> dict[str, Any]:
    file = Path(name).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        values = from_json(read_text(file))
        if not isinstance(values, dict):
            raise ValueError("it is no mapping")
    except (OSError, ValueError) as error:
        raise UserError(f"model.config: {file} cannot be read as a config ({first_line(error)})") from None
    # Labels of another data set would override the number of classes of this one.
    return {k: v for k, v in values.items() if k not in ("id2label", "label2id", "num_labels")}


def _kind(config: Any, shape: Shape, language: bool, words: bool, what: str) -> Any:
    """The transformers family with a model of this config for the task; refused if there is none."""
    transformers = library()
    if language:
        auto, needed = transformers.AutoModelForCausalLM, "predicts the next token"
    elif words:
        auto, needed = transformers.AutoModelForTokenClassification, "classifies tokens"
    elif len(shape) == 3:
        auto, needed = transformers.AutoModelForImageClassification, "classifies pictures"
    else:
        auto, needed = transformers.AutoModelForSequenceClassification, "classifies texts"
    if type(config) not in auto._model_mapping:
        raise UserError(f"{what}: transformers has no {config.model_type} that {needed}, as the data ask for")
    return auto


def _picture_sizes(config: Any, shape: Shape) -> dict[str, Any]:
    channels, height, width = shape
    sizes = {"num_channels": channels, "image_size": height if height == width else [height, width]}
    return {key: value for key, value in sizes.items() if hasattr(config, key)}


def _refuse_other_pictures(config: Any, shape: Shape, name: str) -> None:
    """Refuse a data set with pictures of another size than the model reads."""
    if len(shape) != 3:
        return
    size = getattr(config, "image_size", None)
    expected = shape[1:] if size is None else (size, size) if isinstance(size, int) else tuple(size)
    if expected != shape[1:]:
        raise UserError(
            f"model {name} reads pictures of {expected[0]} × {expected[1]} pixels, and the data set's are "
            f"{shape[1]} × {shape[2]}; set data.size: {expected[0]}"
        )
    channels = getattr(config, "num_channels", shape[0])
    if channels != shape[0]:
        raise UserError(
            f"model {name} reads pictures of {channels} channels, and the data set's have {shape[0]}; use a "
            "data set or a model of the other kind"
        )


def _refuse_cut_pictures(config: Any, shape: Shape) -> None:
    patch = getattr(config, "patch_size", 1)
    if isinstance(patch, int) and (shape[1] % patch or shape[2] % patch):
        raise UserError(
            f"pictures of {shape[1]} × {shape[2]} pixels cannot be cut into patches of {patch}; "
            "set a patch size that divides them"
        )


def _refuse_unknown(default: Any, values: Mapping[str, Any]) -> None:
    for key in values:
        if not hasattr(default, key):
            close = get_close_matches(key, default.to_dict(), n=1)
            hint = f"did you mean {close[0]!r}?" if close else "transformers' documentation lists its keys"
            raise UserError(f"model.config: a {default.model_type} has no {key!r}; {hint}")


def _refuse_strangers(model: Any, report: Mapping[str, Any], folder: Path) -> None:
    """Refuse the weights of another network: they would leave most of this one's random."""
    body = [f"{model.base_model_prefix}.{name}" for name, _ in model.base_model.named_parameters()]
    missing = set(report["missing_keys"]) | {key for key, *_ in report["mismatched_keys"]}
    absent = sum(name in missing for name in body)
    if 2 * absent > len(body):
        raise UserError(
            f"model.hub: {folder} lacks {absent} of the {len(body)} tensors of a {model.config.model_type}; "
            "its weights belong to another kind of model"
        )


def _checked(model: Any) -> nn.Module:
    config = model.config
    if hasattr(model, "score") and config.pad_token_id is None:
        # A decoder classifies at its last token, which it finds by the padding.
        config.pad_token_id = 0
    network: nn.Module = model
    return network.train()


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Silence transformers' remarks on fresh classifiers and its progress bars; errors are still raised."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
