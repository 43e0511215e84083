"""Part layers: the two halves of a layer of Qwen3-30B-A3B, as megarl builds it, in the shapes of a rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.config import ModelSettings
from megarl.models.description import ModelDescription
from tests.gpu.process import Run
from tests.gpu.report import Report, largest
from tests.gpu.shards import SHARD, SMALL, TOKENS
from tests.gpu.timing import Timing, memory_over, timed

APART = 2**-5  # bfloat16, of the largest element: other kernels, other orders of summation


def experts(grid: Any, small: bool) -> dict[str, Any]:
    """Forward and backward of a rank's 16 experts for the tokens that reach them, and the same by torch's grouped products.

    Returns how far the two are apart, and the figures of each.
    """
    layer = _layer(grid, small).mlp.experts
    device = next(layer.parameters()).device
    hidden, width, count = layer.config.hidden_size, layer.config.moe_ffn_hidden_size, layer.num_local_experts
    tokens = 256 if small else TOKENS * SHARD["num_experts_per_tok"]
    generator = torch.Generator().manual_seed(1)
    sizes_E = torch.multinomial(torch.ones(count), tokens, replacement=True, generator=generator).bincount(minlength=count)
    x_TD = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device).requires_grad_()
    share_T, slope_TD = torch.rand(tokens, device=device), torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
    end_E = sizes_E.cumsum(0).to(torch.int32).to(device)
    up_EDF, down_EFD = (stack.detach().clone().requires_grad_() for stack in _stacks(layer))

    def as_built() -> Tensor:
        return layer(x_TD, sizes_E.to(device), share_T)[0]

    def grouped() -> Tensor:
        gate_TF, value_TF = F.grouped_mm(x_TD, up_EDF, offs=end_E).chunk(2, -1)
        inner_TF = (F.silu(gate_TF) * value_TF * share_T[:, None]).to(torch.bfloat16)
        return F.grouped_mm(inner_TF, down_EFD, offs=end_E)

    products = 3 * 6 * tokens * hidden * width  # FLOPs of three matrices, forward and backward
    figures: dict[str, Any] = {"experts": count, "tokens": tokens}
    outputs = []
    for name, forward in (("as built", as_built), ("grouped_mm", grouped)):

        def both(forward: Callable[[], Tensor] = forward) -> None:
            forward().backward(slope_TD)

        outputs.append([forward().detach(), *torch.autograd.grad(forward(), [x_TD], slope_TD)])
        figures[name] = _speed(products, timed(both, lambda: _forget(x_TD, up_EDF, down_EFD, layer)))
    figures["apart"] = largest(_apart(one, other) for one, other in zip(*outputs, strict=True))
    return figures


def attention(grid: Any, small: bool) -> dict[str, Any]:
    """Forward and backward of a layer's core attention over 16,384 tokens: one sequence, 64 of one length, 64 of different lengths.

    Returns figures, and how far the last of the different sequences is from the same one alone.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    layer = _layer(grid, small)
    core, device = layer.self_attention.core_attention, next(layer.parameters()).device
    config = layer.config
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    tokens = 256 if small else TOKENS
    different = [*range(1, 17)] if small else [193 + 2 * n for n in range(64)]
    generator = torch.Generator().manual_seed(2)
    figures: dict[str, Any] = {}

    def attend(parts: list[Tensor], lengths: list[int]) -> Tensor:
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        longest = max(lengths)
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
        return core(*parts, None, attn_mask_type=layer.self_attention.attn_mask_type, packed_seq_params=packed)

    for name, lengths in {"one": [tokens], "64 equal": [tokens // 64] * 64, "64 different": different}.items():
        drawn = (torch.randn(sum(lengths), count, size, generator=generator) for count in (heads, groups, groups))
        parts = [part.to(torch.bfloat16).to(device).requires_grad_() for part in drawn]
        slope = torch.randn(sum(lengths), heads * size, generator=generator).to(torch.bfloat16).to(device)
        products = sum(7 * length**2 * heads * size for length in lengths)  # 3.5 times two products of half of the scores
        timing = timed(lambda: attend(parts, lengths).reshape(len(slope), -1).backward(slope), lambda: _forget(*parts))  # noqa: B023
        figures[name] = {"tokens": sum(lengths), **_speed(products, timing)}
    whole = attend(parts, different).reshape(sum(different), -1)[-different[-1] :]
    alone = attend([part[-different[-1] :].clone() for part in parts], different[-1:]).reshape(different[-1], -1)
    return {**figures, "apart": _apart(whole, alone)}


def check(there: Run, report: Report, *, small: bool = False) -> None:
    """Times both halves on the device."""
    for part in (experts, attention):
        with report.section(part.__name__):
            figures = there(part, small)
            report.figures[part.__name__] = figures
            report.check(figures["apart"] < APART, f"{part.__name__}: {figures['apart']:.2g} apart, and {APART:g} is allowed")


def _layer(grid: Any, small: bool) -> Any:
    """The first layer of the model in bfloat16."""
    from megarl.parallel.backend import choose
    from megarl.parallel.build import build_chunks, transformer_config

    model, backend = ModelDescription.of({**SHARD, "num_hidden_layers": 1, **(SMALL if small else {})}), choose()
    config = transformer_config(model, ModelSettings(path=Path("shard"), dtype="bfloat16"), grid.layout, backend)
    [chunk] = build_chunks(config, model, backend, grad=True)
    for parameter in chunk.parameters():
        parameter.data.normal_(std=0.02)
    return chunk.decoder.layers[0]


def _stacks(experts: Any) -> tuple[Tensor, Tensor]:
    """The weights of all experts as `grouped_mm` takes them: gate and up [E, D, 2F], down [E, F, D]."""
    weights = dict(experts.named_parameters())
    names = [sorted((name for name in weights if half in name), key=_number) for half in ("linear_fc1", "linear_fc2")]
    up_E, down_E = ([weights[name].T for name in half] for half in names)
    return torch.stack(up_E), torch.stack(down_E)


def _number(name: str) -> int:
    """The expert's: local_experts.3.linear_fc1.weight, or linear_fc1.weight3."""
    return int("".join(letter for letter in name.replace("fc1", "").replace("fc2", "") if letter.isdigit()))


def _forget(*holders: Any) -> None:
    for holder in holders:
        for tensor in holder.parameters() if isinstance(holder, torch.nn.Module) else [holder]:
            tensor.grad = None


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def _speed(flops: float, timing: Timing) -> dict[str, float]:
    return {"seconds": timing.seconds, "TFLOP/s": flops / timing.seconds / 1e12, **memory_over(timing)}
