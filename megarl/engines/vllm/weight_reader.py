"""Fingerprint the weights that a vLLM worker computes with, by Hugging Face name, in whatever form the layers keep them.

Three forms occur, and each is read exactly:
- plain memory (norms, embedding tables, all linear layers on a GPU): hashed in place;
- opaque (CPU linear layers keep a oneDNN or AMX handle and drop the weight): the layer's own kernel multiplies the identity matrix, which
  returns every weight bit for bit (1 * w plus zeros), through the very code that serves tokens;
- packed (experts): the place to which packing moves each element is found once, by packing a throw-away expert whose elements are their own
  indices; the keys of the fingerprint are arranged likewise, and the packed weights hashed in place.

The walk goes over the modules, not over a list of names: a weight that no rule covers still appears, under its own name, so that the
comparison with the trainer's names reports it. Axes: O output rows, I input columns, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, convert_to_unquantized_kernel_format
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.ernie45_moe import Ernie4_5_MoeForCausalLM
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts, OAIAttention

from megarl.engines.vllm.checkpoint_paths import checkpoint_path
from megarl.engines.vllm.expert_loader import Stored, expert_names, parts_of, stored_as
from megarl.engines.vllm.mamba import decay_rates
from megarl.models.weight_map import FP8_BLOCK, SCALES
from megarl.sync.fingerprint import Piece, fingerprints, keys, rearranged_fingerprints

_PROBE_COLUMNS = 512  # columns of the identity that a layer multiplies at a time
# Kernels of fp8 experts that take them in the layout of the checkpoint (oracle/fp8.py:584; the CPU's is cpu_fp8.py).
_AS_LOADED = {Fp8MoeBackend.CPU, Fp8MoeBackend.TRITON, Fp8MoeBackend.VLLM_CUTLASS, Fp8MoeBackend.HPC}
_BIAS = "e_score_correction_bias"  # a router's expert bias: added to the scores by which experts are chosen


@dataclass(frozen=True)
class _Shards:
    """Shards of equal shape, each of a different tensor, all at the same offset in their whole tensors."""

    names: list[str]  # Hugging Face names
    row: int  # of the shard in the whole tensor
    column: int
    stack_BRC: Tensor
    further: bool = False  # part of the same copy of the tensor as the preceding shards of this name


@dataclass(frozen=True)
class _Part:
    """The positions in an expert's packed form that hold one of its tensors, or this worker's shard of it."""

    row: int  # of the shard in the whole tensor
    column: int
    rows: int
    columns: int
    start: int  # first of these positions
    stop: int  # one past the last
    key_P: Tensor  # int64, the fingerprint keys at positions start to stop; 0 at those that hold something else


@dataclass(frozen=True)
class _Packed:
    """The same tensor (gate, up or down projection) of all experts of a layer, in packed form."""

    names: list[str]
    part: _Part
    stack_BP: Tensor
    further: bool = False  # as in `_Shards`


@torch.no_grad()
def engine_weights(model: nn.Module, tied: bool, dtype: torch.dtype, draft: nn.Module | None = None) -> dict[str, list[Piece]]:
    """Fingerprint all weights of a model, at every place that holds a copy of a tensor.

    Args:
        model: vLLM's model in one worker.
        tied: whether the output layer shares the embedding table.
        dtype: the model's dtype, in which weights are sent.
        draft: the model with which it drafts; its layers that are not the model's own are fingerprinted, too.

    Returns:
        Hugging Face name -> the pieces that this worker holds, place by place.

    Raises:
        NotImplementedError: a layer's form cannot be read.
    """
    places, hashed = list[tuple[list[str], int, int, int, int, bool]](), list[Tensor]()
    walks = [_walk(model, tied)] if draft is None else [_walk(model, tied), _walk(draft, tied, model)]
    for shards in chain(*walks):  # one layer at a time: weights read through its kernel are freed after hashing
        if isinstance(shards, _Packed):
            places.append((shards.names, shards.part.row, shards.part.column, shards.part.rows, shards.part.columns, shards.further))
            hashed.append(rearranged_fingerprints(shards.stack_BP[:, shards.part.start : shards.part.stop], shards.part.key_P))
            continue
        _, rows, columns = shards.stack_BRC.shape
        places.append((shards.names, shards.row, shards.column, rows, columns, shards.further))
        hashed.append(fingerprints(_as_sent(shards, dtype), shards.row, shards.column))
    values = iter(torch.cat(hashed).tolist())
    pieces: dict[str, list[Piece]] = {}
    for names, row, column, rows, columns, further in places:
        for name in names:
            known = pieces.setdefault(name, [])
            place = known[-1].place + (not further) if known else 0
            known.append(Piece(row, column, rows, columns, next(values), place))
    return pieces


def _as_sent(shards: _Shards, dtype: torch.dtype) -> Tensor:
    """Return the shards in the dtype in which they were sent.

    vLLM keeps some routers in float32; one whose values `dtype` cannot represent stays in float32, so that the comparison reports it.
    A router's expert bias is sent in float32, too, and so are the scales of fp8 weights.
    """
    if shards.stack_BRC.dtype == dtype or shards.names[0].endswith((_BIAS, SCALES)) or shards.stack_BRC.element_size() == 1:
        return shards.stack_BRC
    narrow = shards.stack_BRC.to(dtype)
    return narrow if torch.equal(narrow.to(shards.stack_BRC.dtype), shards.stack_BRC) else shards.stack_BRC


def _walk(model: nn.Module, tied: bool, owner: nn.Module | None = None) -> Iterator[_Shards | _Packed]:
    """Yield the weights of a model; of one that drafts for `owner` only those that are not that model's own."""
    packed = getattr(model if owner is None else owner, "packed_modules_mapping", {})
    biases, stored = _bias_names(model), stored_as(model)
    shared = {id(layer) for layer in owner.modules()} if owner is not None else set()
    for path, layer in ((checkpoint_path(model, path), layer) for path, layer in model.named_modules() if id(layer) not in shared):
        if isinstance(layer, RoutedExperts):
            yield from _experts(path, layer, biases, stored)
        elif isinstance(layer, QwenGatedDeltaNetAttention):
            yield from _delta_net(path, layer)
        elif isinstance(layer, MambaMixer2):
            yield from _mamba(path, layer)
        elif isinstance(layer, LinearBase):
            if not path.endswith(".linear_attn.conv1d"):  # `_delta_net` yields it
                yield from _linear(path, layer, packed)
        elif isinstance(layer, ParallelLMHead):
            if not tied:
                yield _vocabulary(f"{path}.weight", layer, _matrix(layer))
        elif isinstance(layer, VocabParallelEmbedding):
            yield _vocabulary(f"{path}.weight", layer, layer.weight)
            if tied:
                yield _vocabulary(f"{path}.weight", layer, _matrix(_output_layer(model)))
        elif isinstance(layer, MiniMaxText01RMSNormTP):
            yield _plain([f"{path}.weight"], 0, layer.weight_shard_rank * len(layer.weight), layer.weight)
        elif isinstance(layer, Mixer2RMSNormGated):
            yield _plain([f"{path}.weight"], 0, layer.tp_rank * len(layer.weight), layer.weight)
        elif isinstance(layer, OAIAttention):
            yield _plain([f"{path}.sinks"], 0, layer.qkv_proj.tp_rank * len(layer.sinks), layer.sinks)
        elif isinstance(layer, MLAAttention):
            yield from _stale(path, layer)
        else:
            for name, parameter in layer.named_parameters(path, recurse=False):
                yield _plain([name], 0, 0, parameter)


