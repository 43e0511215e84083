"""Log-probs of a CPU engine that are exact to float32's rounding, for large vocabularies too.

torch 2.13's log_softmax on a CPU adds up a row's exponentials one after another in a few lanes of float32. A lane that holds a likely token
loses all that are smaller by 2^24: over 151,936 tokens that moves every log-prob of the row by up to 3e-4. torch's `sum` adds pairwise, as
the ranks do (parallel/logprobs_chunked.py).

Only vLLM's own processes call `install`.
"""

from typing import Any

from torch import Tensor

from megarl.upstream.expect import expect


def log_softmax(logits_NV: Tensor) -> Tensor:
    """Return log softmax over V in float32, on average within 1e-6 of the exact value."""
    x_NV = logits_NV.float() - logits_NV.amax(-1, keepdim=True).float()
    return x_NV.sub_(x_NV.logsumexp(-1, keepdim=True))


def install() -> None:
    """Let vLLM's sampler compute log-probs with `log_softmax` (vllm/v1/sample/sampler.py:307, ops/topk_topp_sampler.py:220)."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    sample = TopKTopPSampler.forward_cpu
    expect(Sampler.compute_logprobs, "return logits.log_softmax(dim=-1, dtype=torch.float32)")
    expect(
        sample,
        'if self.logprobs_mode == "processed_logits":\n            logits_to_return = logits\n',
        "logits_to_return = logits.log_softmax(dim=-1, dtype=torch.float32)",
    )

    def forward_cpu(sampler: Any, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        if sampler.logprobs_mode != "processed_logprobs":
            return sample(sampler, *arguments, **named)
        sampler.logprobs_mode = "processed_logits"  # of the same distribution, after top-k and top-p
        try:
            tokens_N, logits_NV = sample(sampler, *arguments, **named)
        finally:
            sampler.logprobs_mode = "processed_logprobs"
        return tokens_N, log_softmax(logits_NV)

    TopKTopPSampler.forward_cpu = forward_cpu
    Sampler.compute_logprobs = staticmethod(log_softmax)
