"""Let vLLM's CPU engines check drafted tokens: with its C++ kernels, and with temperatures that are numbers, not integers.

Only vLLM's own processes import this file.
"""

import torch
from torch import Tensor
from vllm.utils import cpu_triton_utils as kernels
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from megarl.upstream.expect import expect


def install() -> None:
    """Put the kernels where the rejection sampler looks for them.

    vLLM 0.30.0 sets `rejection_sampler.rejection_greedy_sample_kernel` and three others (vllm/v1/worker/cpu_model_runner.py:108), and
    its sampler calls dispatchers made before (vllm/v1/sample/rejection_sampler.py:469, :503, :606, :705), of Triton's kernels, which
    a CPU does not have. And `expand_kernel` copies what it expands through 64-bit integers (vllm/utils/cpu_triton_utils.py:408),
    temperatures too.
    """
    expect(CPUModelRunner, "vllm.v1.sample.rejection_sampler.rejection_greedy_sample_kernel = (")
    expect(rejection_sampler.expand_batch_to_tokens, "_expand(", "replace_from,", "replace_to,")
    expect(kernels._expand_kernel_impl, "torch.ops._C.expand_kernel_impl(", "_ensure_int64(")
    for dispatcher, kernel in (
        (rejection_sampler._rejection_greedy_sample, kernels.rejection_greedy_sample_kernel),
        (rejection_sampler._rejection_random_sample, kernels.rejection_random_sample_kernel),
        (rejection_sampler._sample_recovered_tokens, kernels.sample_recovered_tokens_kernel),
        (rejection_sampler._expand, kernels._FuncWrapper(_expand)),
    ):
        dispatcher.kernel = kernel


def _expand(
    output: Tensor, input: Tensor, cu_num_tokens: Tensor, replace_from: float, replace_to: float, **_: object
) -> None:  # by vLLM's names
    """Repeat the number of each request for each of its tokens.

    Args:
        output: is written [T].
        input: the numbers [N].
        cu_num_tokens: where the tokens of each request end [N].
        replace_from, replace_to: a number in the place of which there is another.
    """
    count_N = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    value_N = torch.where(input == replace_from, torch.full_like(input, replace_to), input)
    output[: int(cu_num_tokens[-1])] = value_N.repeat_interleave(count_N).to(output.dtype)
