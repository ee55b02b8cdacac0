"""The section `model` of a config: the network, its initial weights, and the parts that are trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tacit.section import Open, as_name, section


@section
class Lora:
    """Low-rank adapters: their rank r, α, the layers they sit beside, and dropout on what goes into them.

    They are trained beside frozen layers, and the output layers with them.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    targets: tuple[str, ...] = ("query", "value")
    """Last part of the layers' names; query, key and value mean a model's own, whatever it calls them."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Model(Open):
    """The network: `name` or `import` (other keys are options), `hub` or `config`; a bare name is a name."""

    name: str | None = None
    hub: str | None = None
    """A pretrained model of transformers: a folder, a name on the hub, or `minilm`. `dropout: 0.0` beside it
    is for all that its own config calls so; then what frozen first layers make of a record is kept."""
    config: dict[str, Any] | str | None = None
    """A transformers config with its model_type, or the path of a config.json: a network without weights."""
    start: str | None = None
    """Weights to begin with: a run (`tacit pretrain`), a .safetensors file, or a folder with one."""
    public: bool = False
    """What `start` was trained on needs no protection, although some of it may be in this run too."""
    lora: Lora | None = None
    train: tuple[str, ...] | None = None
    """Patterns of the parameters that are trained; `head` is the output layers. Left out: all, or LoRA's."""
    frozen: Literal["float32", "bf16", "4bit"] = "float32"
    """How parameters that are not trained are kept; 4bit needs bitsandbytes."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return as_name(value)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("name", "hub", "config") if getattr(self, key) is not None]
        if len(given) != 1:
            named = f"not {' and '.join(given)} together" if given else "none is given"
            raise ValueError(f"give one of name, hub and config ({named})")
        strange = [] if self.name else [key for key in self.options if key != "dropout" or self.hub is None]
        if strange:
            known = ", ".join([*type(self).model_fields, *(["dropout"] if self.hub else [])])
            raise ValueError(f"unknown key {strange[0]!r}; known keys are {known}")
        share = self.hub_dropout
        if share is not None and not (isinstance(share, int | float) and 0 <= share < 1):
            raise ValueError(f"dropout: give a share from 0 to below 1 (got {share!r})")
        if self.frozen != "float32" and self.lora is None and self.train is None:
            raise ValueError(f"frozen: {self.frozen}, but every parameter is trained; set lora, or train")
        if self.frozen == "4bit" and self.hub is None:
            raise ValueError("frozen: 4bit is for pretrained weights; set hub")
        return self

    @property
    def hub_dropout(self) -> float | None:
        """The dropout that replaces a pretrained model's own; a network by name has it among its options."""
        return None if self.hub is None else self.options.get("dropout")
