"""What the routers of this rank chose in the forward that just ran, for comparison with the engine's choices.

Axes: R local rows of the packed micro-batch, T its entries here, E experts, L layers of the whole model, K experts a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.parallel.grid import Grid
from megarl.parallel.weights import unwrap


class RouterWatch:
    """Keeps the routing map of each router of the model's last chunk on this rank, from one forward to the next."""

    def __init__(self, chunks: Iterable[Any], grid: Grid) -> None:
        self._tp_rank = grid.tp_rank
        self._map_LRE: dict[int, Tensor] = {}
        routers = [module for module in unwrap(list(chunks)[-1]).modules() if isinstance(module, TopKRouter)]
        self._handles = [router.register_forward_hook(self._keep) for router in routers]

    def _keep(self, router: TopKRouter, _: Any, output: tuple[Tensor, Tensor]) -> None:
        self._map_LRE[router.layer_number - 1] = output[1]

    def changed(self, row_T: Tensor, routes_TLK: Tensor) -> tuple[float, float]:
        """(choices of the engine that the trainer's routers did not make, choices compared).

        Covers the layers of this rank's last chunk and, under sequence parallelism, the rows of this rank's shard.
        """
        differing = compared = 0.0
        for layer, map_RE in self._map_LRE.items():
            row = row_T - self._tp_rank * len(map_RE)
            here = (row >= 0) & (row < len(map_RE))
            engine_TK = routes_TLK[here, layer].long()
            same = torch.gather(map_RE[row[here]], 1, engine_TK)
            differing += float((~same.bool()).sum())
            compared += float(same.numel())
        return differing, compared

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._map_LRE.clear()
