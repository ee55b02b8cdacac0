"""Losses: one for each record, never their sum."""

from __future__ import annotations

from torch import Tensor

from tacit.gradients.axes.call import Call, made, makes, plain, table
from tacit.gradients.axes.elements import pointwise


def _nll(call: Call) -> list[str]:
    scores, target = call["self"], call["target"]
    if call["reduction"] != 0:
        raise call.refuse("adds up the losses")
    plain(call, "weight")
    axes = call.touch(scores, [1 if scores.dim() > 1 else 0])
    axes = axes[:1] + axes[2:] if scores.dim() > 1 else ""
    size = (*scores.shape[:1], *scores.shape[2:]) if scores.dim() > 1 else ()
    return [call.meet([(axes, size), (call.axes(target), target.shape)]), ""]


def _loss(call: Call) -> str:
    if call["reduction"] != 0:
        raise call.refuse("adds up the losses")
    return pointwise(call)


@makes
def _ctc(call: Call) -> Tensor:
    scores, targets = call["log_probs"], call["targets"]
    if call["reduction"] != 0 or scores.dim() != 3 or targets.dim() != 2:
        raise call.refuse("adds up or has one record")
    call.touch(scores, [0, 2])
    call.touch(targets, [1])
    shapes = [(call.axes(scores)[1], scores.shape[1:2]), (call.axes(targets)[0], targets.shape[:1])]
    for name in ("input_lengths", "target_lengths"):
        if isinstance(call[name], Tensor):
            shapes.append((call.axes(call[name]), call[name].shape))
        elif len(set(call[name])) > 1:
            raise call.refuse("with lengths that differ by place")
    return made(scores.shape[1:2], scores.dtype, call.meet(shapes))


RULES = table(
    (_ctc, "ctc_loss"),
    (_nll, "nll_loss_forward nll_loss2d_forward"),
    (_loss, "mse_loss binary_cross_entropy smooth_l1_loss huber_loss soft_margin_loss"),
    (_loss, "binary_cross_entropy_with_logits"),
)
