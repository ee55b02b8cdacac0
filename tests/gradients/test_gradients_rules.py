"""Each rule of the clipped gradients against a loop over records, over random shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isolation import assert_isolated
from torch import Tensor, nn
from torch.nn import functional as F

from gradients_reference import assert_exact, squared_outputs
from tacit.gradients.convolution import FEW, Geometry, weight_form
from tacit.gradients.records import Explicit, Outer, PerRecord

sizes = st.integers(1, 6)
batches = st.integers(1, 5)
seeds = st.integers(0, 10**6)
layouts = st.sampled_from([torch.contiguous_format, torch.channels_last])
few = settings(max_examples=40, deadline=None)


def x(*shape: int, layout: torch.memory_format = torch.contiguous_format) -> dict[str, Tensor]:
    return {"x": torch.randn(*shape, dtype=torch.float64).contiguous(memory_format=layout)}


def check(model: nn.Module, batch: dict[str, Tensor]) -> None:
    assert_exact(model.double(), batch, squared_outputs())


@few
@given(batches, st.lists(sizes, max_size=3), sizes, st.integers(1, 40), st.booleans(), seeds)
def test_linear_with_any_leading_dimensions(b, leading, d_in, d_out, bias, seed):
    torch.manual_seed(seed)
    check(nn.Sequential(nn.Linear(d_in, d_out, bias), nn.Linear(d_out, 3, bias)), x(b, *leading, d_in))


@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_linear_by_both_routes(tokens):
    check(nn.Linear(6, 5), x(4, tokens, 6))


@few
@given(batches, st.integers(2, 300), sizes, sizes, seeds)
def test_half_of_two_gram_matrices_is_enough(b, tokens, m, n, seed):
    torch.manual_seed(seed)
    form = Outer(torch.randn(b, tokens, m).double(), torch.randn(b, tokens, n).double())
    torch.testing.assert_close(form.squares(), form.explicit().square().sum((1, 2)))


@pytest.mark.parametrize("tokens", [4, 47, 48, 65, 128, 197, 512])
@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5, 0.0])
def test_squares_are_never_below_what_a_gradient_has(tokens, gap):
    """Tokens that are nearly the same, with signs that cancel: what is left drowns in rounding."""
    torch.manual_seed(tokens)
    for scale in (1.0, 1e3, 1e6):
        left = torch.randn(8, 1, 96) + gap * torch.randn(8, tokens, 96)
        signs = torch.tensor([1.0, -1.0]).repeat(tokens)[:tokens]
        signs[-1] -= signs.sum()  # so that all of them are nothing
        right = signs.view(1, -1, 1) * torch.randn(8, 1, 80) * scale
        form = Outer(left, right)
        exact = torch.bmm(left.double().transpose(1, 2), right.double()).square().sum((1, 2))
        assert (exact <= form.squares().double() * (1 + 2.0**-20)).all()


@few
@given(st.data(), batches, st.sampled_from([1, 2, 3]), sizes, sizes, seeds)
def test_conv2d(data, b, groups, c_in, c_out, seed):
    torch.manual_seed(seed)
    kernel = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    conv = nn.Conv2d(
        c_in * groups,
        c_out * groups,
        kernel,
        stride=data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        padding=data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        dilation=dilation,
        groups=groups,
        bias=data.draw(st.booleans()),
    )
    height, width = data.draw(st.tuples(st.integers(5, 9), st.integers(5, 9)))
    # A second convolution, so that the gradient at the first one is dense.
    images = x(b, c_in * groups, height, width, layout=data.draw(layouts))
    check(nn.Sequential(conv, nn.Conv2d(c_out * groups, 2, 1)), images)


@few
@given(
    batches,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 2),
    st.sampled_from([1, 2]),
    seeds,
)
def test_conv1d(b, kernel, stride, padding, dilation, groups, seed):
    torch.manual_seed(seed)
    conv = nn.Conv1d(4, 6, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)
    check(nn.Sequential(conv, nn.GELU(), nn.Conv1d(6, 2, 1)), x(b, 4, 11))


@pytest.mark.parametrize("channels,pixels", [(2, 16), (48, 4), (48, 16)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolution_by_both_routes(channels, pixels, groups, layout):
    """Few pixels and many channels go by Gram matrices; the other way round, explicitly."""
    conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=groups)
    images = x(3, channels, pixels, pixels, layout=layout)
    check(nn.Sequential(conv, nn.ReLU(inplace=True), nn.Conv2d(channels, 2, 1)), images)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("stride,padding,dilation", [(1, 0, 1), (2, (3, 1), 1), (1, (0, 2), (2, 1))])
def test_records_as_groups_of_a_convolution(stride, padding, dilation, layout):
    """Many pixels and even numbers of channels: `FEW` records at a time, and three that are left."""
    conv = nn.Conv2d(16, 32, (3, 2), stride=stride, padding=padding, dilation=dilation)
    images = x(2 * FEW + 3, 16, 26, 27, layout=layout)["x"].float()
    with patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512"):
        found = per_record_weights(conv, images)
    assert isinstance(found, Explicit)
    expected = weights_one_by_one(conv.double(), images.double())
    for one, other in zip(found.explicit().double(), expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_group_sees_no_other(bad):
    conv, images = nn.Conv2d(16, 32, 3), torch.randn(FEW, 16, 16, 16)
    good = per_record_weights(conv, images).explicit()
    images[3] = bad
    others = torch.arange(FEW) != 3
    assert torch.equal(per_record_weights(conv, images).explicit()[others], good[others])


def per_record_weights(conv: nn.Conv2d, images: Tensor) -> PerRecord:
    """By the rule, for the sum of squares of what the convolution gives."""
    outputs = conv(images).detach()
    geometry = Geometry(conv.kernel_size, conv.stride, conv.padding, conv.dilation, 1)
    return weight_form(images, 2 * outputs, geometry, len(images), tuple(conv.weight.shape))


def weights_one_by_one(conv: nn.Conv2d, images: Tensor) -> Iterator[Tensor]:
    for image in images:
        (grad,) = torch.autograd.grad(conv(image.unsqueeze(0)).square().sum(), conv.weight)
        yield grad


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4)])
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect"])
def test_convolution_with_padding_by_name(padding, kernel, mode):
    check(nn.Conv2d(3, 4, kernel, padding=padding, padding_mode=mode), x(3, 3, 7, 8))


@few
@given(batches, st.integers(1, 30), st.booleans(), seeds)
def test_embedding_with_repeated_tokens_and_padding(b, tokens, padding, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=-6 if padding else None), nn.Linear(4, 3))
    assert_exact(model.double(), {"x": torch.randint(0, 7, (b, tokens))}, squared_outputs())


def test_embedding_of_one_index_per_record():
    assert_exact(nn.Embedding(5, 3).double(), {"x": torch.tensor([0, 3, 3, 1])}, squared_outputs())


@few
@given(batches, st.lists(sizes, max_size=2), st.booleans(), st.booleans(), seeds)
def test_layer_norm(b, leading, bias, two, seed):
    torch.manual_seed(seed)
    shape = (3, 5) if two else (5,)
    norm = nn.LayerNorm(shape, bias=bias)
    nn.init.normal_(norm.weight)
    check(nn.Sequential(nn.Linear(5, 5), norm), x(b, *leading, *shape))


@few
@given(batches, st.sampled_from([1, 2, 3, 6]), st.lists(st.integers(2, 5), min_size=1, max_size=3), seeds)
def test_group_norm(b, groups, space, seed):
    torch.manual_seed(seed)
    norm = nn.GroupNorm(groups, 6)
    nn.init.normal_(norm.weight)
    check(nn.Sequential(norm, nn.Tanh(), nn.GroupNorm(2, 6)), x(b, 6, *space))


@few
@given(batches, st.lists(sizes, max_size=2), seeds)
def test_rms_norm(b, leading, seed):
    torch.manual_seed(seed)
    check(nn.Sequential(nn.Linear(4, 5), nn.RMSNorm(5), nn.Linear(5, 2)), x(b, *leading, 4))


class Bare(nn.Module):
    """Parameters held by a module itself, in the ways that models use them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(1, 5, 6))
        self.scale = nn.Parameter(torch.randn(6))
        self.matrix = nn.Parameter(torch.randn(6, 4))
        self.table = nn.Parameter(torch.randn(9, 2))
        self.gain = nn.Parameter(torch.randn(()))
        self.register_buffer("index", torch.arange(25).view(5, 5) % 9)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        x = self.scale * x / (1 + self.gain.square())
        heads = (x @ self.matrix).view(len(x), 5, 2, 2).transpose(1, 2)
        bias = self.table[self.index].permute(2, 0, 1).unsqueeze(0)
        scores = heads @ heads.transpose(-1, -2) + bias
        out = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
        x = scores.softmax(-1) @ heads - out
        x += self.gain
        return x


