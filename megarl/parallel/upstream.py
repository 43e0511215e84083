"""Patches for bugs of megatron-core 0.19.2 that occur on all hardware; those for the CPU alone are in `cpu/patches.py`.

Each patch names the upstream file and line and first checks that the faulty lines are still there.
"""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.megatron_fields import best_of_group
from megarl.upstream.expect import expect

# Warnings about upstream's own code, printed at every start and on every rank; users cannot act on them.
_NOISE = (
    ".*Apex (is|are) not installed",  # known: see `cpu/`
    "full scope is deprecated",  # transformer_config.py:2416 complains about its own default
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # about experts, if etp is 1 and tp is not
    "The .grad attribute of a Tensor that is not a leaf",  # optimizer.py:68 probes every parameter
    "MimoModelConfig is experimental",
    "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
)
_LOAD_FROM_BYTES = torch.storage._load_from_bytes  # torch's own: this is read before Megatron is imported
_LOGGED = {  # likewise, by logger
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",  # initial values of Mamba mixers on a CPU
}


def quiet() -> None:
    """Keep upstream's standing warnings off the console."""
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    for name, line in _LOGGED.items():
        logging.getLogger(name).addFilter(functools.partial(_differs, line))


def _differs(line: str, record: logging.LogRecord) -> bool:
    return line not in record.getMessage()


def apply(
    device: torch.device,
    synchronize: Callable[[], None],
    *,
    transformer_engine: bool,
    unequal_heads: bool,
    linear_attention: bool,
    mamba: bool,
) -> None:
    """Patch megatron.core.

    Args:
        device: this process's device.
        synchronize: waits for the work queued on the device.
        transformer_engine: whether the layers are built from Transformer Engine; without it there is more to patch.
        unequal_heads: whether the attention is cuDNN's, which takes some values that are narrower than keys.
        linear_attention: whether gated delta nets have the kernels of flash-linear-attention; without them there is more to patch.
        mamba: whether Mamba layers have the kernels of mamba_ssm; without them there is more to patch.
    """
    import megatron.core
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.ssm.gated_delta_net import common, gdn
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer import mla_qk_norm_config, mlp, multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    _pickled_tensors(megatron.core)
    _shape_exchange(P2PCommunicator, device, synchronize)
    _padded_counts(TopKRouter)
    _sorted_topk(moe_utils, TopKRouter)
    _softmax_bias(TransformerConfig)
    _plain_queries(mla_qk_norm_config.QKNormConfigResolver, multi_latent_attention.MLASelfAttention)
    if not linear_attention:
        _torch_delta_net(common, gdn)
    if not mamba:
        _torch_mamba(mamba_mixer, mamba_context_parallel)
    if unequal_heads:
        _unpadded_values(multi_latent_attention)
    if transformer_engine:
        _router_gemm_of_te(moe_utils)
    else:
        _bias_of_experts(mlp.MLP, RowParallelLinear)
        _replicated_projections(multi_latent_attention)
        _rotation_in_one_pass(rope_utils)


def _pickled_tensors(core: Any) -> None:
    """megatron/core/__init__.py:58 replaces a function of torch's that every pickled tensor names: whoever reads one from a rank, a driver
    or an engine, would import Megatron."""
    expect(core, "torch.storage._load_from_bytes = safe_load_from_bytes")
    torch.storage._load_from_bytes = _LOAD_FROM_BYTES