def _stale(path: str, layer: MLAAttention) -> Iterator[_Shards]:
    """Yield the parameters of multi-latent attention, except those derived from kv_b_proj, which the walk visits as a layer of its own.

    vllm/model_executor/layers/attention/mla_attention.py:1325 registers the two halves of kv_b_proj, transposed, as parameters. No
    checkpoint has them, so they are yielded, under their own names, only if they do not match kv_b_proj.
    """
    quantized = isinstance(layer.kv_b_proj.quant_method, Fp8LinearMethod)
    weight_OI = get_and_maybe_dequant_weights(layer.kv_b_proj, layer.kv_b_proj.params_dtype) if quantized else _matrix(layer.kv_b_proj)
    keys, values = weight_OI.view(layer.num_heads, -1, weight_OI.shape[1]).split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
    made = {"W_UK_T": keys, "W_UV": values.transpose(1, 2)}
    for name, parameter in layer.named_parameters(recurse=False):
        if name not in made or not torch.equal(parameter, made[name].to(parameter.dtype)):
            yield _plain([f"{path}.{name}"], 0, 0, parameter)


def _delta_net(path: str, layer: QwenGatedDeltaNetAttention) -> Iterator[_Shards]:
    """Yield the parameters of a gated delta net that belong to no layer inside it, which tensor parallelism cuts by head, and its
    convolution, of whose queries, keys and values each rank has a part."""
    for name, parameter in layer.named_parameters(recurse=False):
        yield _plain([f"{path}.{name}"], 0, layer.tp_rank * len(parameter), parameter)
    weight, start, whole, last = layer.conv1d.weight, 0, 0, False
    for size in (layer.key_dim, layer.key_dim, layer.value_dim):
        rows = size // layer.tp_size
        yield _plain([f"{path}.conv1d.weight"], whole + layer.tp_rank * rows, 0, weight[start : start + rows], last)
        start, whole, last = start + rows, whole + size, True


