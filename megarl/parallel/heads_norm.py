"""A norm of queries or keys over all heads together, which tensor parallelism splits."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class AllHeadsNorm(torch.nn.Module):
    """x / sqrt(mean of x^2 over all heads + eps) * weight, on whichever of the heads this tensor-parallel rank has.

    The mean is a sum over the ranks. So is its gradient: every rank's heads depend on it. Each rank keeps the weights of all heads and uses
    those of its own: Megatron sums the gradients of whatever is named q_layernorm or k_layernorm over the ranks
    (finalize_model_grads.py:453).

    Args:
        config: the model's configuration.
        hidden_size: dimensions of one head.
        eps: added to the mean.
    """

    heads: str  # the field of the configuration that has the number of heads

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self._group, self._eps = parallel_state.get_tensor_model_parallel_group(), eps
        self._shape = getattr(config, self.heads), hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self._shape[0] * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the heads [..., this rank's heads, dimensions] of each token, in float32."""
        wide, own = x.float(), x.shape[-2]
        total = reduce_from_tensor_model_parallel_region(wide.square().sum((-2, -1), keepdim=True), self._group)
        total = copy_to_tensor_model_parallel_region(total, self._group)
        normal = (wide * torch.rsqrt(total / self.weight.numel() + self._eps)).to(x.dtype)
        return normal * self.weight.view(self._shape).narrow(0, self._group.rank() * own, own)


class AllQueriesNorm(AllHeadsNorm):
    """The norm of the queries."""

    heads = "num_attention_heads"


class AllKeysNorm(AllHeadsNorm):
    """The norm of the keys."""

    heads = "num_query_groups"
