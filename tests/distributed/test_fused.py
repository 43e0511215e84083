"""What is made of Transformer Engine's layers on GPUs, as far as Megatron's local layers on a CPU can stand for them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config import ConfigError, Layout, ModelSettings, OptimizerSettings
from megarl.models.description import ModelDescription
from megarl.parallel import attention, schedule, spec, upstream
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import logprob_entropy
from megarl.parallel.optimizer import make_trainable
from megarl.parallel.weights import load_hf
from megarl.upstream.expect import expect
from tests.distributed.tiny_training import TINY, Job, global_batch, make_checkpoint, shares
from tests.rank_pool import Pool


def gradients(grid: Grid, job: Job, fusion: bool) -> tuple[dict[str, Tensor], float]:
    """The summed gradients of all micro-batches, and their norm. With `fusion`, linear layers keep the contract of Transformer Engine's."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.tensor_parallel import layers

    expect(layers.ColumnParallelLinear.__init__, "if config.gradient_accumulation_fusion and not _grad_accum_fusion_available:", "raise")
    expect(
        DistributedDataParallel._make_backward_post_hook,
        "not param.grad_added_to_main_grad or getattr(param, 'zero_out_wgrad', False)",
        "param.main_grad.add_(param.grad.data)",
        "param.grad = None",
    )
    model, settings = ModelDescription.read(job.path), ModelSettings(path=job.path, dtype=job.dtype, recompute=job.recompute)
    config = transformer_config(model, settings, grid.layout, choose())
    config.gradient_accumulation_fusion = fusion
    chunks = build_chunks(config, model, choose(), grad=True)
    assert config.gradient_accumulation_fusion == fusion
    linear = [module for module in chunks[0].modules() if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear)]
    assert not any(layer.gradient_accumulation_fusion for layer in linear)
    fusing: list[Any] = [layer for layer in linear if layer is not chunks[0].output_layer]
    for layer in fusing:
        layer.fuse_wgrad_accumulation = False
    load_hf(chunks, model, grid)
    policy = make_trainable(chunks, OptimizerSettings(lr=1e-3, ddp=job.optimizer), total_steps=1)
    for layer in fusing:
        assert layer.fuse_wgrad_accumulation == fusion
        layer.gradient_accumulation_fusion = fusion
    assert not chunks[0].output_layer.gradient_accumulation_fusion
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=_add)
    layers.HAVE_TE, layers.get_dummy_wgrad = True, lambda shape, dtype, zero=False: torch.full(shape, torch.nan, dtype=dtype)

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Any) -> tuple[Tensor, None]:
        lp_T, _ = logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, grid.groups.tp, TINY["vocab_size"], overwrite=True)
        return (batch.extra_T["weight"] * lp_T).sum(), None

    policy.zero_grad()
    schedule.run(policy.chunks, shares(global_batch(job.sequences), job.micro_batches), loss_fn, grid, forward_only=False)
    found = {name: parameter.main_grad.clone() for name, parameter in chunks[0].named_parameters()}
    assert all(parameter.grad is None for parameter in chunks[0].parameters())
    return found, policy.step().grad_norm


def _add(x: Tensor, slope: Tensor, total: Tensor) -> None:
    """What Transformer Engine's product does, and that of apex's CUDA extension: total += slope^T x, in float32."""
    total.addmm_(slope.float().T, x.float())


@pytest.mark.parametrize(
    ("layout", "job"),
    [
        (Layout(), {"recompute": "full"}),
        (Layout(ranks=2, tp=2, ep=2), {"optimizer": {"overlap_grad_reduce": True}}),
    ],
)
def test_layers_that_fill_the_gradient_buffers_themselves_leave_the_same_gradients(
    pool: Pool, tmp_path: Path, layout: Layout, job: dict[str, Any]
) -> None:
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=layout.tp > 1)
    plain = pool.run(gradients, layout, Job(path, **job), False)
    fused = pool.run(gradients, layout, Job(path, **job), True)
    for (one, norm), (other, its) in zip(plain, fused, strict=True):
        assert norm > 0 and its == pytest.approx(norm, rel=1e-5)
        for name, gradient in one.items():
            assert torch.allclose(other[name], gradient, rtol=1e-4, atol=1e-7), name


def test_gradients_that_are_summed_in_the_buffers_are_not_rounded_to_bfloat16_first(pool: Pool, tmp_path: Path) -> None:
    job = Job(make_checkpoint(tmp_path / "model"), dtype="bfloat16")
    [(plain, _)] = pool.run(gradients, Layout(), job, False)
    [(fused, _)] = pool.run(gradients, Layout(), job, True)
    name = "decoder.layers.3.mlp.experts.local_experts.0.linear_fc2.weight"
    rounding = (fused[name] - plain[name]).abs().max() / fused[name].abs().max()
    assert 1e-4 < rounding < 1e-2


