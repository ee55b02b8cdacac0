"""bfloat16 and activation checkpointing: what they may change, and what they must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import tacit
from conftest import blobs
from methods_small import configured
from tacit.engine.device import Compute, forget_activations
from tacit.gradients import ClippedGradient, plain_gradient
from tacit.models.resnet import resnet18
from tacit.models.vit import vit
from tacit.tasks import Classification
from tacit.vector import Flat

BF16 = Compute(precision="bf16")
LOSSES = Classification().losses


def model(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    made = vit((1, 8, 8), 4, patch=2, width=24, depth=depth, heads=2)
    nn.init.normal_(made.head.weight, std=0.5)
    return made


def records(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(count, 1, 8, 8, generator=generator), "y": torch.arange(count) % 4}


def clipped(flat: Flat, batch: dict[str, Tensor], bound: float) -> Tensor:
    with BF16.products():
        ClippedGradient(flat, 1)(batch, LOSSES, bound)
    return flat.grad.clone()


def test_a_record_s_share_in_bf16_is_its_own_to_the_bit_and_within_the_bound() -> None:
    flat, batch, bound = Flat(model()), records(3), 0.05
    single = [clipped(flat, {k: v[j : j + 1] for k, v in batch.items()}, bound) for j in range(3)]
    together = clipped(flat, batch, bound)
    assert torch.equal(together, single[0] + single[1] + single[2])
    for share in single:
        assert share.dtype == torch.float32
        norm = float(share.double().norm())
        assert 0.99 * bound < norm <= bound


def test_products_are_taken_in_bf16_and_parameters_are_not() -> None:
    flat, seen = Flat(model(1)), []
    layer = flat.module.layers[0].mlp.up
    layer.register_forward_hook(lambda part, args, out: seen.append(out.dtype))
    with BF16.products():
        plain_gradient(flat, records(2), LOSSES)
    assert seen == [torch.bfloat16]
    assert flat.values.dtype == flat.grad.dtype == torch.float32


@pytest.mark.parametrize("method", ["fedavg", "dp-fedavg", "dp-fedavg-client"])
def test_runs_in_bf16(method: str) -> None:
    noise = {"privacy.noise": 1.0} if method == "dp-fedavg-client" else {}
    options: dict[str, Any] = {"local.batch": 4, "cohort": 2, **noise}
    options |= {"model": {"name": "vit", "width": 12, "depth": 1, "heads": 3}}
    runs = [
        tacit.run(configured(method, options | {"engine.precision": p}), p, dataset=blobs(24), progress=False)
        for p in ("float32", "bf16")
    ]
    thetas = [load_file(Path(r.path) / "checkpoint" / "000002" / "state.safetensors")["theta"] for r in runs]
    assert thetas[1].dtype == torch.float32 and not torch.equal(*thetas)
    assert torch.allclose(*thetas, atol=0.05)


class Wide(nn.Module):
    """A linear network, trained in `dtype`, of records that are float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 4).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1).to(self.layer.weight.dtype)).float()


@pytest.mark.parametrize("method", ["fedavg", "dp-fedavg", "dp-fedavg-client"])
def test_a_model_in_float64_learns_the_same_from_the_same_noise(method: str) -> None:
    noise = {"privacy.noise": 1.0} if method == "dp-fedavg-client" else {}
    config = configured(method, {"local.batch": 4, "cohort": 2, **noise})
    found = []
    for dtype in (torch.float32, torch.float64):
        result = tacit.run(config, str(dtype), dataset=blobs(24, side=4), model=Wide(dtype), progress=False)
        found.append(result.model.layer.weight.detach().double())
    assert torch.allclose(*found, atol=1e-3)


def kept(flat: Flat, batch: dict[str, Tensor]) -> int:
    """Bytes that a step holds between its forward and its backward pass."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        LOSSES(flat.module, batch).sum()
    own = {t.untyped_storage().data_ptr() for t in (flat.values, flat.buffers)}
    return sum(size for pointer, size in found.items() if pointer not in own)


def test_forgotten_activations_change_memory_and_nothing_else() -> None:
    plain, forgetful = Flat(model(8)), Flat(model(8))
    forget_activations(forgetful.module)
    batch = records(8)
    for flat in (plain, forgetful):
        plain_gradient(flat, batch, LOSSES)
    assert torch.equal(plain.grad, forgetful.grad)
    assert kept(forgetful, batch) < 0.2 * kept(plain, batch)


def test_forgotten_activations_under_clipped_gradients_are_taken_record_by_record() -> None:
    plain, forgetful = Flat(model(2)), Flat(model(2))
    forget_activations(forgetful.module)
    first, second = ClippedGradient(plain), ClippedGradient(forgetful)
    for gradient in (first, second):
        gradient(records(3), LOSSES, 0.05)
    assert first.obstacle is None and second.obstacle is not None
    assert torch.allclose(plain.grad, forgetful.grad, atol=1e-6)


def test_transformers_own_switch(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    network = transformers.LlamaForCausalLM(config)
    forget_activations(network)
    assert network.is_gradient_checkpointing


def test_every_block_of_a_residual_network_is_forgotten() -> None:
    plain, forgetful = (Flat(resnet18((3, 16, 16), 4)) for _ in range(2))
    forgetful.values.copy_(plain.values)
    forget_activations(forgetful.module)
    batch = {"x": torch.randn(4, 3, 16, 16), "y": torch.tensor([0, 1, 2, 3])}
    for flat in (plain, forgetful):
        plain_gradient(flat, batch, Classification().losses)
    assert torch.equal(plain.grad, forgetful.grad)
    blocks = [part for part in forgetful.module.modules() if "checkpoint" in repr(vars(part).get("forward"))]
    assert len(blocks) == 8


def test_statistics_of_batches_are_not_counted_twice() -> None:
    with pytest.raises(tacit.UserError, match=r"'1' \(BatchNorm1d\) would count every batch twice"):
        forget_activations(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(tacit.UserError, match="no sequence of equal layers"):
        forget_activations(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
