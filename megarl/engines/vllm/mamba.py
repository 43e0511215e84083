"""What Mamba mixers need in vLLM beyond other layers: the A_log that they were sent, of which vLLM keeps only what it computes with.

Only vLLM's own processes import this file.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from megarl.upstream.expect import expect


def decay_rates(log: Tensor) -> Tensor:
    """Return A, as vLLM makes it of A_log."""
    return -torch.exp(log.float())


@cache  # a worker may be a fork of the core, which has done it
def install() -> None:
    """Keep the part of A_log that a worker has loaded beside its A, so that a fingerprint is one of what was sent, bit for bit.

    vLLM 0.30.0 loads A_log into `A` and turns it there into -exp(A_log) (mamba_mixer2.py:480), of which the logarithm is not A_log.
    The reader compares the two: see `weight_reader.py`.
    """
    build = MambaMixer2.__init__
    expect(build, "self.A = nn.Parameter(", "dtype=torch.float32", "sharded_weight_loader(0), lambda x: -torch.exp(x.float())")
    expect(build, 'set_weight_attrs(self.A, {"weight_loader": a_weight_loader})')

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        build(self, *given, **named)
        self.A_log = kept = torch.empty_like(self.A.data)
        rank, load = self.norm.tp_rank, self.A.weight_loader

        def weight_loader(param: Tensor, loaded_weight: Tensor) -> None:
            load(param, loaded_weight)
            if not param.is_meta:  # on which vLLM's reload counts first what would be loaded
                kept.copy_(loaded_weight.narrow(0, rank * len(kept), len(kept)))

        self.A.weight_loader = weight_loader

    MambaMixer2.__init__ = __init__
