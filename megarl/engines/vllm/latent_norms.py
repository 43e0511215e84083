"""The norms of multi-latent attention, as the models themselves have them.

Only vLLM's own processes call `install`.
"""

from functools import cache
from typing import Any

from megarl.models.mla import LATENT_EPSILON
from megarl.upstream.expect import expect


@cache  # a worker may be a fork of the core, which has done it
def install() -> None:
    """Let vLLM normalise latents with the models' own epsilon, 1e-6: it takes config.json's rms_norm_eps (models/deepseek_v2.py:500, :524),
    which is 1e-5 in Moonlight, Kimi-K2-Thinking and GLM-4.7-Flash.

    The code that these models are published with, and transformers', give their norms of latents no epsilon, so that it is the default.
    """
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    build = MultiHeadLatentAttentionWrapper.__init__
    expect(build, "self.q_a_layernorm = mla_modules.q_a_layernorm", "self.kv_a_layernorm = mla_modules.kv_a_layernorm")

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        build(self, *given, **named)
        for norm in (self.q_a_layernorm, self.kv_a_layernorm):
            if norm is not None:
                norm.variance_epsilon = LATENT_EPSILON

    MultiHeadLatentAttentionWrapper.__init__ = __init__
