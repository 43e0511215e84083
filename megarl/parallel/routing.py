"""Compares, records and replays, token by token, the experts that a model's routers choose on this rank.

Megatron's own replay (`moe_enable_routing_replay`) keeps one list for the whole process and remembers one micro-batch; here a pass over
micro-batches belongs to one model, and the experts travel with the tokens, in `Batch.extra_T`.

Axes: T entries of a micro-batch, R rows of it that this rank's routers see (its sequence-parallel shard, padding included), L MoE layers of
this rank, E experts, K experts per token. Experts are int16 [T, L, K], -1 for a token whose experts are not known.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.batch import Batch
from megarl.observe.metrics import Mean, Metric
from megarl.parallel.backend import choose
from megarl.parallel.grid import Grid
from megarl.parallel.packing import Packed
from megarl.parallel.weights import unwrap

ExpertsRecorded = Literal["none", "known", "all"]


class RoutingError(RuntimeError):
    """Experts that should have been replayed were not; the message names the layers."""


class Routing:
    """The routers of a model on this rank.

    Args:
        chunks: the model's chunks on this rank.
        grid: this rank's grid.
    """

    def __init__(self, chunks: Sequence[Any], grid: Grid) -> None:
        self._grid = grid
        # Those of a multi-token prediction layer, which engines do not report, are left alone.
        self._routers = {chunk: [part for part in unwrap(chunk).decoder.modules() if isinstance(part, TopKRouter)] for chunk in chunks}
        self.layers = sorted(router.layer_number - 1 for routers in self._routers.values() for router in routers)
        """This rank's MoE layers, numbered from 0 over all layers of the model."""

    @contextmanager
    def follow(self, column: str, *, replay: bool, record: ExpertsRecorded = "none") -> Iterator[RoutingPass]:
        """Follow the routers through one run over micro-batches, forward only or with backward.

        Args:
            column: the name in `Batch.extra_T` of the experts to compare with and to replay; a batch may lack it.
            replay: send tokens to the experts of `column`, where these are known, instead of those that the router chooses.
            record: the tokens whose experts go into `RoutingPass.recorded`: none, all, or those whose experts are known in `column`.
        """
        routing = RoutingPass(self._routers, self._grid, column, replay=replay, record=record)
        try:
            yield routing
        finally:
            routing.close()