@pytest.mark.parametrize("b", [1, 2, 5])
def test_bare_parameters(b):
    check(Bare(), x(b, 4, 6))


class Positions(nn.Module):
    """Position embeddings as GPT-2 looks them up: once, for all records."""

    def __init__(self, expand: bool) -> None:
        super().__init__()
        self.tokens, self.positions, self.expand = nn.Embedding(7, 4), nn.Embedding(6, 4), expand

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        return self.tokens(ids) * self.positions(places.expand(len(ids), -1) if self.expand else places)


@pytest.mark.parametrize("b", [1, 2, 6])
@pytest.mark.parametrize("expand", [False, True])
def test_positions_that_know_no_records(b, expand):
    assert_exact(Positions(expand).double(), {"x": torch.randint(0, 7, (b, 6))}, squared_outputs())


class Tied(nn.Module):
    """One table for the tokens and the output; one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.twice = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.twice(self.twice(self.tokens(ids)).tanh()))


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_tied_weights_and_a_module_called_twice(tokens):
    assert_exact(Tied().double(), {"x": torch.randint(0, 7, (4, tokens))}, squared_outputs())


def test_convolution_called_twice():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    check(nn.Sequential(conv, nn.Tanh(), conv), x(3, 3, 5, 5))


def test_frames_of_a_record_share_a_convolution():
    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3)

        def forward(self, frames: Tensor) -> Tensor:
            return self.norm(self.conv(frames.flatten(0, 1)))

    check(Video(), x(3, 4, 2, 5, 5))


def test_weight_norm_reaches_its_two_parameters():
    check(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), x(3, 5, 4))


def test_residual_and_in_place_functions():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu_()
            y = y + 0
            y += self.second(y.clone())
            return y

    check(Block(), x(3, 4))


def test_input_changed_in_place_after_use_is_an_error():
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0
            y = self.layer(x)
            x.mul_(2)
            return y

    with pytest.raises(RuntimeError, match=r"in ?place"):
        check(Wrong(), x(3, 4))


class Filled(nn.Module):
    """A learnt number in the place of what a mask hides, and a mask over learnt numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.instead, self.scale = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.scale.masked_fill(x > 1, 0.0)
        return x.masked_fill(x < 0, self.instead) * kept


