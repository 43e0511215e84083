"""What gpt-oss needs in vLLM beyond other models: updates of its attention sinks.

Only vLLM's own processes import this file.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import Tensor
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssModel

from megarl.upstream.expect import expect


@cache  # a worker may be a fork of the core, which has done it
def install() -> None:
    """Load attention sinks through their parameter's loader, by which vLLM's layerwise reload follows what has come.

    vLLM 0.30.0 writes them into the parameter itself (vllm/model_executor/models/gpt_oss.py:1259), which in a reload stands on no device:
    the engine would keep its old sinks and say nothing.
    """
    load = GptOssModel._load_weights_other
    expect(load, "if self._try_load_streamed_expert(", 'elif "sinks" in name:', "weight.narrow(0, head_start, heads_per_rank)")
    expect(load, "param.data.copy_(narrow_weight)")

    def load_weights(
        self: Any, ep_stop: int, ep_start: int, heads: int, head: int, weights: Iterable[tuple[str, Tensor]], stacked: Any
    ) -> set[str]:
        loaded = set[str]()

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if not name.endswith(".sinks"):
                    yield name, tensor
                    continue
                sinks = self.get_parameter(name)
                getattr(sinks, "weight_loader", default_weight_loader)(sinks, tensor.narrow(0, head, heads))
                loaded.add(name)

        return load(self, ep_stop, ep_start, heads, head, others(), stacked) | loaded

    GptOssModel._load_weights_other = load_weights