def _shape_exchange(communicator: Any, device: torch.device, synchronize: Callable[[], None]) -> None:
    """p2p_communication.py:235-259 posts sends and receives in the order previous, next, and waits for all of them.

    With two pipeline stages both neighbours are the same process, and what it sends to its previous stage reaches us from our next one:
    when both directions are in flight (the interleaved schedule), the two shapes come out swapped. Receives must be posted in the order of
    the peer's sends. In addition, a stage may send a gradient to one that is still waiting for its own activation to be received: waiting
    for that send deadlocks wherever small sends are not buffered (gloo), so a send is only waited for in the next exchange.
    """
    expect(
        communicator._communicate_shapes, "ops.append(send_prev_op)", "ops.append(recv_prev_op)", "ops.append(recv_next_op)", "req.wait()"
    )

    def communicate_shapes(
        self: Any, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        from_prev, from_next = torch.zeros(2, 3, dtype=torch.int64, device=device)
        receives = [(from_next, self.next_rank)] * recv_next + [(from_prev, self.prev_rank)] * recv_prev
        sends = [
            (torch.tensor(tensor.shape, device=device), peer)
            for tensor, peer in ((tensor_send_prev, self.prev_rank), (tensor_send_next, self.next_rank))
            if tensor is not None
        ]
        for request in getattr(self, "_megarl_sends", ()):
            request.wait()
        ops = [dist.P2POp(dist.irecv, shape, peer, self.pp_group) for shape, peer in receives]
        ops += [dist.P2POp(dist.isend, shape, peer, self.pp_group) for shape, peer in sends]
        requests = dist.batch_isend_irecv(ops) if ops else []
        for request in requests[: len(receives)]:  # NCCL returns one request for all, gloo one for each
            request.wait()
        self._megarl_sends = requests[len(receives) :]
        synchronize()  # as upstream does, because of a race in batch_isend_irecv
        return from_prev.tolist(), from_next.tolist()

    communicator._communicate_shapes = communicate_shapes


def _padded_counts(router: Any) -> None:
    """router.py:738 counts the tokens of each expert by applying a mask [tokens] to a map [tokens, experts], which fails for most sizes
    and masks experts instead of tokens for the others."""
    expect(router._apply_expert_bias, "routing_map = routing_map & (~padding_mask)", "local_tokens_per_expert += routing_map.sum(dim=0)")
    count = router._apply_expert_bias

    def apply_expert_bias(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        count(self, routing_map, padding_mask if padding_mask is None else padding_mask[:, None])

    router._apply_expert_bias = apply_expert_bias


def _router_gemm_of_te(moe_utils: Any) -> None:
    """moe_utils.py:1357 passes autograd's gradient, which need not be contiguous, to a product that reads every operand as if it were
    (Transformer Engine 2.18, csrc/common.cpp:137).

    Forward the product multiplies bfloat16 and sums in float32; backward it multiplies in TF32 (common/gemm/cublaslt_gemm.cu:448), in which
    inputs and weights, from bfloat16, are exact, unless NVIDIA_TF32_OVERRIDE=0 forbids cuBLAS to do so. It takes its workspace by itself
    (cpp_extensions/gemm.py:134).
    """
    expect(
        moe_utils.RouterGatingLinearFunction,
        "grad_output = grad_output.view(-1, grad_shape[-1])",
        'weight.to(ctx.router_dtype), grad_output, ctx.router_dtype, layout="NN", grad=True',
        'inp.to(ctx.router_dtype), grad_output, ctx.router_dtype, layout="NT", grad=True',
    )
    multiply = moe_utils.te_general_gemm
    if multiply is None:  # its import fails silently (transformer_engine.py:3554); the router would multiply without tensor cores
        raise RuntimeError("megatron.core.transformer.moe.moe_utils has no te_general_gemm: its import must be reviewed")

    def te_general_gemm(a: Tensor, b: Tensor, *args: Any, **options: Any) -> Any:
        return multiply(a.contiguous(), b.contiguous(), *args, **options)

    moe_utils.te_general_gemm = te_general_gemm


class SortedTopK:
    """A router's choice of experts in the order of their scores. It stands where Megatron's router has its replay (moe_utils.py:831).

    Args:
        best: of how many of its experts, the best ones, a group's score is the sum.
        biased: the router, if it chooses by the softmax of its logits plus its bias.
    """

    def __init__(self, best: int, biased: Any = None) -> None:
        self._best, self._biased = best, () if biased is None else (biased,)  # in a tuple, which torch does not look into for modules

    def get_replay_topk(
        self,
        scores_RE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the experts, [R, K] each: of the `group_topk` groups of the highest scores, if there are groups.

        Args:
            scores_RE: the scores of all experts, by row.
            topk: how many of them to choose (K).
            num_groups: how many groups the experts are in; None: they are in none.
            group_topk: how many groups to choose from first.
            choose_topk: Megatron's own choice, which takes these arguments.
        """
        with torch.enable_grad():  # around the choice alone: `routing` knows by its absence what the backward pass will recompute
            for router in self._biased:
                chosen_RK = choose_topk(scores_RE.softmax(-1) + router.expert_bias, topk)[1]
                return scores_RE.gather(1, chosen_RK), chosen_RK
            if not num_groups or not group_topk:
                return choose_topk(scores_RE, topk)
            scores_RGI = scores_RE.unflatten(1, (num_groups, -1))  # I experts of each of G groups
            chosen_RG = scores_RGI.topk(self._best, dim=2).values.sum(2).topk(group_topk, dim=1).indices
            others_RG = torch.ones_like(scores_RGI[..., 0], dtype=torch.bool).scatter(1, chosen_RG, False)
            return choose_topk(scores_RGI.masked_fill(others_RG[..., None], -torch.inf).flatten(1), topk)


def _sorted_topk(moe_utils: Any, router: Any) -> None:
    """moe_utils.py:823 sorts a token's experts only where gradients are enabled. Their weights, and what they put out, are then added in
    another order: log-probs of a pass without gradients (old, reference) differ from the training pass's in their last bits.

    moe_utils.py:656 scores a group by the sum of its topk // group_topk best experts, where the models have `best_of_group`.

    moe_utils.py:839 knows no bias of a softmax router (Ernie-4.5's), by which experts are chosen and not weighted.
    """
    expect(moe_utils.group_limited_topk, "topk(topk // group_topk, dim=-1)[0].sum(dim=-1)")
    expect(moe_utils.topk_routing_with_score_function, "torch.topk(scores, k=topk, dim=1, sorted=torch.is_grad_enabled())")
    expect(router.__init__, "self.router_replay = None")
    build = router.__init__

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        if self.router_replay is None:
            kind = self.config.moe_router_score_function
            biased = kind == "softmax" and self.enable_expert_bias
            self.router_replay = SortedTopK(best_of_group(kind), self if biased else None)

    router.__init__ = __init__


def _softmax_bias(config: Any) -> None:
    """transformer_config.py:2284 refuses a router's bias beside a softmax, which `_sorted_topk` gives it."""
    check = config.__post_init__
    expect(check, "if self.moe_router_enable_expert_bias and self.moe_router_score_function not in (", "raise ValueError(")

    def __post_init__(self: Any) -> None:
        wanted = self.moe_router_enable_expert_bias
        self.moe_router_enable_expert_bias = wanted and self.moe_router_score_function != "softmax"
        check(self)
        self.moe_router_enable_expert_bias = wanted

    config.__post_init__ = __post_init__


def _plain_queries(resolver: Any, attention: Any) -> None:
    """mla_qk_norm_config.py:172 adds a norm before the projection of queries that have no latent (q_lora_rank is None). No such model has
    it, and without Transformer Engine it cannot be built (:259)."""
    resolve = attention._resolve_qk_norm_config
    expect(resolve, "return QKNormConfigResolver(self.config, submodules).resolve()")
    expect(
        resolver,
        "linear_q_proj_cls = self._mla_fused_linear_or_default(",
        "return self._require_linear(self.fused_norm_linear_impl, module_name)",
    )
    parts = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")

    def resolve_qk_norm(self: Any, submodules: Any) -> dict[str, Any]:
        if self.config.q_lora_rank is not None:
            return resolve(self, submodules)
        return {part: getattr(submodules, part) for part in parts}

    attention._resolve_qk_norm_config = resolve_qk_norm


def _unpadded_values(latent_attention: Any) -> None:
    """multi_latent_attention.py:97 pads the values of packed sequences to the width of the keys.

    cuDNN takes heads of up to 128 as they are, and DeepSeek's of 192 and 128. On compute capability 10.0 it trains those only so
    (Transformer Engine 2.18, fused_attn.cpp:331), and padded ones are left to the attention that keeps all scores.
    """
    prepare = latent_attention._prepare_mla_core_attention_value
    expect(prepare, "value = F.pad(value, [0, query.shape[-1] - orig_v_dim])", "return value, need_v_pad, orig_v_dim, padded_v_dim")

    def prepare_value(attention: Any, query: Tensor, value: Tensor | None, packed_seq_params: Any) -> tuple[Any, bool, Any, Any]:
        widths = (query.shape[-1], query.shape[-1] if value is None else value.shape[-1])
        if max(widths) <= 128 or widths == (192, 128):
            return value, False, widths[1], widths[1]
        padded: tuple[Any, bool, Any, Any] = prepare(attention, query, value, packed_seq_params)
        return padded

    latent_attention._prepare_mla_core_attention_value = prepare_value


def _bias_of_experts(mlp: Any, row_parallel: Any) -> None:
    """mlp.py:354 adds an expert's bias, times the router's probabilities, in place to what its last projection returns: in a group of one
    rank a custom function's input as it is, of which autograd allows no such change."""
    expect(mlp.forward, "output += output_bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)")
    project = row_parallel.forward

    def forward(self: Any, given: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = project(self, given)
        return (output.clone() if self.is_expert and bias is not None else output), bias

    row_parallel.forward = forward


def _torch_delta_net(common: Any, gdn: Any) -> None:
    """common.py:136 refuses to build a gated delta net without flash-linear-attention, whose kernels need a GPU and Triton, and gdn.py:207
    convolves with it. Torch's operations of `delta_net.py` take their place; the rule itself is an attribute of the module."""
    from megarl.parallel.delta_net import causal_conv1d

    expect(common._GDNBase.__init__, "if not HAVE_FLA:", "self._setup_variant_attrs()")
    expect(gdn.GatedDeltaNet.forward, "qkv, _ = causal_conv1d(", "self.gated_delta_rule(")
    common.HAVE_FLA, gdn.causal_conv1d = True, causal_conv1d


def _torch_mamba(mixer: Any, context_parallel: Any) -> None:
    """mamba_mixer.py:193 refuses to build a Mamba mixer without mamba_ssm, whose kernels need a GPU and Triton, and its norm is theirs. The
    states are run by a method of the module (`mamba.TorchMamba`). mamba_context_parallel.py:357 and :399 order packed sequences with
    Transformer Engine."""
    from megarl.parallel.attention import zigzag
    from megarl.parallel.mamba import GroupedRMSNorm

    expect(mixer.MambaMixer.__init__, "if not HAVE_MAMBA_SSM:", "self.norm = ExtendedRMSNorm(")
    expect(mixer.MambaMixer.forward, "y = self._ssm_training(zxBCdt, packed_seq_params)")
    expect(context_parallel._undo_attention_load_balancing, "assert tex is not None", "output[index] = input_[start:end]")
    expect(context_parallel._redo_attention_load_balancing, "assert tex is not None", "return input_.index_select(0, index)")
    mixer.HAVE_MAMBA_SSM, mixer.ExtendedRMSNorm = True, GroupedRMSNorm

    def order(ranks: int, packed: Any) -> Tensor:
        """The tokens of the whole row in the order in which the ranks hold them."""
        bounds = packed.cu_seqlens_q.tolist()
        sequences = list(zip(bounds, bounds[1:], strict=False))
        places = [zigzag(stop - start, rank, ranks) + start for rank in range(ranks) for start, stop in sequences]
        return torch.cat(places).to(packed.cu_seqlens_q.device)

    def undo(given: Tensor, ranks: int, packed: Any) -> Tensor:
        return given[order(ranks, packed).argsort()]

    def redo(given: Tensor, ranks: int, packed: Any) -> Tensor:
        return given[order(ranks, packed)]

    context_parallel._undo_attention_load_balancing, context_parallel._redo_attention_load_balancing = undo, redo


def _replicated_projections(multi_latent_attention: Any) -> None:
    """multi_latent_attention.py:525 recognises a replicated projection only if it is Transformer Engine's TELinear."""
    from megarl.parallel.spec import ReplicatedLinear

    expect(
        multi_latent_attention.MLASelfAttention.__init__,
        "if submodules.linear_q_down_proj in [TELinear]:",
        "q_down_proj_kwargs['parallel_mode'] = 'duplicated'",
        "if submodules.linear_kv_down_proj in [TELinear]:",
    )
    multi_latent_attention.TELinear = ReplicatedLinear


def _rotation_in_one_pass(rope_utils: Any) -> None:
    """rope_utils.py:256 rotates packed sequences one after another, where 0.16.1 rotated all of them at once.

    The result is right. It is patched because a training step on short sequences takes twice the time on the CPU. The same function rotates
    all at once if it is given frequencies for every token of the micro-batch (:234), and the results are equal bit for bit.
    """
    rotate = rope_utils._apply_rotary_pos_emb_thd
    expect(
        rotate,
        "sequence_splits = torch.split(t, seqlens)",
        "has_packed_freqs = freqs.dim() >= 1 and freqs.size(0) == total_seqlen",
        "_get_thd_freqs_on_this_cp_rank(cp_rank, cp_size, x, freqs, seq_start_offset)",
        "output = torch.empty_like(t)",
        "for x in sequence_splits:",
        "output.narrow(0, output_offset, x.size(0)).copy_(output_slice)",
    )

    @functools.wraps(rotate)
    def rotate_at_once(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **options: Any) -> Any:
        bounds = cu_seqlens.cpu()  # upstream reads them one by one
        tokens = int(bounds[-1])  # on all context-parallel ranks
        if len(freqs) != tokens:  # or else upstream takes them for those of every token
            freqs = freqs[torch.arange(tokens) - bounds[:-1].repeat_interleave(bounds.diff())]
        return rotate(t, bounds, freqs, *args, **options)

    rope_utils._apply_rotary_pos_emb_thd = rotate_at_once
