"""Let vLLM's CPU engines choose experts without groups as its GPU engines do: by scores of any kind, and by a bias where the model has one.

Only vLLM's own processes import this file. Axes: T tokens, E experts, K experts a token.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from megarl.engines.vllm.cpu.rows import filled
from megarl.upstream.expect import expect


def install() -> None:
    """Choose experts without groups by scores of any kind, and with the model's bias; for a token always with the same bits.

    There vLLM 0.30.0 asserts that scores are a softmax, and drops the bias without a word
    (vllm/model_executor/layers/fused_moe/router/cpu_router.py:240): MiniMax-M2 cannot run, and Ernie-4.5 chooses other experts.
    """
    route = CPURouter._compute_routing
    expect(
        route,
        "if self.use_grouped_topk:",
        "elif self.custom_routing_function is None:",
        'assert self.scoring_func == "softmax"',
        "return _softmax_topk(router_logits, self.top_k, self.renormalize)",
    )

    def compute_routing(router: Any, hidden: Tensor, logits_TE: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        weight_TK, expert_TK = chosen(router, filled(hidden), filled(logits_TE), *arguments, **named)
        return weight_TK[: len(hidden)], expert_TK[: len(hidden)]

    def chosen(router: Any, hidden: Tensor, logits_TE: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        bias, kind = router.e_score_correction_bias, router.scoring_func
        grouped = router.use_grouped_topk or router.custom_routing_function is not None
        if grouped or kind not in ("softmax", "sigmoid") or (kind == "softmax" and bias is None):
            choice: tuple[Tensor, Tensor] = route(router, hidden, logits_TE, *arguments, **named)
            return choice
        score_TE = logits_TE.float().softmax(-1) if kind == "softmax" else logits_TE.float().sigmoid()
        expert_TK = (score_TE if bias is None else score_TE + bias.flatten()).topk(router.top_k, -1, sorted=False).indices
        weight_TK = score_TE.gather(-1, expert_TK)
        if router.renormalize:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        return weight_TK * router.routed_scaling_factor, expert_TK.to(torch.int32)

    CPURouter._compute_routing = compute_routing
