"""Muon (https://kellerjordan.github.io/posts/muon) for the matrices of a model, beside Adam for its other parameters. See muon.md.

Each matrix is updated whole, and by itself, on every layout. Megatron's distributed optimizer cuts its buffers into equal slices: the ranks
that share a parameter send its pieces to the first of them. Tensor parallelism splits it further: its ranks exchange shards, so that each
has its share of the matrices whole, and sends them back updated.

Axes: B matrices of the same shape, M outputs, N inputs; R tensor-parallel ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config import MuonSettings
from megarl.models.description import ModelDescription
from megarl.models.weight_map import is_matrix, is_router
from megarl.models.weight_ops import Op
from megarl.parallel.grid import Grid
from megarl.parallel.slices import MUON, BufferedParameter, buffered
from megarl.parallel.weights import head_of, local_parameters, tensor_parallel

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steepest at 0 among those that keep [0, 1] near 1
TINY = torch.finfo(torch.float32).tiny  # the least norm of a matrix: that of an expert without tokens is 0
RMS = 0.2  # of AdamW's updates, about (https://arxiv.org/abs/2502.16982, section 2.2)
BATCH_BYTES = 128 << 20  # most bytes of a rank's shards that are orthogonalised together (but at least one for each rank)


def orthogonal(x_BMN: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Nearly orthogonal matrices: x = U S V^T becomes U p(S / |x|) V^T, p being `steps` times the polynomial of COEFFICIENTS.

    Args:
        x_BMN: the matrices, in float32; |x| is the Frobenius norm of each.
        steps: of Newton and Schulz's iteration.
        dtype: its precision.

    Returns:
        Float32 [B, M, N], whose singular values are near 1, as far as those of x are not too small beside the greatest.
    """
    a, b, c = COEFFICIENTS
    tall = x_BMN.shape[-2] > x_BMN.shape[-1]
    x = x_BMN.mT if tall else x_BMN
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(TINY)).to(dtype)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


def scale(outputs: int, inputs: int, adjust_lr: str) -> float:
    """The factor on an orthogonal update of a matrix.

    Args:
        outputs: its rows.
        inputs: its columns.
        adjust_lr: see `MuonSettings.adjust_lr`.
    """
    return RMS * max(outputs, inputs) ** 0.5 if adjust_lr == "match_rms_adamw" else max(1.0, outputs / inputs) ** 0.5


@dataclass(frozen=True)
class Matrices:
    """Of what matrices a parameter consists, and how tensor parallelism splits them."""

    op: Op  # between the packed parameter and the matrices (`Op.projections`)
    group: dist.ProcessGroup  # the tensor-parallel ranks
    ranks: int  # of them that have a shard; 1: each has all of it


def matrices_of(chunks: Iterable[Any], model: ModelDescription, grid: Grid, settings: MuonSettings | None) -> dict[Tensor, Matrices]:
    """The parameters of this rank that Muon updates.

    Args:
        chunks: this rank's chunks.
        model: the model.
        grid: this rank's grid.
        settings: the section `optimizer.muon`.
    """
    if settings is None:
        return {}
    chunks = list(chunks)
    parameters = local_parameters(chunks, grid.ep_rank)
    matrices = {}
    for weight in model.weights(head_of(chunks)):
        parameter = parameters.get(weight.name)
        if parameter is None or not parameter.requires_grad:
            continue
        if is_matrix(weight.name) or (settings.routers and is_router(weight.name)):
            ranks = 1 if weight.op.axis is None else tensor_parallel(weight, grid)[1]
            group = grid.groups.tp if weight.expert is None else grid.groups.etp
            matrices[parameter] = Matrices(weight.op.projections, group, ranks)
    return matrices


