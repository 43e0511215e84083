"""The states of gated delta nets in vLLM: zero where a request begins, which vLLM forgets where it begins with a single token.

Only vLLM's own processes import this file. Axes: N requests of a step.
"""

from functools import cache
from typing import Any

from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from megarl.upstream.expect import expect


@cache  # a worker may be a fork of the core, which has done it
def install() -> None:
    """Zero the states of requests that begin with a single token.

    vLLM 0.30.0 takes each request of one token for one that goes on (gdn_attn.py:251; Mamba's builder does not, mamba_attn.py:525) and
    reads what an earlier request has left in its states, which are not zeroed when they are given (v1/worker/utils.py:130). So it is with
    a prompt of one token, and with a longer one of which a step has room for one token.
    """
    build = GDNAttentionMetadataBuilder.build
    expect(build, "split_decodes_and_prefills(m, decode_threshold=1)", "non_spec_state_indices_tensor = block_table_tensor[:, 0]")

    def built(builder: Any, common_prefix_len: int, common_attn_metadata: Any, *given: Any, **named: Any) -> GDNAttentionMetadata:
        if common_attn_metadata.is_prefilling is not None:
            _zero_states(builder, common_attn_metadata)
        return build(builder, common_prefix_len, common_attn_metadata, *given, **named)

    GDNAttentionMetadataBuilder.build = built


def _zero_states(builder: Any, common: Any) -> None:
    single_N = (common.query_start_loc_cpu.diff() == 1) & common.is_prefilling
    if not single_N.any():  # seen without waiting for a GPU
        return
    mode = builder.vllm_config.cache_config.mamba_cache_mode
    slots_N = mamba_get_block_table_tensor(common.block_table_tensor, common.seq_lens, builder.kv_cache_spec, mode)[:, 0]
    begun_N = single_N.to(slots_N.device) & (common.compute_num_computed_tokens() == 0)
    for name in builder.layer_names:
        for states in builder.compilation_config.static_forward_context[name].kv_cache:
            states[slots_N[begun_N].long()] = 0
