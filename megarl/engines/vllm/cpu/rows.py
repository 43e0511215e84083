"""Rows whose bits do not depend on how many others there are, so that a CPU engine's answers do not depend on its other requests.

torch's CPU kernels of exp, sigmoid, softplus and the like compute pairs of vectors, and what is left at a tensor's end number by number,
with another exp: the same number gets other bits there (aten/src/ATen/native/cpu/Loops.h, vectorized_loop). Rows that are whole pairs of
vectors leave nothing; gates, scores of few experts and steps of heads do. And torch's product of few rows with a matrix adds up in another
order than that of many. vLLM's own kernels do neither. Only vLLM's own processes import this file.

Axes: T tokens, H heads.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.mamba.ops import ssd_combined
from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm
from vllm.model_executor.models import glm4_moe, qwen2_moe

from megarl.upstream.expect import expect

PAIR = 32  # float32 numbers of two of the widest vectors, AVX-512's


def filled(x: Tensor) -> Tensor:
    """Append rows of zeros [T, ...] until they are a multiple of `PAIR`: no number is left at the end."""
    return torch.cat([x, x.new_zeros(-len(x) % PAIR, *x.shape[1:])])


def alike(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of each row [T, ...]: to whole pairs of vectors, and to many rows."""
    return function(filled(x))[: len(x)]


def install() -> None:
    """Compute alike the gate of a shared expert (Qwen2-MoE, Qwen3-Next, Qwen3.5), GLM-4.5's router, and Mamba's steps (Nemotron-H)."""
    expect(qwen2_moe.Qwen2MoeMLP.forward, "out = F.sigmoid(self.expert_gate(x)[0]) * out")
    expect(qwen2_moe, "import torch.nn.functional as F")
    qwen2_moe.F = SimpleNamespace(sigmoid=partial(alike, torch.sigmoid))  # the only function that the file takes of it

    build = glm4_moe.Glm4MoE.__init__
    expect(build, "self.gate = nn.Linear(")

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        build(self, *given, **named)
        self.gate.forward = partial(alike, self.gate.forward)

    glm4_moe.Glm4MoE.__init__ = __init__

    scan = mamba_ssm._mamba_chunk_scan_combined_fwd_cpu
    expect(scan, "dt_f = dt_f + dt_bias.float().unsqueeze(0)", "if dt_softplus:", "dt_f = torch.nn.functional.softplus(dt_f)")
    assert ssd_combined._mamba_chunk_scan_combined_fwd is scan

    def scanned(x: Tensor, dt_TH: Tensor, *given: Any, dt_bias: Tensor, dt_softplus: bool, **named: Any) -> Tensor:
        assert dt_softplus, "as models have it"
        states: Tensor = scan(x, alike(F.softplus, dt_TH.float() + dt_bias.float()), *given, **named)
        return states

    ssd_combined._mamba_chunk_scan_combined_fwd = scanned
