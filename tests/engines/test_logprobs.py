"""vLLM's sampler on a CPU, with a real vocabulary: the log-prob of each sampled token is that of the distribution sampled from."""

from typing import Any

import pytest
import torch

from tests.engines.engine_host import Host

TOKENS = 151_936


async def _errors(mended: bool, cut: bool) -> list[float]:
    """Return the largest error of log-probs, greedy and sampled."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    from megarl.engines.vllm.cpu import logprobs as cpu_logprobs

    kept, threads = (TopKTopPSampler.forward_cpu, Sampler.compute_logprobs), torch.get_num_threads()
    torch.set_num_threads(1)  # engines fork from this process, and OpenMP's threads do not
    if mended:
        cpu_logprobs.install()
    try:
        logits_NV, errors, none = torch.randn(8, TOKENS, generator=torch.Generator().manual_seed(1)), [], torch.zeros(8)
        logits_NV[:, 7] = 18.0  # a likely token, and many unlikely ones
        for greedy in (True, False):
            fields: dict[str, Any] = {
                "temperature": None if greedy else torch.ones(8),
                "all_greedy": greedy,
                "all_random": not greedy,
                "top_p": None,
                "top_k": torch.full((8,), TOKENS // 2) if cut and not greedy else None,
                "generators": {row: torch.Generator().manual_seed(row) for row in range(8)},
                "max_num_logprobs": 0,
                "no_penalties": True,
                "prompt_token_ids": None,
                "frequency_penalties": none,
                "presence_penalties": none,
                "repetition_penalties": none,
                "output_token_ids": [],
                "allowed_token_ids_mask": None,
                "bad_words_token_ids": {},
                "logitsprocs": LogitsProcessors(),
            }
            sampled = Sampler(logprobs_mode="processed_logprobs")(logits_NV.clone(), SamplingMetadata(**fields))
            exact_NV = logits_NV.double()
            if fields["top_k"] is not None:
                exact_NV = exact_NV.masked_fill(exact_NV < exact_NV.topk(TOKENS // 2).values[:, -1:], -torch.inf)
            exact_N = exact_NV.log_softmax(-1).gather(1, sampled.sampled_token_ids.long())[:, 0]
            errors.append(float((sampled.logprobs_tensors.logprobs[:, 0] - exact_N).abs().max()))
        return errors
    finally:
        TopKTopPSampler.forward_cpu, Sampler.compute_logprobs = kept[0], staticmethod(kept[1])
        torch.set_num_threads(threads)


@pytest.mark.parametrize("cut", [False, True])
def test_a_sampled_token_has_the_log_prob_of_float64(host: Host, cut: bool) -> None:
    assert max(host.run(_errors, True, cut)) < 3e-6
    assert max(host.run(_errors, False, cut)) > 5e-5, "vLLM's own has become exact: the mend is not needed any more"
