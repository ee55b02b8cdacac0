"""Networks by name (`registry`), networks of transformers (`hub`), and which parts are trained (`lora`)."""

from typing import TYPE_CHECKING

from tacit.lazy import lazily

if TYPE_CHECKING:
    from tacit.models.convolutional import cnn
    from tacit.models.dense import logistic, mlp
    from tacit.models.registry import MODELS, build, options
    from tacit.models.resnet import resnet18
    from tacit.models.speech import ctc_transformer
    from tacit.models.vit import vit_tiny

__all__ = [
    "MODELS",
    "build",
    "cnn",
    "ctc_transformer",
    "logistic",
    "mlp",
    "options",
    "resnet18",
    "vit_tiny",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tacit.models.convolutional": "cnn",
        "tacit.models.dense": "logistic mlp",
        "tacit.models.registry": "MODELS build options",
        "tacit.models.resnet": "resnet18",
        "tacit.models.speech": "ctc_transformer",
        "tacit.models.vit": "vit_tiny",
    },
)
