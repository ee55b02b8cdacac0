"""What goes on behind a tape's back: operations that no function on it has asked for, and a library that
looks into data unless it is told that it is being traced.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tacit.gradients.axes import Unsupported
from tacit.gradients.marks import Mark

if TYPE_CHECKING:
    from tacit.gradients.tape import Tape


class Unseen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses an operation that no function on the tape has asked for.

    Scripted code, and code that switches torch's overrides off, would look at all records behind the tape's
    back: a branch on their mean leaves nothing on it. Slow, so it watches a model's comparison alone.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        tape.watchers += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watching = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if self._tape in watching:
            self._tape.refuse(Unsupported(f"{func}, called behind the tape's back", alone=True))
        return func(*args, **(kwargs or {}))


def teach_transformers() -> None:
    """Have transformers take its branch for tracing where it would look into data.

    Before it looks whether any token of a batch is masked (to leave a mask out if none is), transformers asks
    whether it is being traced. To a tape, it is: the mask is then always used.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if original is None or hasattr(original, "_tacit"):
        return

    def is_fake_tensor(x: object) -> bool:
        mark = getattr(x, "_tacit", None)
        return (isinstance(mark, Mark) and mark.token.active and "R" in mark.axes) or bool(original(x))

    is_fake_tensor._tacit = True  # type: ignore[attr-defined]
    module.is_fake_tensor = is_fake_tensor  # type: ignore[union-attr]