@pytest.mark.parametrize("b", [1, 3])
def test_masked_fill_of_and_with_a_parameter(b):
    check(Filled(), x(b, 5, 4))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight.t(), beta=2, alpha=3)


@pytest.mark.parametrize("b", [1, 3])
def test_options_that_a_rule_does_not_know_are_computed_record_by_record(b):
    assert_isolated(Scaled(4, 3).double(), squared_outputs(), [x(b, 4)], fast=False)


def test_products_called_by_the_names_of_their_arguments():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.layer = nn.Linear(4, 4), nn.Linear(4, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            weight, bias = self.frozen.weight, self.frozen.bias
            x = nn.functional.linear(input=x, weight=weight, bias=bias)
            x = torch.matmul(input=x, other=weight) + torch.mm(input=x, mat2=weight)
            x = torch.addmm(bias, x, weight, beta=0.5, alpha=2.0) + torch.addmm(bias, mat1=x, mat2=weight)
            return nn.functional.linear(x, weight=self.layer.weight, bias=self.layer.bias)

    check(Named(), x(3, 4))


class InPlace(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(4, 3), activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.activation(x)  # what it returns is not looked at
        return x


@pytest.mark.parametrize(
    "activation",
    [
        nn.ELU(inplace=True),
        nn.SELU(inplace=True),
        nn.CELU(inplace=True),
        nn.SiLU(inplace=True),
        nn.Mish(inplace=True),
    ],
    ids=lambda activation: type(activation).__name__,
)
@pytest.mark.parametrize("b", [2, 3, 64])
def test_activations_in_place_are_in_place(activation, b):
    check(InPlace(activation), x(b, 4))


def test_powers_and_sums_in_every_spelling():
    class Spelt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x).sigmoid() + 0.5
            powers = torch.pow(2.0, x) + 2**x + x**x + torch.pow(input=x, exponent=1.5) + x.pow(exponent=2.5)
            turned = torch.stack([powers, x])  # [2, records, 4]
            sums = turned.sum(0) + turned.mean(axis=0) + torch.sum(turned, dim=[0], keepdim=True)[0]
            counts = (turned > 1).sum(0)
            return sums + counts + turned.sum(dim=(0, 2)).unsqueeze(1)

    check(Spelt(), x(3, 4))
