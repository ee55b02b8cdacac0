"""Pooling, padding and resizing: neighbours within a record."""

from __future__ import annotations

from tacit.gradients.axes.call import Call, Rule, table


def _space(dims: int) -> Rule:
    """Pooling, padding and resizing of the last `dims` dimensions."""

    def rule(call: Call) -> str:
        tensor = call.tensors[0]
        return call.touch(tensor, range(tensor.dim() - dims, tensor.dim()))

    return rule


def _images(call: Call) -> str:
    """[N, …] → [N, …], image by image."""
    tensor = call.tensors[0]
    if tensor.dim() != call.out.dim() and call.name not in ("aten.im2col", "aten.col2im"):
        raise call.refuse("of another shape")
    axes = call.touch(tensor, range(1, tensor.dim()))
    return axes[:1] + "." * (call.out.dim() - 1)  # type: ignore[no-any-return]


def _grid(call: Call) -> str:
    tensors = [call["input"], call["grid"]]
    for tensor in tensors:
        call.touch(tensor, range(1, tensor.dim()))
    first = call.meet([(call.axes(t)[:1], t.shape[:1]) for t in tensors])
    return first + "." * (call.out.dim() - 1)  # type: ignore[no-any-return]


def _pad(call: Call) -> str:
    tensor, pad = call["self"], call["pad"]
    dims = [tensor.dim() - 1 - i // 2 for i, n in enumerate(pad) if n]
    axes = list(call.axes(tensor))
    for dim in dims:
        if axes[dim] == "R":
            raise call.refuse()
        axes[dim] = "."
    return "".join(axes)


RULES = table(
    (_space(1), "max_pool1d avg_pool1d upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d"),
    (_space(1), "reflection_pad1d replication_pad1d adaptive_avg_pool1d adaptive_max_pool1d"),
    (_space(2), "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d"),
    (_space(2), "adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"),
    (_space(2), "_upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d"),
    (_space(2), "replication_pad2d max_pool2d"),
    (_space(3), "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d max_pool3d"),
    (_space(3), "upsample_nearest3d upsample_trilinear3d reflection_pad3d replication_pad3d pixel_shuffle"),
    (_space(3), "pixel_unshuffle"),
    (_images, "im2col col2im channel_shuffle native_channel_shuffle"),
    (_grid, "grid_sampler_2d grid_sampler_3d grid_sampler"),
    (_pad, "constant_pad_nd pad"),
)