class RoutingPass:
    """One run over micro-batches, created by `Routing.follow` and driven by the schedule."""

    def __init__(
        self, routers: Mapping[Any, Sequence[TopKRouter]], grid: Grid, column: str, *, replay: bool, record: ExpertsRecorded
    ) -> None:
        self._grid, self._column, self._replay, self._record = grid, column, replay, record
        self._layers = {chunk: [_Layer(router, replay=replay) for router in own] for chunk, own in routers.items()}
        self._place = {layer: index for index, layer in enumerate(sorted(self._all, key=lambda layer: layer.number))}
        self._seen: dict[int, Tensor] = {}  # per micro-batch bool [2, T]: differs in some layer; has experts to compare with
        self.recorded: dict[int, Tensor] = {}
        """By micro-batch, the experts of its tokens in this pass; -1 for tokens that this rank's routers did not see."""

    @property
    def _all(self) -> list[_Layer]:
        return [layer for layers in self._layers.values() for layer in layers]

    @contextmanager
    def micro_batch(self, index: int, chunk: Any, batch: Batch, packed: Packed, *, backward: bool, keep: bool = True) -> Iterator[None]:
        """Wrap the forward of one chunk on one micro-batch. What the backward pass recomputes runs outside this context, later.

        Args:
            index: the micro-batch's index in this pass.
            chunk: the model chunk that runs.
            batch: the micro-batch's tokens, with the experts to replay or to compare with.
            packed: where the tokens lie in the model's rows.
            backward: whether a backward pass follows.
            keep: False: the micro-batch is a filler that the caller did not give, and nothing of it is recorded.
        """
        layers = self._layers[chunk]
        entry_T, row_T, rows = self._shard(packed)
        seen_2T = self._seen.setdefault(index, torch.zeros(2, len(batch), dtype=torch.bool))
        experts_TLK = batch.extra_T.get(self._column)
        own = torch.tensor([self._place[layer] for layer in layers])
        for layer in layers:
            layer.target_RK = None
        if layers and experts_TLK is not None:
            target_RLK = torch.full((rows, len(layers), experts_TLK.shape[2]), -1, dtype=torch.int16)
            target_RLK[row_T] = experts_TLK[entry_T[:, None], own]
            target_RLK = target_RLK.to(choose().device)
            for place, layer in enumerate(layers):
                layer.target_RK = target_RLK[:, place].long()
            if self._replay:
                _check_distinct(target_RLK, [layer.number for layer in layers])
        if layers:
            due_N = batch.count_N > 0
            if experts_TLK is not None:  # a response that is not learned from is replayed if its experts were reported
                due_N[batch.seq_T[experts_TLK[:, own[0], 0] >= 0]] = True
            due = int(batch.spread(due_N)[entry_T].count_nonzero())
            for layer in layers:
                layer.begin(due, backward=backward)
        yield
        for layer in layers:
            layer.end()
        if layers and experts_TLK is not None:
            moved_R = torch.stack([layer.moved_R for layer in layers]).any(0).cpu()
            known_R = torch.stack([layer.known_R for layer in layers]).any(0).cpu()
            seen_2T[:, entry_T] |= torch.stack([moved_R, known_R])[:, row_T]
        if keep and layers and (self._record == "all" or (self._record == "known" and experts_TLK is not None)):
            chosen_RLK = torch.stack([layer.chosen_RK for layer in layers], 1).to(torch.int16).cpu()
            if self._record == "known":
                chosen_RLK[~known_R] = -1
            nothing = torch.full((len(batch), len(self._place), chosen_RLK.shape[2]), -1, dtype=torch.int16)
            self.recorded.setdefault(index, nothing)[entry_T[:, None], own] = chosen_RLK[row_T]

    def metrics(self, name: str) -> dict[str, Metric]:
        """Metrics of this rank's tokens whose experts were known; merged over all ranks they cover every token. Collective.

        routing/{name}_changed_frac is the share of their choices (K per token and layer) that the routers made differently,
        routing_by_layer/{name}_changed_{layer} the same by layer, routing/{name}_changed_tokens the share of tokens with at least one such
        choice. routing/replay_hit_rate is the share of (token, layer) pairs that went to the experts to be replayed.
        """
        sums = {layer.number: layer.sums for layer in self._all}
        by_layer = {number: Mean(float(changed), float(compared)) for number, (changed, compared, _) in sums.items()}
        values: dict[str, Metric] = {f"routing_by_layer/{name}_changed_{number}": changed for number, changed in by_layer.items()}
        values[f"routing/{name}_changed_frac"] = functools.reduce(Mean.merge, by_layer.values(), Mean(0.0, 0.0))
        seen_2T = torch.cat([self._seen[index] for index in sorted(self._seen)], dim=1).to(torch.uint8)
        if self._grid.layout.pp > 1:
            seen_2T = seen_2T.to(choose().device)
            dist.all_reduce(seen_2T, op=dist.ReduceOp.MAX, group=self._grid.groups.pp)
        if self._grid.is_last_stage:
            moved, known = seen_2T.sum(1).tolist()
            values[f"routing/{name}_changed_tokens"] = Mean(float(moved), float(known))
        if self._replay:
            sent = sum(sent for _, _, sent in sums.values())
            values["routing/replay_hit_rate"] = Mean(float(sent), float(sum(layer.tokens for layer in self._all)))
        return values

    def check(self) -> None:
        """Raise RoutingError if tokens that should have been replayed were not."""
        faults = [fault for layer in self._all if (fault := layer.fault()) is not None]
        if faults:
            raise RoutingError(f"routing replay on rank {self._grid.rank}: {'; '.join(faults)}")

    def close(self) -> None:
        """Restore the routers to their original state."""
        for layer in self._all:
            layer.close()

    def _shard(self, packed: Packed) -> tuple[Tensor, Tensor, int]:
        """The entries of the micro-batch whose tokens this rank's routers see, their rows, and how many rows there are."""
        rows, row_T = packed.input_ids.shape[1], packed.row_T.cpu()
        if self._grid.layout.tp > 1:  # which always comes with sequence parallelism
            rows //= self._grid.layout.tp
            row_T = row_T - self._grid.tp_rank * rows
        here_T = (row_T >= 0) & (row_T < rows)
        return packed.entry_T[here_T], row_T[here_T], rows