def _mamba(path: str, layer: MambaMixer2) -> Iterator[_Shards]:
    """Yield the parameters of a Mamba mixer that belong to no layer inside it, which tensor parallelism cuts by head.

    Of A_log the mixer computes with `A`; it is yielded as it was sent (`mamba.py`) if that is what A has been made of, and otherwise A.
    """
    rank = layer.norm.tp_rank
    for name, parameter in layer.named_parameters(recurse=False):
        if name == "A" and torch.equal(parameter, decay_rates(layer.A_log)):
            name, parameter = "A_log", layer.A_log
        yield _plain([f"{path}.{name}"], 0, rank * len(parameter), parameter)


def _plain(names: list[str], row: int, column: int, tensor: Tensor, further: bool = False) -> _Shards:
    return _Shards(names, row, column, tensor.reshape(1, 1, -1) if tensor.ndim < 2 else tensor.reshape(1, tensor.shape[0], -1), further)


def _linear(path: str, layer: LinearBase, packed: dict[str, list[str]]) -> Iterator[_Shards]:
    """Split a linear layer of any parallel kind, its weight and its bias if it has one, into the checkpoint's tensors."""
    weight_OI = _matrix(layer)
    parent, _, leaf = path.rpartition(".")
    column = layer.tp_rank * weight_OI.shape[1] if isinstance(layer, RowParallelLinear) else 0
    bias_O = getattr(layer, "bias", None)
    start, last = 0, None
    for name, rows, row in _outputs(layer, packed.get(leaf, [leaf]), weight_OI.shape[0]):
        yield _plain([f"{parent}.{name}.weight"], row, column, weight_OI[start : start + rows], name == last)
        if bias_O is not None:  # CPU kernels may widen the bias to fp32, which is lossless
            yield _plain([f"{parent}.{name}.bias"], 0, row, bias_O[start : start + rows].to(layer.params_dtype), name == last)
        if isinstance(layer.quant_method, Fp8LinearMethod):
            scale_JI = layer.weight_scale_inv[start // FP8_BLOCK : -(-(start + rows) // FP8_BLOCK)]
            yield _plain([f"{parent}.{name}.weight{SCALES}"], row // FP8_BLOCK, column // FP8_BLOCK, scale_JI, name == last)
        start, last = start + rows, name
    if start != weight_OI.shape[0]:
        raise NotImplementedError(f"{path}: {start} of its {weight_OI.shape[0]} output rows belong to known tensors")


def _outputs(layer: LinearBase, names: list[str], rows: int) -> list[tuple[str, int, int]]:
    """Return (checkpoint name, rows held here, first row in the checkpoint's tensor) of each part that is stacked in the layer.

    With fewer names than parts, the first is that of several, which the checkpoint stacks one after another, too (Phi-3, Qwen3.5).
    """
    if isinstance(layer, QKVParallelLinear):
        kv_rank, kv_ranks = layer.tp_rank // layer.num_kv_head_replicas, layer.tp_size // layer.num_kv_head_replicas
        q, k, v = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size, layer.num_kv_heads * layer.v_head_size
        sizes, ranks, wholes = [q, k, v], [layer.tp_rank, kv_rank, kv_rank], [q * layer.tp_size, k * kv_ranks, v * kv_ranks]
    elif isinstance(layer, MergedColumnParallelLinear):
        sizes, wholes = [size // layer.tp_size for size in layer.output_sizes], list(layer.output_sizes)
        ranks = [layer.tp_rank] * len(sizes)
    else:
        return [(names[0], rows, layer.tp_rank * rows if isinstance(layer, ColumnParallelLinear) else 0)]
    together, rest = len(sizes) - len(names) + 1, names[1:]
    starts = [*accumulate(wholes[: together - 1], initial=0), *[0] * len(rest)]
    parts = zip([names[0]] * together + rest, sizes, ranks, starts, strict=True)
    return [(name, size, start + rank * size) for name, size, rank, start in parts]


def _vocabulary(name: str, layer: VocabParallelEmbedding, weight_VI: Tensor) -> _Shards:
    index = layer.shard_indices  # rows beyond the vocabulary are padding
    return _plain([name], index.org_vocab_start_index, 0, weight_VI[: index.org_vocab_end_index - index.org_vocab_start_index])


def _output_layer(model: nn.Module) -> VocabParallelEmbedding:
    head = getattr(getattr(model, "language_model", model), "lm_head", None)
    if not isinstance(head, VocabParallelEmbedding):
        raise NotImplementedError(f"{type(model).__name__} has no output layer called lm_head")
    return head


def _matrix(layer: LinearBase | VocabParallelEmbedding) -> Tensor:
    """Return the weight [O, I] that the layer multiplies with."""
    if isinstance(layer.quant_method, Fp8LinearMethod) and layer.quant_method.use_marlin:
        raise NotImplementedError("fp8 weights as rearranged for GPUs without fp8 (Marlin) are not known here")
    if not hasattr(layer, "cpu_linear"):  # vllm/model_executor/layers/utils.py:452: only the CPU backend repacks linear layers
        return layer.weight
    columns, dtype = _input_size(layer), layer.params_dtype
    parts = []
    for start in range(0, columns, _PROBE_COLUMNS):
        count = min(_PROBE_COLUMNS, columns - start)
        probe = torch.zeros(count, columns, dtype=dtype)
        probe[:, start : start + count].fill_diagonal_(1)
        parts.append(layer.quant_method.apply(layer, probe, None).t())
    return torch.cat(parts, 1).to(dtype)


def _input_size(layer: LinearBase | VocabParallelEmbedding) -> int:
    if isinstance(layer, VocabParallelEmbedding):
        return layer.embedding_dim
    return layer.input_size_per_partition if isinstance(layer, RowParallelLinear) else layer.input_size


def _bias_names(model: nn.Module) -> dict[str, str]:
    """Return the names of the routers' expert biases by the path of their layer, in which they belong to the router or to the layer.

    In Ernie-4.5's checkpoints they belong to a module of their own.
    """
    owners = [
        checkpoint_path(model, path)
        for path, layer in model.named_modules()
        if _BIAS in layer._parameters and not isinstance(layer, RoutedExperts)
    ]
    apart = isinstance(model, Ernie4_5_MoeForCausalLM)
    return {
        path.removesuffix(".gate"): f"{path.removesuffix('.gate')}.moe_statics.{_BIAS}" if apart else f"{path}.{_BIAS}" for path in owners
    }


def _experts(path: str, layer: RoutedExperts, biases: dict[str, str], stored: Stored) -> Iterator[_Shards | _Packed]:
    """Yield the experts of one layer: the projections of each, in the kernel's layout, and their biases; and its router's bias."""
    stacked = isinstance(layer, GptOssRoutedExperts)
    parts = ("_weight", "_bias") if stacked else tuple(f"_weight{scales}" for scales in parts_of(layer))
    for name, parameter in layer.named_parameters(recurse=False):
        if name == _BIAS:  # it belongs to the router, but vLLM's routing reads it here
            yield _plain([biases[path.removesuffix(".routed_experts").removesuffix(".experts")]], 0, 0, parameter)
        elif name not in {stack + part for stack in ("w13", "w2") for part in parts}:
            raise NotImplementedError(f"{path}.{name}: expert parameters other than the three weights and the bias are not known here")
    if isinstance(layer.quant_method, Fp8MoEMethod):
        yield from _fp8_experts(path, layer)
        return
    names, (*parts13, part2, padding13, padding2) = expert_names(path, layer, stored), _parts(layer, stored)
    w13_BP, w2_BP = layer.w13_weight.flatten(1), layer.w2_weight.flatten(1)
    for stack_BP, padding in ((w13_BP, padding13), (w2_BP, padding2)):
        if len(padding) and stack_BP[:, padding].any():
            raise NotImplementedError(f"{path}: the padding of the packed experts holds values other than 0")
    of13 = names[:1] * len(parts13) if stored.joined else names[:-1]
    for index, (one, part) in enumerate(zip(of13, parts13, strict=True)):
        yield _Packed(one, part, w13_BP, further=stored.joined and index > 0)
    yield _Packed(names[-1], part2, w2_BP)
    if stacked:
        yield from _expert_biases(path, layer, *names)


def _expert_biases(path: str, layer: GptOssRoutedExperts, both: list[str], down: list[str]) -> Iterator[_Shards]:
    """Yield the biases of a layer's experts, `both`: of gate and up. Where experts are sliced, the first worker adds those of `down`."""
    kernel, rank = layer.quant_method.moe_kernel.fused_experts, layer.moe_config.tp_rank
    pairs = [(layer.w13_bias, layer.w2_bias)]
    if kernel.w1_bias.data_ptr() != layer.w13_bias.data_ptr():  # after a reload a CPU's kernel has copies of its own
        pairs.append((kernel.w1_bias, kernel.w2_bias))
    for w13_BO, w2_BO in pairs:
        yield _Shards([f"{name}_bias" for name in both], 0, rank * w13_BO.shape[1], w13_BO[:, None])
        if rank == 0:
            yield _Shards([f"{name}_bias" for name in down], 0, 0, w2_BO[:, None])
        elif w2_BO.any():
            raise NotImplementedError(f"{path}: another worker than the first holds biases of down projections")


def _fp8_experts(path: str, layer: RoutedExperts) -> Iterator[_Shards]:
    """Yield the weights and scales of a layer's experts, for kernels that compute with them as they are loaded."""
    method, rank = layer.quant_method, layer.moe_config.tp_rank
    if method.fp8_backend not in _AS_LOADED:
        raise NotImplementedError(f"{path}: fp8 experts as rearranged for {method.fp8_backend.value} are not known here")
    kernel, names = method.moe_kernel.fused_experts, expert_names(path, layer, Stored())
    stacks = [("", layer.w13_weight, layer.w2_weight), (SCALES, layer.w13_weight_scale_inv, layer.w2_weight_scale_inv)]
    if kernel.w1_scale.data_ptr() != layer.w13_weight_scale_inv.data_ptr():  # after a reload the kernel has a copy of its own
        stacks.append((SCALES, kernel.w1_scale, kernel.w2_scale))
    for scales, w13, w2 in stacks:
        gate, up = w13.chunk(2, 1)
        for kind, stack, row, column in zip(names, (gate, up, w2), (rank, rank, 0), (0, 0, rank), strict=True):
            yield _Shards([name + scales for name in kind], row * stack.shape[1], column * stack.shape[2], stack)


def _parts(layer: RoutedExperts, stored: Stored) -> tuple[Any, ...]:
    """Return the positions of the gate, if there is one, up and down projections in packed w13 and w2, and the padding positions of both.

    gpt-oss has one tensor for gate and up, whose rows alternate, and stores the transposes. `stored`: from `stored_as`.

    vLLM packs a throw-away expert whose elements are their own numbers, 1, 2, 3, ...: each position then holds the number of the element
    that is kept there, and 0 is padding. This is valid for any kernel that only moves elements and pads with zeros; `_positions` checks
    that. bfloat16 represents integers exactly only up to 256, so the numbers are packed one byte at a time, lowest byte first.
    """
    weight, inner, hidden, rank = layer.w13_weight, layer.intermediate_size_per_partition, layer.hidden_size, layer.moe_config.tp_rank
    key = (type(layer.quant_method.moe_kernel.fused_experts), inner, hidden, rank, weight.dtype, weight.device, stored)
    if key not in _PARTS:
        halves = layer.moe_config.w13_num_shards  # 1: experts without gates
        count13, count2 = halves * inner * hidden, hidden * inner
        number13 = torch.arange(1, count13 + 1, device=weight.device).view(1, halves * inner, hidden)
        number2 = torch.arange(1, count2 + 1, device=weight.device).view(1, hidden, inner)
        packed13 = packed2 = torch.zeros(1, dtype=torch.int64, device=weight.device)
        for shift in range(0, count13.bit_length(), 8):
            byte13, byte2 = _packed(layer, *[(number >> shift & 0xFF).to(weight.dtype) for number in (number13, number2)])
            packed13, packed2 = packed13 + (byte13.reshape(-1).long() << shift), packed2 + (byte2.reshape(-1).long() << shift)
        w13, down = _positions(packed13, count13).view(halves * inner, hidden), _positions(packed2, count2).view(hidden, inner)
        if isinstance(layer, GptOssRoutedExperts):
            parts: tuple[_Part, ...] = _part(w13.T, 0, rank * 2 * inner), _part(down.T, rank * inner, 0)
        else:
            after_gate = inner * layer.moe_config.tp_size if stored.joined else 0
            rows = (rank * inner, after_gate + rank * inner)[:halves]
            places = ((half, row, 0) for half, row in zip(w13.chunk(halves), rows, strict=True))
            own = [*places, (down, 0, rank * inner)]
            parts = tuple(_part(p.T, column, row) if stored.transposed else _part(p, row, column) for p, row, column in own)
        _PARTS[key] = (*parts, (packed13 == 0).nonzero().squeeze(1), (packed2 == 0).nonzero().squeeze(1))
    return _PARTS[key]


_PARTS: dict[Any, tuple[Any, ...]] = {}


def _part(position_RC: Tensor, row: int, column: int) -> _Part:
    start, stop = int(position_RC.min()), int(position_RC.max()) + 1
    rows, columns = position_RC.shape
    key_P = torch.zeros(stop - start, dtype=torch.int64, device=position_RC.device)
    key_P[position_RC - start] = keys(rows, columns, row, column, position_RC.device)
    return _Part(row, column, rows, columns, start, stop, key_P)


def _packed(layer: RoutedExperts, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Pack expert weights as vLLM does after loading (mirrors UnquantizedFusedMoEMethod._setup_kernel on a throw-away layer)."""
    method = layer.quant_method
    w13, w2 = convert_to_unquantized_kernel_format(method.unquantized_backend, layer.moe_config, w13, w2)
    if method.unquantized_backend != UnquantizedMoeBackend.CPU:
        return w13, w2
    shadow = nn.Module()
    shadow.w13_weight, shadow.w2_weight = nn.Parameter(w13, requires_grad=False), nn.Parameter(w2, requires_grad=False)
    method.moe_kernel.fused_experts.process_weights_after_loading(shadow)
    return shadow.w13_weight.data, shadow.w2_weight.data


def _positions(number_P: Tensor, count: int) -> Tensor:
    """Return the position of each of the numbers 1 .. count, given the number at each packed position (0: padding)."""
    kept = number_P.nonzero().squeeze(1)
    numbers = number_P[kept]
    if not torch.equal(numbers.sort().values, torch.arange(1, count + 1, device=number_P.device)):
        raise NotImplementedError(f"the expert kernel does not merely rearrange its {count} weights")
    position_N = torch.empty_like(numbers)
    position_N[numbers - 1] = kept
    return position_N
