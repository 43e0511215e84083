"""Runs forward and backward over micro-batches with Megatron's pipeline schedules, and does all scaling of the loss.

Invariant: the gradient is exactly that of the sum of `loss_sum` over all data-parallel and context-parallel ranks and all micro-batches.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megarl.batch import EXPERTS, Batch
from megarl.parallel.backend import choose
from megarl.parallel.grid import Grid
from megarl.parallel.packing import Packed, pack_micro
from megarl.parallel.predictor import PredictorPass, with_second_targets
from megarl.parallel.routing import RoutingPass

# Arguments: logits [R, V] of the local rows and vocabulary shard; row_T, the row on the R axis of each entry's logits; the local entries.
LossFn = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Any]]


def run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    grid: Grid,
    *,
    forward_only: bool,
    routing: RoutingPass | None = None,
    predictor: PredictorPass | None = None,
) -> list[Any]:
    """Run every micro-batch forward and, unless `forward_only`, backward. Collective.

    Gradients are left in the chunks' buffers (see `optimizer`), reduced over all ranks.

    Args:
        chunks: this rank's model chunks.
        micro_batches: whole sequences, the same list on all ranks of a data-parallel replica, equally many on every replica. One without
            entries still runs, because other ranks have some; `loss_fn` is not called for it.
        loss_fn: called on the ranks of the last stage with (logits_RV [R, V], row_T [T], batch_T): entry t of `batch_T` (this
            context-parallel rank's share of the micro-batch, in any order) is scored from logits_RV[row_T[t]]; other rows are padding. It
            returns (loss_sum, result): loss_sum is a scalar that counts each entry once (the ranks of one tensor-parallel group return
            the same).
        grid: this rank's grid.
        forward_only: compute no gradients.
        routing: follows the routers; None: they are left alone.
        predictor: runs the multi-token prediction layer, and adds its loss; the batches then have weights. None: the layer does not run.

    Returns:
        The results of `loss_fn`, in the order of the micro-batches, on the last stage; [] elsewhere.

    Raises:
        ValueError: there is no micro-batch.
        RuntimeError: ranks have different numbers of micro-batches.
    """
    _agree(len(micro_batches), grid)
    if predictor is not None:
        micro_batches = [with_second_targets(batch) for batch in micro_batches]
    step = _Step(chunks, micro_batches, loss_fn, grid, forward_only, routing, predictor)
    with torch.set_grad_enabled(not forward_only):
        step.run()
    _drop_graph(chunks)
    return step.results


class _Step:
    """One call of `run`."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        micro_batches: Sequence[Batch],
        loss_fn: LossFn,
        grid: Grid,
        forward_only: bool,
        routing: RoutingPass | None,
        predictor: PredictorPass | None,
    ) -> None:
        self.chunks, self.loss_fn, self.grid, self.forward_only, self.routing = list(chunks), loss_fn, grid, forward_only, routing
        self.predictor = predictor
        self.config = get_model_config(self.chunks[0])
        self.results: list[Any] = []
        self.count = len(micro_batches)
        # The interleaved schedule needs whole rounds of pp micro-batches (schedules.py:1145); empty ones fill the last round.
        missing = -self.count % grid.layout.pp if grid.layout.vpp else 0
        self.batches = [*micro_batches, *([micro_batches[0].take(torch.empty(0, dtype=torch.int64))] * missing)]
        device = choose().device
        self.packed = [
            pack_micro(batch, cp_rank=grid.cp_rank, cp_size=grid.cp_size, tp=grid.layout.tp, device=device) for batch in self.batches
        ]

    def run(self) -> None:
        for chunk in self.chunks:
            chunk.train(not self.forward_only)
        work = [iter(list(zip(range(len(self.batches)), self.batches, self.packed, strict=True))) for _ in self.chunks]
        assert self.config.grad_scale_func is None
        self.config.grad_scale_func = self._filled
        try:
            get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=work if len(work) > 1 else work[0],
                model=self.chunks,
                num_microbatches=len(self.batches),
                seq_length=1,  # this and the next argument are ignored: stages exchange shapes
                micro_batch_size=1,
                forward_only=self.forward_only,
            )
        finally:
            self.config.grad_scale_func = None

    def _filled(self, loss: Tensor) -> Tensor:
        # Megatron divides by the number of micro-batches it runs, fillers included. This scales the main and the auxiliary losses alike.
        return loss * (len(self.batches) / self.count)

    def _forward(self, work: Iterator[tuple[int, Batch, Packed]], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        index, batch, packed = next(work)
        filler = not len(batch)
        if filler:
            chunk.eval()  # without entries there is no auxiliary loss: Megatron's would be 0 / 0
        routing, backward = self.routing, not self.forward_only
        keep = index < self.count
        following = nullcontext() if routing is None else routing.micro_batch(index, chunk, batch, packed, backward=backward, keep=keep)
        with following, nullcontext() if self.predictor is None else self.predictor.reading(chunk) as trunk:
            output = chunk(
                packed.input_ids, packed.position_ids, None, packed_seq_params=packed.params, padding_mask=self._padding(packed, chunk)
            )
        drafted_RV = None
        if self.predictor is not None and trunk is not None:
            drafted_RV = self.predictor.logits(trunk, chunk, batch, packed)
        if filler:
            chunk.train(not self.forward_only)
        return output, functools.partial(self._loss, batch.without(*EXPERTS), packed, drafted_RV)

    def _padding(self, packed: Packed, chunk: torch.nn.Module) -> Tensor | None:
        """The router's padding mask. Upstream shards it over the sequence on the first stage only (gpt_model.py:352)."""
        mask = packed.padding_mask
        if mask is None or not self.config.sequence_parallel or get_attr_wrapped_model(chunk, "pre_process"):
            return mask
        return mask.chunk(self.grid.layout.tp, dim=1)[self.grid.tp_rank]

    def _loss(self, batch: Batch, packed: Packed, drafted_RV: Tensor | None, output_1RV: Tensor) -> tuple[Tensor, None]:
        logits_RV = output_1RV.squeeze(0)
        if not len(batch):
            nothing = logits_RV[0].float().sum() * 0
            return nothing if drafted_RV is None else nothing + drafted_RV[0].float().sum() * 0, None
        entries = batch.take(packed.entry_T).to(logits_RV.device)
        loss, result = self.loss_fn(logits_RV, packed.row_T, entries)
        assert self.forward_only or loss.requires_grad, "loss_fn returned a loss without a graph"
        self.results.append(result)
        if self.predictor is not None and drafted_RV is not None:
            loss = loss + self.predictor.loss(drafted_RV, packed.row_T, entries)
        # Megatron multiplies by cp and divides by its micro-batches (schedules.py:340), then by dp * cp (distributed_data_parallel.py:212).
        return loss * (self.count * self.grid.dp_size), None


def _drop_graph(chunks: Sequence[torch.nn.Module]) -> None:
    """Release the last micro-batch's autograd graph, of which Megatron's token dispatchers keep a tensor (token_dispatcher.py:636).

    The graph references the parameters, their gradient hooks and thus the whole model, through C++ where Python's collector cannot follow:
    a model that was dropped would keep its memory, its process groups and their threads.
    """
    dispatchers = [module.token_dispatcher for chunk in chunks for module in chunk.modules() if hasattr(module, "token_dispatcher")]
    for holder in [*dispatchers, *(d._comm_manager for d in dispatchers if hasattr(d, "_comm_manager"))]:
        for name, value in vars(holder).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(holder, name, None)


def _agree(count: int, grid: Grid) -> None:
    """Check that every rank runs equally many micro-batches: otherwise the schedule would hang."""
    if count < 1:
        raise ValueError("no micro-batch to run")
    both = torch.tensor([count, -count])
    with grid.together("agree on the number of micro-batches"):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=grid.groups.control)
    most, fewest = int(both[0]), -int(both[1])
    if most != fewest:
        raise RuntimeError(f"micro-batches differ between ranks: rank {grid.rank} brought {count}, others from {fewest} to {most}")
