"""The parameters in the flat buffers of Megatron's distributed optimizer, of which each data-parallel rank owns an equal slice."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MUON = "muon"  # a key that only the parameter groups of Muon have
STATES = ("param", "exp_avg", "exp_avg_sq")  # of each parameter, in float32; Muon has no second moment


@dataclass(frozen=True)
class BufferedParameter:
    """A parameter in the flat buffer of a distributed optimizer whose data-parallel ranks own equal slices of it."""

    part: Any  # DistributedOptimizer of the dense or of the expert parameters
    parameter: Tensor
    owners: range  # data-parallel ranks that hold a piece
    cuts: tuple[int, ...]  # where their pieces begin in the flattened parameter, and the end of the last

    @property
    def rank(self) -> int:
        """This rank's number among the data-parallel ones."""
        return self.part.data_parallel_group.rank()

    @property
    def held(self) -> bool:
        """Whether this rank holds a piece of it."""
        return self.rank in self.owners

    @property
    def first(self) -> bool:
        """Whether this rank holds the first piece of it."""
        return self.rank == self.owners.start

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of it."""
        return self.held and len(self.owners) == 1

    @property
    def begin(self) -> int:
        """Where this rank's piece begins in the flattened parameter."""
        return self.cuts[self.rank - self.owners.start]

    @property
    def end(self) -> int:
        """Where this rank's piece ends."""
        return self.cuts[self.rank - self.owners.start + 1]

    @property
    def group(self) -> dict[str, Any]:
        """The optimizer's parameter group that this rank's piece is in."""
        group: dict[str, Any] = self.part.optimizer.param_groups[self.part.model_param_group_index_map[self.parameter][0]]
        return group

    @property
    def main(self) -> Tensor:
        """This rank's piece of the main weights, flat, on the device: the optimizer's own tensor."""
        main: Tensor = self.group["params"][self.part.model_param_group_index_map[self.parameter][1]]
        return main

    @property
    def states(self) -> tuple[str, ...]:
        """The names of its states: those of STATES that its optimizer keeps."""
        return STATES[:2] if MUON in self.group else STATES

    def local(self) -> list[Tensor]:
        """This rank's piece of each of `states`, flat; moments that do not exist yet are zeros."""
        main = self.main
        moments = self.part.optimizer.state.get(main, {})
        # An offloaded optimizer updates copies of its own (named by hybrid_optimizer.py:_sync_sub_optimizers_state_to_hdo).
        names = self.states[1:]
        pieces = [moments.get("master_param", main), *(moments[name] if name in moments else torch.zeros_like(main) for name in names)]
        assert all(tensor.dtype == torch.float32 and len(tensor) == self.end - self.begin for tensor in pieces)
        return [tensor.detach() for tensor in pieces]

    def gather(self, pieces_SN: Tensor) -> Tensor | None:
        """Gather flat tensors of the parameter on the first of its owners. Collective among them; the others send their pieces.

        Args:
            pieces_SN: this rank's piece of each of S tensors.

        Returns:
            The S whole tensors, flat; None on ranks that are not the first.
        """
        group = self.part.data_parallel_group
        if not self.first:
            dist.send(pieces_SN, group=group, group_dst=self.owners.start)
            return None
        pieces = [pieces_SN]
        for begin, end, owner in self._others():
            pieces.append(pieces_SN.new_empty(len(pieces_SN), end - begin))
            dist.recv(pieces[-1], group=group, group_src=owner)
        return torch.cat(pieces, dim=1)

    def scatter(self, whole_N: Tensor | None) -> Tensor:
        """Return this rank's piece of a flat tensor that the first owner has, and the others give as None. Collective among the owners."""
        group = self.part.data_parallel_group
        if whole_N is None:
            piece = torch.empty(self.end - self.begin, dtype=torch.float32, device=self.main.device)
            dist.recv(piece, group=group, group_src=self.owners.start)
            return piece
        for begin, end, owner in self._others():
            dist.send(whole_N[begin:end].contiguous(), group=group, group_dst=owner)
        return whole_N[self.begin : self.end]

    def _others(self) -> Iterator[tuple[int, int, int]]:
        """Where the pieces of all owners but the first begin and end, and whose they are."""
        return zip(self.cuts[1:-1], self.cuts[2:], self.owners[1:], strict=True)


def buffered(part: Any) -> Iterator[BufferedParameter]:
    """Every parameter in the buffers of a distributed optimizer, in the same order on all ranks that share them."""
    ranks = part.data_parallel_group.size()
    for buffer in part.buffers:
        for parameter, (start, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            share, start, end = bucket.grad_data.numel() // ranks, start - bucket.offset, end - bucket.offset
            owners = range(start // share, (end - 1) // share + 1)
            inner = [owner * share - start for owner in owners[1:]]
            yield BufferedParameter(part, parameter, owners, (0, *inner, end - start))
