"""Newton and Schulz's iteration against its definition by singular values in float64, and the matrices that a parameter consists of."""

import pytest
import torch
from torch import Tensor

from megarl.models.weight_ops import QKV, Fused, GateUp, GateUpColumns, Interleaved, Op, Plain, Sections, Transposed
from megarl.parallel.muon import orthogonal, scale


def by_singular_values(x: Tensor, steps: int) -> Tensor:
    """The definition: x = U S V^T becomes U p(S / |x|) V^T, p being `steps` times 3.4445 s - 4.7750 s^3 + 2.0315 s^5."""
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum().sqrt().clamp_min(1e-30)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ (s[:, None] * vt)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other).norm() / other.norm())


@pytest.mark.parametrize(("outputs", "inputs"), [(48, 48), (96, 32), (32, 96), (1, 40), (40, 1)])
@pytest.mark.parametrize("steps", [1, 5, 8])
def test_the_iteration_is_its_polynomial_of_the_singular_values(outputs: int, inputs: int, steps: int) -> None:
    x_BMN = torch.randn(3, outputs, inputs, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-12, 1.0, 1e3])[:, None, None]
    moved = orthogonal(x_BMN, steps, torch.float32)
    for x, own in zip(x_BMN, moved, strict=True):  # whatever their norm: gradients of RL are small
        assert distance(own, by_singular_values(x, steps)) <= 1e-5


def test_its_singular_values_are_near_one() -> None:
    x = torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.linalg.svdvals(orthogonal(x, 5, dtype)[0])
        assert float(values.min()) >= 0.6 and float(values.max()) <= 1.3


def test_a_matrix_without_gradient_stays_and_changes_no_other() -> None:
    """That of an expert without tokens."""
    x_BMN = torch.stack([torch.zeros(16, 24), torch.randn(16, 24, generator=torch.Generator().manual_seed(3))])
    moved = orthogonal(x_BMN, 5, torch.float32)
    assert not moved[0].any() and distance(moved[1], by_singular_values(x_BMN[1], 5)) <= 1e-5


def test_the_scale_is_of_adamws_update_or_the_original() -> None:
    """An orthogonal matrix of rank r has the root mean square sqrt(r / (outputs * inputs)) = 1 / sqrt(max): times the scale, 0.2."""
    orthogonal_rows = torch.linalg.qr(torch.randn(256, 64, generator=torch.Generator().manual_seed(4)))[0].mT
    assert float((orthogonal_rows * scale(64, 256, "match_rms_adamw")).square().mean().sqrt()) == pytest.approx(0.2, rel=1e-5)
    assert scale(64, 256, "original") == 1.0
    assert scale(256, 64, "original") == 2.0


KINDS = (("q", 3), ("k", 2), ("beta", 1))
OPS: dict[str, tuple[Op, list[tuple[int, int]]]] = {
    "plain": (Plain((6, 4), 0), [(6, 4)]),
    "qkv": (QKV(4, 2, 3, (5,)), [(12, 5), (6, 5), (6, 5)]),
    "fused qkv": (Fused(QKV(4, 2, 3, (5,))), [(12, 5), (6, 5), (6, 5)]),
    "gate and up": (GateUp(6, 4), [(6, 4), (6, 4)]),
    "fused gate and up": (Fused(GateUp(6, 4)), [(6, 4), (6, 4)]),
    "columns": (GateUpColumns(6, 4), [(6, 4), (6, 4)]),
    "interleaved": (Interleaved(6, (4,)), [(6, 4), (6, 4)]),
    "transposed": (Transposed(6, 4), [(6, 4)]),
    "sections": (Sections(2, KINDS, (2, 1), (5,)), [(6, 5), (4, 5), (2, 5)]),
    "sections by head": (Sections(2, KINDS, (2, 1), (5,), interleaved=True), [(6, 5), (4, 5), (2, 5)]),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_consists_of_the_matrices_of_its_linear_layers(name: str, ranks: int) -> None:
    """Each [outputs, inputs], however a checkpoint stores them, from any shards, and back into the same shards."""
    op, shapes = OPS[name]
    parts = op.projections
    stored = [torch.randn(shape, generator=torch.Generator().manual_seed(5)) for shape in op.shapes]
    packed = op.pack(stored)
    shards = [op.parameter(packed.chunk(ranks, op.axis or 0)[rank]) for rank in range(ranks)]
    found = parts.join([parts.chunk(shard, ranks) for shard in shards])
    assert [tuple(one.shape) for one in found] == shapes
    again = parts.pack(list(found))
    for rank, shard in enumerate(shards):
        assert torch.equal(parts.parameter(again.chunk(ranks, parts.axis or 0)[rank]), shard)
    assert sorted(torch.cat([one.flatten() for one in found]).tolist()) == sorted(torch.cat([one.flatten() for one in stored]).tolist())


def test_interleaved_rows_are_told_apart() -> None:
    gate, up = torch.arange(8.0).view(2, 4), 10 + torch.arange(8.0).view(2, 4)
    op = Interleaved(2, (4,))
    stored = torch.stack([gate.t(), up.t()], dim=-1).flatten(-2)  # [inputs, gate 0, up 0, gate 1, up 1]
    found = op.projections.unpack(op.pack([stored]))
    assert torch.equal(found[0], gate) and torch.equal(found[1], up)