class MuonBesideAdam:
    """Stands in the place of the Adam of a distributed optimizer of Megatron's, and leaves it all parameter groups but those of matrices.

    It has all parameter groups, in their order, and all states. A matrix has one moment, `exp_avg`.

    Args:
        part: the distributed optimizer.
        of: the matrices of each parameter.
        settings: the section `optimizer.muon`.
    """

    def __init__(self, part: Any, of: Mapping[Tensor, Matrices], settings: MuonSettings) -> None:
        self._adam = part.optimizer
        self.param_groups: list[dict[str, Any]] = self._adam.param_groups
        self.state: dict[Tensor, dict[str, Any]] = self._adam.state
        self._adam.param_groups = [group for group in self.param_groups if MUON not in group]
        for group in self._own():
            group["step"] = 0
        self._held = [one for one in buffered(part) if one.parameter in of and one.held]
        self._of, self._settings = of, settings

    @torch.no_grad()
    def step(self) -> None:
        """Take Adam's step and Muon's. Collective among the ranks that share parameters or have shards of them."""
        self._adam.step()
        for group in self._own():
            group["step"] += 1
        cut = [one for one in self._held if not one.whole]
        flat: dict[Tensor, Tensor | None] = {one.parameter: one.gather(self._direction(one)[None]) for one in cut}
        for matrices, batch in self._batches():
            directions = [self._direction(one) if one.whole else flat[one.parameter] for one in batch]
            shards = [x.view(one.parameter.shape) for one, x in zip(batch, directions, strict=True) if x is not None]
            for one, update in zip(batch, self._updates(matrices, shards, batch[0].parameter.dtype), strict=True):
                if one.whole:
                    _move(one, update.flatten())
                else:
                    flat[one.parameter] = update.flatten()
        for one in cut:
            _move(one, one.scatter(flat[one.parameter]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the main weights, or zero them."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _own(self) -> Iterator[dict[str, Any]]:
        return (group for group in self.param_groups if MUON in group)

    def _direction(self, one: BufferedParameter) -> Tensor:
        """Update the momentum of this rank's piece of a parameter. Return what is to be orthogonalised, flat."""
        main, momentum = one.main, self._settings.momentum
        assert main.grad is not None
        if "exp_avg" not in self.state[main]:
            self.state[main]["exp_avg"] = torch.zeros_like(main)
        average: Tensor = self.state[main]["exp_avg"]
        average.lerp_(main.grad, 1 - momentum)
        return main.grad.lerp(average, momentum) if self._settings.nesterov else average.clone()

    def _batches(self) -> Iterator[tuple[Matrices, list[BufferedParameter]]]:
        """The parameters whose first piece is this rank's, in batches of the same matrices. The same on all tensor-parallel ranks."""
        kinds = dict[Matrices, list[BufferedParameter]]()
        for one in self._held:
            if one.first:
                kinds.setdefault(self._of[one.parameter], []).append(one)
        for matrices, alike in kinds.items():
            size = max(1, BATCH_BYTES // (4 * alike[0].parameter.numel() * matrices.ranks)) * matrices.ranks
            for start in range(0, len(alike), size):
                yield matrices, alike[start : start + size]

    def _updates(self, matrices: Matrices, shards: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The updates of parameters, given this rank's shards of what is to be orthogonalised. Collective among tensor-parallel ranks."""
        op, ranks, settings = matrices.op, matrices.ranks, self._settings
        each = -(-len(shards) // ranks)  # parameters that a rank has whole
        padding = [torch.zeros_like(shards[0])] * (each * ranks - len(shards))
        parts = self._exchanged(torch.stack(shards + padding), matrices).unflatten(0, (ranks, each))
        whole = [op.join([op.chunk(parts[rank, number], ranks) for rank in range(ranks)]) for number in range(each)]
        stacks = [torch.stack(alike) for alike in zip(*whole, strict=True)]
        moved = [orthogonal(x, settings.ns_steps, dtype).mul_(scale(x.shape[1], x.shape[2], settings.adjust_lr)) for x in stacks]
        packed = [op.pack(one) for one in zip(*moved, strict=True)]
        back = [op.parameter(one if op.axis is None else one.chunk(ranks, op.axis)[rank]) for rank in range(ranks) for one in packed]
        return list(self._exchanged(torch.stack(back), matrices))[: len(shards)]

    def _exchanged(self, shards: Tensor, matrices: Matrices) -> Tensor:
        """Send each tensor-parallel rank its part of the first axis. Return their parts for this rank, in rank order."""
        if matrices.ranks == 1:
            return shards
        received = torch.empty_like(shards)
        dist.all_to_all_single(received, shards, group=matrices.group)
        return received


def _move(one: BufferedParameter, update: Tensor) -> None:
    """Take a step of this rank's piece of a parameter, with decoupled weight decay."""
    group = one.group
    one.main.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
