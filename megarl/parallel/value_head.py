"""The scalar head of critics and reward models, in the place of Megatron's output layer.

Axes: R local rows (the packed micro-batch), S the rows of this rank's sequence-parallel shard, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.parallel.backend import choose


class ValueHead(torch.nn.Module):
    """v = x . w in float32, whatever the model's dtype: bfloat16 would leave a value 8 bits.

    Replicated over the tensor-parallel group. Fresh weights are normal with std 1 / (D + 1), which makes first values about 1 / sqrt(D),
    and are drawn from the grid's seed: the same on every rank and layout.
    """

    def __init__(self, config: TransformerConfig, tp: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, config.sequence_parallel
        # Megatron keeps one random state that is equal on all ranks, made from the seed. It is read here and not advanced, so that a head
        # depends on nothing that was built before it.
        generator = torch.Generator(choose().device)
        generator.set_state(get_cuda_rng_tracker().get_states()[get_data_parallel_rng_tracker_name()])
        fresh = torch.empty(1, config.hidden_size, device=generator.device).normal_(std=1 / (config.hidden_size + 1), generator=generator)
        self.weight = torch.nn.Parameter(fresh.to(config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # its gradient is summed over the shards

    def forward(self, x_S1D: Tensor, weight: None = None, runtime_gather_output: None = None) -> tuple[Tensor, None]:
        """Values of all rows on every tensor-parallel rank. The signature is that of Megatron's output layer.

        Args:
            x_S1D: hidden states [S, 1, D] of this rank's sequence-parallel shard; without sequence parallelism S is R.
            weight: not read; the head has its own.
            runtime_gather_output: not read.

        Returns:
            (float32 [R, 1, 1], None for the bias).
        """
        value_S11 = F.linear(x_S1D.float(), self.weight.float())
        if not self.sequence_parallel:
            return value_S11, None
        # Every rank computes the whole loss: each shard's gradient is a slice, not a sum over ranks.
        return gather_from_sequence_parallel_region(value_S11, tensor_parallel_output_grad=False, group=self.tp), None

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any]) -> dict[str, Any]:
        """Of a distributed checkpoint. Stored under a name of its own: upstream marks `output_layer.weight` as free to differ in shape
        (language_module.py:302), which would let a language model's pass for a head.

        Args:
            prefix: of the names.
            sharded_offsets: of axes before the weight's own.
            metadata: Megatron's: which ranks are replicas.
        """
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, sharded_offsets=sharded_offsets, tp_group=self.tp, dp_cp_group=metadata["dp_cp_group"]
        )
        for tensor in state.values():
            tensor.key = tensor.key.replace("output_layer.", "score.")
        return state