def products(grid: Grid) -> dict[str, list[Tensor]]:
    """The router's logits and gradients, as Megatron computes them, and with a product that takes Transformer Engine's arguments."""
    from megatron.core.transformer.moe import moe_utils

    def te_general_gemm(
        a: Tensor, b: Tensor, out_dtype: torch.dtype, layout: str, bias: Tensor | None = None, grad: bool = False
    ) -> tuple[Any, ...]:
        """Megatron's (transformer_engine.py:3518), with matrices in columns: "TN" is a^T b of theirs, and b a^T of torch's."""
        calls.append((layout, grad))
        assert a.is_contiguous() and b.is_contiguous() and bias is None
        x, y = (matrix.double().T if mark == "T" else matrix.double() for matrix, mark in ((b, layout[1]), (a, layout[0])))
        return (x @ y).to(out_dtype), None, None, None

    calls = list[tuple[str, bool]]()
    generator = torch.Generator().manual_seed(1)
    x_T1D, w_ED, slope_E = (torch.randn(*shape, generator=generator) for shape in ((7, 1, 16), (4, 16), (4,)))
    found = {}
    for kind in ("plain", "fused"):
        x, w = (tensor.to(torch.bfloat16).requires_grad_() for tensor in (x_T1D, w_ED))
        logits = moe_utils.router_gating_linear(x, w, None, torch.float32)
        logits.backward(slope_E.expand(7, 1, 4))  # not contiguous
        assert x.grad is not None and w.grad is not None
        found[kind] = [logits.detach(), x.grad, w.grad]
        if kind == "plain":
            assert not calls and moe_utils.te_general_gemm is None
            moe_utils.te_general_gemm = te_general_gemm
            upstream._router_gemm_of_te(moe_utils)
    assert calls == [("TN", False), ("NN", True), ("NT", True)]
    return found


def test_the_router_multiplies_with_transformer_engine(pool: Pool) -> None:
    """Its product, which knows contiguous operands only, gets such ones whatever the gradient is."""
    [found] = pool.run(products, Layout())
    for plain, fused in zip(found["plain"], found["fused"], strict=True):
        assert plain.dtype == fused.dtype and plain.shape == fused.shape
        torch.testing.assert_close(fused, plain, rtol=1e-2 if plain.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def modes(grid: Grid) -> list[tuple[str, bool]]:
    """Whether torch only warns of what is not deterministic: in a kernel's passes and around them."""
    seen = list[tuple[str, bool]]()

    def see(place: str) -> None:
        seen.append((place, torch.is_deterministic_algorithms_warn_only_enabled()))

    class AttentionKernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            see("forward")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            see("backward")
            return slope

    torch.use_deterministic_algorithms(True, warn_only=True)
    x = torch.ones(3, requires_grad=True)
    before = x * 2
    before.register_hook(lambda _: see("after backward"))
    out = attention.repeatable(lambda: AttentionKernel.apply(before))
    see("between")
    after = out * 2
    after.register_hook(lambda _: see("before backward"))
    after.sum().backward()
    return seen


def test_an_attention_kernel_is_deterministic_where_the_rest_is_only_warned_of(pool: Pool) -> None:
    [seen] = pool.run(modes, Layout())
    assert seen == [("forward", False), ("between", True), ("before backward", True), ("backward", False), ("after backward", True)]


def attentions(grid: Grid) -> list[bool]:
    """With torch's attention and without, whether each layer of Transformer Engine's spec has ours. The spec here is the local one."""
    given = spec.get_gpt_decoder_block_spec
    spec.get_gpt_decoder_block_spec = lambda config, use_transformer_engine, vp_stage: given(
        config, use_transformer_engine=not use_transformer_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    config = transformer_config(ModelDescription.of(TINY), ModelSettings(path=Path("model")), grid.layout, choose())
    blocks = [
        spec.transformer_engine(config, None, torch_attention, choose().delta_net, adapted=False) for torch_attention in (False, True)
    ]
    kinds = [{layer.submodules.self_attention.submodules.core_attention for layer in block.layer_specs} for block in blocks]
    return [kind == {attention.PackedAttention} for kind in kinds]


def test_torchs_attention_takes_the_place_of_transformer_engines(pool: Pool) -> None:
    assert pool.run(attentions, Layout()) == [[False, True]]


def wished(grid: Grid) -> str:
    choose().torch_attention = True
    try:
        transformer_config(
            ModelDescription.of(TINY), ModelSettings(path=Path("model"), megatron={"attention_backend": "fused"}), grid.layout, choose()
        )
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_a_choice_among_transformer_engines_attentions_is_refused_where_none_is_used(pool: Pool) -> None:
    assert pool.run(wished, Layout())[0].startswith("model.megatron.attention_backend=fused: chooses among Transformer Engine's")