class _Layer:
    """One router during a pass. It is installed as the router's `router_replay`, which Megatron asks for the choice of experts."""

    def __init__(self, router: TopKRouter, *, replay: bool) -> None:
        self._router, self._replay = router, replay
        self.number = router.layer_number - 1
        self.target_RK: Tensor | None = None  # the experts to replay or to compare with, of the micro-batch in its forward
        self.chosen_RK: Tensor  # where the micro-batch's tokens were sent
        self.moved_R: Tensor  # among the tokens in known_R, those that the router itself would have sent elsewhere
        self.known_R: Tensor
        self.tokens = 0  # those to replay: not padding, nor an episode that failed before its first turn, which no engine has read
        self._sums = torch.zeros(3, dtype=torch.int64, device=choose().device)  # choices changed, choices compared, tokens replayed
        self._natural_RK: Tensor | None = None  # the router's own choice
        self._backward = False
        self._inside = False  # in a forward, as opposed to its recomputation in the backward pass
        self._again: deque[Tensor | None] = deque()  # targets of the forwards that the backward will recompute, oldest first
        self._choice = router.router_replay  # see `upstream.SortedTopK`
        router.router_replay = self
        self._handle = router.register_forward_hook(self._after)
        if router.enable_expert_bias:
            router._apply_expert_bias = self._count

    def begin(self, tokens: int, *, backward: bool) -> None:
        """Begin a micro-batch's forward, with `tokens` tokens to replay; `backward`: whether a backward pass follows."""
        self._inside, self._backward, self._natural_RK = True, backward, None
        self.tokens += tokens

    def end(self) -> None:
        """End the micro-batch's forward."""
        self._inside = False

    def get_replay_topk(self, scores_RE: Tensor, *choice: Any) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the experts, [R, K] each; called by Megatron (moe_utils.py:831).

        choice: see `upstream.SortedTopK.get_replay_topk`.
        """
        values_RK, natural_RK = self._choice.get_replay_topk(scores_RE, *choice)
        self._natural_RK = natural_RK
        target_RK = self._wanted()
        if not self._replay or target_RK is None:
            return values_RK, natural_RK
        chosen_RK = torch.where(target_RK >= 0, target_RK, natural_RK)
        return scores_RE.gather(1, chosen_RK), chosen_RK

    @property
    def sums(self) -> tuple[int, int, int]:
        """(choices that the router would have made differently, choices compared, tokens that went to their target experts)."""
        changed, compared, sent = self._sums.tolist()
        return changed, compared, sent

    def fault(self) -> str | None:
        """What went wrong in this layer, in a few words, or None."""
        if self._again:
            return f"layer {self.number}: {len(self._again)} micro-batches were not computed again"
        sent = self.sums[2]
        if self._replay and sent != self.tokens:
            return f"layer {self.number}: {sent} of {self.tokens} tokens went to the experts that they were to go to"
        return None

    def close(self) -> None:
        """Restore the router to its original state."""
        self._handle.remove()
        self._router.router_replay = self._choice
        vars(self._router).pop("_apply_expert_bias", None)

    def _wanted(self) -> Tensor | None:
        """The target of the micro-batch being computed. The backward recomputes each layer's forwards in the order in which they ran."""
        if not self._replay:
            return None
        if not self._inside:
            return self._again.popleft()
        if self._backward and not torch.is_grad_enabled():  # inside an activation checkpoint
            self._again.append(self.target_RK)
        return self.target_RK

    def _after(self, router: TopKRouter, _: Any, output: tuple[Tensor, Tensor]) -> None:
        """Forward hook: record where the tokens went, from the router's output, the map [R, E] of tokens to experts."""
        if not self._inside:
            return
        natural_RK, target_RK, map_RE = self._natural_RK, self.target_RK, output[1]
        if natural_RK is None:
            raise RoutingError(f"layer {self.number}: the router does not ask which experts to take (moe_router_fusion?)")
        self.chosen_RK = natural_RK
        if target_RK is None:
            return
        self.known_R = known_R = target_RK[:, 0] >= 0
        sought_RK = target_RK.clamp(min=0)
        natural_RE = _map_of(natural_RK, map_RE)
        changed_RK = known_R[:, None] & ~natural_RE.gather(1, sought_RK)
        self.moved_R = changed_RK.any(1)
        if self._replay:
            self.chosen_RK = torch.where(known_R[:, None], target_RK, natural_RK)
        sent_R = known_R & map_RE.gather(1, sought_RK).all(1)
        self._sums += torch.stack([changed_RK.sum(), known_R.sum() * target_RK.shape[1], sent_R.sum()])

    def _count(self, map_RE: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, for its bias, by the router's own choice, whatever was replayed."""
        assert self._natural_RK is not None
        type(self._router)._apply_expert_bias(self._router, _map_of(self._natural_RK, map_RE), padding_mask=padding_mask)


def _check_distinct(target_RLK: Tensor, layers: Sequence[int]) -> None:
    """Raise RoutingError if a token is to go to an expert twice: Megatron counts on K experts for each (moe_utils.py:458)."""
    sorted_RLK = target_RLK.sort(dim=2).values
    repeated_L = ((sorted_RLK[..., 1:] == sorted_RLK[..., :-1]) & (sorted_RLK[..., 1:] >= 0)).any(2).sum(0).tolist()
    faults = [f"layer {layer}: {repeated}" for layer, repeated in zip(layers, repeated_L, strict=True) if repeated]
    if faults:
        raise RoutingError(f"routing replay on rank {dist.get_rank()}: tokens that are to go to the same expert twice: {', '.join(faults)}")


def _map_of(experts_RK: Tensor, like_RE: Tensor) -> Tensor:
    """The map [R, E] of tokens to these experts."""
    return torch.zeros_like(like_RE).scatter_(1, experts_RK, True)
