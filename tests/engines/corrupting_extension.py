"""A worker extension for tests: damages what the engine holds, behind the back of everything that could notice."""

import os
import tempfile
from itertools import accumulate
from typing import Any

import pytest
import torch

from megarl.engines.vllm.draft import draft_of
from megarl.engines.vllm.worker_extension import WorkerExtension
from megarl.sync import fingerprint


class CorruptingExtension(WorkerExtension):
    """`megarl_corrupt(what)` changes one spot of one tensor in the form that the engine uses."""

    @torch.no_grad()
    def megarl_corrupt(self, what: str) -> None:
        layer = self.get_model().model.layers[1]
        experts: Any = layer.mlp.experts.routed_experts if hasattr(layer.mlp, "experts") else None
        if what == "norm":
            layer.input_layernorm.weight[7] *= 1.01
        elif what == "adapter":
            layer.self_attn.qkv_proj.lora_b_stacked[0][0, 0, 5, 2] += 1e-3
        elif what.startswith("draft"):
            model: Any = draft_of(self.model_runner)
            [draft] = model.model.layers.values()
            if what == "draft_projection":
                draft.eh_proj.weight[3, 4] += 0.1
            else:
                draft.mtp_block.mlp.gate.e_score_correction_bias[2] += 1e-3
        elif what == "q_norm":
            layer.self_attn.q_norm.weight[0] += 0.1
        elif what == "embedding":
            self.get_model().model.embed_tokens.weight[33, 5] += 1e-2
        elif what == "down":  # one block of the packed memory of expert 5: whatever its layout, that is expert 5's down projection
            for five in self._places(5):
                experts.w2_weight[five].view(-1)[64:80] += 0.5
        elif what == "fp8_expert":
            experts.w2_weight[3].view(torch.uint8)[7, 9] ^= 1  # the last bit of the mantissa
        elif what == "fp8_expert_scale":
            experts.w13_weight_scale_inv[2, 0, 1] *= 1.01
        elif what == "fp8_kernel_scale":  # of which the kernel has a copy after a reload
            experts.quant_method.moe_kernel.fused_experts.w1_scale[2, 0, 1] *= 1.01
        elif what == "fp8_linear":
            layer.self_attn.qkv_proj.weight.view(torch.uint8)[5, 6] ^= 1
        elif what == "fp8_linear_scale":
            layer.self_attn.qkv_proj.weight_scale_inv[-1, 2] *= 1.01
        elif what == "expert_bias":  # of the router, after the layers were loaded
            layer.mlp.gate.e_score_correction_bias[3] += 1e-3
        elif what == "sinks":  # of gpt-oss
            layer.attn.sinks[0] += 0.1
        elif what == "kernel_bias":  # of gpt-oss's expert 5, where the kernel reads it
            for five in self._places(5):
                experts.quant_method.moe_kernel.fused_experts.w1_bias[five, 3] += 0.5
        elif what == "absorbed":  # what multi-latent attention decodes with, which vLLM has made of kv_b_proj
            attention = layer.self_attn.mla_attn.mla_attn
            attention.W_UV = torch.nn.Parameter(attention.W_UV.clone(), requires_grad=False)  # it was a view of the weight
            attention.W_UV[1, 2, 3] += 0.5
        elif what == "swap":  # two experts change places
            for two, three in zip(self._places(2), self._places(3), strict=True):
                experts.w13_weight[[two, three]] = experts.w13_weight[[three, two]]
                experts.w2_weight[[two, three]] = experts.w2_weight[[three, two]]
        else:
            raise AssertionError(what)

    def _places(self, expert: int) -> list[int]:
        """Where layer 1 has an expert, if this worker holds it."""
        places = self.get_model().model.layers[1].mlp.experts.routed_experts.expert_map
        return [expert] if places is None else [place for place in [int(places[expert])] if place >= 0]

    @torch.no_grad()
    def megarl_corrupt_linear(self, name: str, weight: list[list[float]]) -> None:
        """Gives the linear layer `name` of layer 1 another weight, packed as vLLM packs it."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        linear = self.get_model().get_submodule(f"model.layers.1.{name}")
        linear.weight = torch.nn.Parameter(torch.tensor(weight, dtype=linear.params_dtype), requires_grad=False)
        dispatch_cpu_unquantized_gemm(linear, remove_weight=True)

    def megarl_peak(self, tied: bool) -> tuple[int, int]:
        """Most bytes that `megarl_fingerprints` takes beside what the engine holds, and the bytes of one layer's experts."""
        experts = self.get_model().model.layers[1].mlp.experts.routed_experts
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(fingerprint._CHUNK, "cpu", 1 << 10)
            with torch.profiler.profile(profile_memory=True) as profile:
                self.megarl_fingerprints(tied)
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
        return max(held), experts.w13_weight.nbytes + experts.w2_weight.nbytes

    def megarl_fail_next_load(self) -> None:
        """The next tensors that the model is given do not get into it."""
        model = self.get_model()

        def fail(_: object) -> None:
            del model.load_weights  # the model's own is there again
            raise MemoryError("no room")

        model.load_weights = fail

    def megarl_temporary(self) -> bool:
        """Whether what is compiled later would find a directory for its files."""
        return os.path.isdir(tempfile.gettempdir())
