"""Torch's Mamba-2 over packed sequences is the recurrence, token by token."""

import torch
from torch import Tensor

from megarl.config import Layout
from megarl.parallel.grid import Grid
from tests.rank_pool import Pool

LENGTHS = (150, 1, 33, 64, 97)  # of up to five chunks


def one_by_one(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """In float64: S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t."""
    x, dt, A, B, C, D = (one.double() for one in (x, dt, A, B, C, D))
    out, start = [], 0
    B, C = (one.repeat_interleave(x.shape[1] // B.shape[1], dim=1) for one in (B, C))
    for length in LENGTHS:
        state = torch.zeros(x.shape[1], x.shape[2], B.shape[2], dtype=torch.float64)
        for t in range(start, start + length):
            state = state * (dt[t] * A).exp()[:, None, None] + (dt[t, :, None] * x[t])[:, :, None] * B[t][:, None]
            out.append(torch.einsum("hpn,hn->hp", state, C[t]) + D[:, None] * x[t])
        start += length
    return torch.stack(out)


def gaps(grid: Grid) -> list[float]:
    """The largest differences of outputs and of each gradient, relative to the largest value; some time steps are 200 times as long."""
    from megarl.parallel.mamba import state_space

    torch.manual_seed(1)
    tokens, heads, groups, size, states = sum(LENGTHS), 6, 2, 4, 8
    dt = torch.rand(tokens, heads) * 0.1
    dt[torch.rand(tokens, heads) < 0.05] *= 200
    shapes = ((tokens, groups, states), (tokens, groups, states), (heads,))
    given = [torch.randn(tokens, heads, size), dt, -torch.linspace(0.1, 60.0, heads), *(torch.randn(shape) for shape in shapes)]
    weight, bounds = torch.randn(tokens, heads, size), torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    results = []
    for packed in (True, False):
        leaves = [one.clone().requires_grad_() for one in given]
        out = state_space(*[*leaves, bounds]) if packed else one_by_one(*leaves)
        results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    return [float((one - two).detach().abs().max() / two.abs().max()) for one, two in zip(*results, strict=True)]


def test_packed_states_and_their_gradients_are_those_of_the_recurrence(pool: Pool) -> None:
    [found] = pool.run(gaps, Layout())
    assert max(found) < 1e-5, found
