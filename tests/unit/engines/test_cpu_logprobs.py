"""The log-probs of a CPU engine over a real vocabulary (tests/engines/test_logprobs.py: of vLLM's sampler)."""

import torch

from megarl.engines.vllm.cpu.logprobs import log_softmax


def test_log_probs_over_a_real_vocabulary_are_those_of_float64() -> None:
    logits_NV = torch.randn(64, 151_936, generator=torch.Generator().manual_seed(1))
    logits_NV[:, 7] = 18.0  # a likely token, and many unlikely ones
    wanted_NV = logits_NV.double().log_softmax(-1)
    error_NV = (log_softmax(logits_NV) - wanted_NV).abs()
    assert error_NV.mean() < 1e-6 and error_NV.max() < 3e-6
    assert (logits_NV.log_softmax(-1) - wanted_NV).abs().mean() > 1e-4, "torch's own has become exact: the mend is not needed any more"


def test_tokens_that_were_cut_away_have_no_probability() -> None:
    cut_NV = torch.tensor([[2.0, -torch.inf, 2.0], [-torch.inf, 7e4, -torch.inf]])
    assert torch.allclose(log_softmax(cut_NV).exp(), torch.tensor([[0.5, 0, 0.5], [0, 1, 0]]))
