"""The scalar head of critics and reward models, which replaces Megatron's output layer.

Axes: R local rows (the packed micro-batch), S rows of this rank's sequence-parallel shard, D hidden size.
"""

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
    """v = x . w in float32, whatever the model's dtype: bfloat16 would leave a value only 8 bits.

    Replicated over the tensor-parallel group. Initial weights are normal with std 1 / (D + 1), which makes the first values about
    1 / sqrt(D), and are drawn from the grid's seed: the same on every rank and layout.
    """

    def __init__(self, config: TransformerConfig, tp: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, config.sequence_parallel
        # Megatron keeps one random state, derived from the seed, that is equal on all ranks. It is read here and not advanced, so that the
        # head does not depend on what was built before it.
        generator = torch.Generator(choose().device)
        generator.set_state(get_cuda_rng_tracker().get_states()[get_data_parallel_rng_tracker_name()])
        fresh = torch.empty(1, config.hidden_size, device=generator.device).normal_(std=1 / (config.hidden_size + 1), generator=generator)
        self.weight = torch.nn.Parameter(fresh.to(config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # its gradient is summed over the shards

    def forward(self, x_S1D: Tensor, weight: None = None, runtime_gather_output: None = None) -> tuple[Tensor, None]:
        """Compute the values of all rows on every tensor-parallel rank. The signature is that of Megatron's output layer.

        Args:
            x_S1D: hidden states [S, 1, D] of this rank's sequence-parallel shard; without sequence parallelism S is R.
            weight: ignored; the head has its own.
            runtime_gather_output: ignored.

        Returns:
            (float32 [R, 1, 1], None for the bias).
        """
        value_S11 = F.linear(x_S1D.float(), self.weight.float())
        if not self.sequence_parallel:
            return value_S11, None
        # Every rank computes the whole loss: each shard's gradient is a slice, not a sum over ranks.
        return gather_from_sequence_parallel_region(value_S11, tensor_parallel_output_grad=False, group=self.tp), None

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any]) -> dict[str, Any]:
        """The head's weights as sharded tensors of a distributed checkpoint, stored under a name of their own.

        Upstream allows `output_layer.weight` to differ in shape (language_module.py:456), which would let a language model's output layer
        pass for a head.

        Args:
            prefix: prefix of the names.
            sharded_offsets: offsets on axes before the weight's own.
            metadata: Megatron's metadata, which says which ranks are replicas.
        """
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, sharded_offsets=sharded_offsets, tp_group=self.tp, dp_cp_group=metadata["dp_cp_group"]
        )
        for tensor in state.values():
            tensor.key = tensor.key.replace("output_layer.", "score.")
        return state
