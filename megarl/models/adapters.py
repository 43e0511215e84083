"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): which matrices of a model have one, by the names of PEFT's files.

Each Hugging Face matrix W [out, in] that is adapted has A [rank, in] and B [out, rank] of its own, also where Megatron fuses several
matrices into one parameter, so that an adapter is PEFT's, one to one: W + alpha / rank B A. Matrices that are stored as [in, out] are
turned first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError
from megarl.models.family import HeadKind
from megarl.models.weight_map import Weight, is_matrix, is_router
from megarl.models.weight_ops import QKV, Fused, GateUp, GateUpColumns, Interleaved, Op, Plain, Sections, Shape, Transposed, Turned

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.config import LoraSettings
    from megarl.models.description import ModelDescription

# The model_type of families whose adapters have, in tests/distributed/test_lora.py, the gradients of the merged weights.
PROVEN = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss"),
    *("granite", "granitemoe", "kimi_k2", "llama", "minimax_m2", "ministral", "mistral", "mixtral", "olmoe", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
    *("qwen3_vl", "qwen3_vl_moe"),
)
ROUTER = "router"  # a target that is adapted only where it is named
PEFT = "base_model.model."  # begins the names in PEFT's files
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_FOLDER = "adapter"  # in the directory of the merged model
_NUMBER = re.compile(r"\.(\d+|\{expert\})$")


@dataclass(frozen=True)
class PackedRows(Op):
    """B of a matrix whose rows Megatron splits in several parts: its parameter is the packed tensor of `rows`."""

    rows: Op

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.rows.shapes

    @property
    def packed_shape(self) -> Shape:
        return self.rows.packed_shape

    @property
    def axis(self) -> int | None:
        return self.rows.axis

    @property
    def dim(self) -> int | None:
        return self.rows.dim

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.rows.pack(tensors)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return self.rows.unpack(packed)

    def parameter(self, chunk: Tensor) -> Tensor:
        return chunk

    def chunk(self, parameter: Tensor, ranks: int) -> Tensor:
        return parameter


@dataclass(frozen=True)
class Factors:
    """The two factors of one Hugging Face matrix's adapter, as weights of their own."""

    index: int  # of the matrix, among those of its Megatron parameter
    a: Weight  # [rank, in]
    b: Weight  # [out, rank]


def adapted(model: ModelDescription, settings: LoraSettings, head: HeadKind = "lm") -> dict[str, tuple[Weight, list[Factors]]]:
    """The adapted parameters of the whole model.

    Args:
        model: the model.
        settings: the section `model.lora`.
        head: the model's head, which has no adapter.

    Returns:
        Megatron's parameter and the factors of its adapted matrices, by the parameter's name.

    Raises:
        ConfigError: the family has not one of the targets, the rank is larger than a matrix, or adapters of the family are not supported.
    """
    check_targets(model, settings, head)
    factors: dict[str, tuple[Weight, list[Factors]]] = {}
    for weight in model.weights(head):
        indices = adapted_matrices(weight.name, weight.hf, settings)
        if indices:
            weight = replace(weight, op=_as_layer(weight.op))
            factors[weight.name] = weight, [_factors(weight, index, settings.rank) for index in indices]
    return factors


def check_targets(model: ModelDescription, settings: LoraSettings, head: HeadKind) -> None:
    """Check a model's family, and that it has all targets.

    Args:
        model: the model.
        settings: the section `model.lora`.
        head: the model's head.

    Raises:
        ConfigError: adapters of the family are not supported, or it has not one of the targets.
    """
    family = model.config["model_type"]
    if family not in PROVEN:
        raise ConfigError(f"model.lora: not supported for {family}; it is for {', '.join(PROVEN)}")
    linear = [one for one in model.mappings(head) if is_matrix(one.megatron)]
    known = {_group(one.megatron) for one in linear} | {_leaf(name) for one in linear for name in one.hf}
    known |= {ROUTER for one in model.mappings(head) if is_router(one.megatron)}
    for target in settings.targets or ():
        if target not in known:
            raise ConfigError(f"model.lora.targets: {target} is none of {family}'s: {', '.join(sorted(known))}")


def adapted_matrices(name: str, hf: Sequence[str], settings: LoraSettings) -> list[int]:
    """Which of the Hugging Face matrices of a parameter have adapters: none, if it is neither of a linear layer nor a router's.

    Args:
        name: the name of Megatron's parameter.
        hf: the names of its matrices.
        settings: the section `model.lora`.
    """
    if is_router(name):
        return [0] if ROUTER in (settings.targets or ()) else []
    if not is_matrix(name):
        return []
    targets = settings.targets
    return [index for index, one in enumerate(hf) if targets is None or _group(name) in targets or _leaf(one) in targets]


def factor_ops(op: Op, index: int, rank: int) -> tuple[Op, Op]:
    """The operations of A [rank, in] and B [out, rank], which are split where their matrix is.

    Args:
        op: the operation of the parameter that holds the matrix.
        index: the matrix's place among those of the parameter.
        rank: the adapter's rank.
    """
    op = _as_layer(op)
    rows, columns = op.shapes[index]
    b: Op = Plain((rows, rank), 0 if op.dim == 0 else None)
    if isinstance(op, Fused | Turned) and op.dim == 0:
        b = PackedRows(with_columns(op, rank))
    elif isinstance(op, Sections):
        first = sum(op.counts[:index])
        kinds = op.kinds[first : first + op.counts[index]]
        b = PackedRows(replace(op, kinds=kinds, counts=(len(kinds),), rest=(rank,)))
    return Plain((rank, columns), 1 if op.dim == 1 else None), b


def with_columns(op: Op, columns: int) -> Op:
    """The operation of matrices with the same rows and this many columns."""
    if isinstance(op, Fused):
        return Fused(with_columns(op.parts, columns))
    if isinstance(op, Turned):
        return Turned(with_columns(op.of, columns))
    if isinstance(op, QKV | Sections | Interleaved):
        return replace(op, rest=(columns,))
    assert isinstance(op, GateUp | GateUpColumns)
    return replace(op, hidden=columns)


def factor_weights(parameters: Iterable[tuple[Weight, list[Factors]]]) -> list[Weight]:
    """All factors of `adapted`, those of one layer and kind following each other in the order of the experts, as exports need them."""
    kinds: dict[tuple[str, int, str], list[Weight]] = {}
    for weight, factors in parameters:
        kind = weight.name.replace(f".local_experts.{weight.expert}.", ".")
        for one in factors:
            kinds.setdefault((kind, one.index, "A"), []).append(one.a)
            kinds.setdefault((kind, one.index, "B"), []).append(one.b)
    return [weight for group in kinds.values() for weight in group]


def peft_config(settings: LoraSettings, base: str, targets: Iterable[str]) -> dict[str, Any]:
    """PEFT's adapter_config.json.

    Args:
        settings: the section `model.lora`.
        base: the name or path of the base model.
        targets: names of the adapted modules.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "bias": "none",
        "target_modules": sorted(set(targets)),
        "inference_mode": True,
    }


def check_peft_config(given: Mapping[str, Any], settings: LoraSettings, where: str) -> None:
    """Check that adapters can begin from a PEFT directory.

    Args:
        given: its adapter_config.json.
        settings: the section `model.lora`.
        where: the directory, for messages.

    Raises:
        ConfigError: the adapter in it is of another rank, scale or kind.
    """
    wanted = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": settings.alpha}
    neutral = {"bias": ("none", None), "use_dora": (False, None), "use_rslora": (False, None), "fan_in_fan_out": (False, None)}
    for key, value in wanted.items():
        if given.get(key) != value:
            raise ConfigError(f"model.lora.init: {where}: {key} is {given.get(key)!r}, and model.lora's is {value!r}")
    for key, values in neutral.items():
        if given.get(key) not in values:
            raise ConfigError(f"model.lora.init: {where}: {key}={given[key]!r} is not supported")
    for key in ("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters", "exclude_modules", "layers_to_transform"):
        if given.get(key):
            raise ConfigError(f"model.lora.init: {where}: {key}={given[key]!r:.80} is not supported")


def target_of(weight: Weight, factors: Factors) -> str:
    """The name of the adapted module: q_proj, gate_proj."""
    return _leaf(weight.hf[factors.index])


def target_names(model: ModelDescription, settings: LoraSettings) -> list[str]:
    """The names of all adapted modules."""
    parts = adapted(model, settings).values()
    return sorted({target_of(weight, one) for weight, factors in parts for one in factors})


def _group(name: str) -> str:
    if ".experts." in name:
        return "experts"
    return "attention" if ".self_attention." in name else "mlp"


def _leaf(name: str) -> str:
    """The name of a matrix's module; that of Granite's experts, which are numbered, of all of them."""
    return _NUMBER.sub("", name.removesuffix(".weight")).rpartition(".")[2]


def _as_layer(op: Op) -> Op:
    """The operation of matrices [out, in], also where they are stored as [in, out]."""
    return Turned(op) if isinstance(op, Interleaved | GateUpColumns | Transposed) else op


def _factors(weight: Weight, index: int, rank: int) -> Factors:
    name = weight.hf[index].removesuffix(".weight")
    rows, columns = weight.op.shapes[index]
    if rank > min(rows, columns):
        raise ConfigError(f"model.lora.rank={rank}: {name} is [{rows}, {columns}]")
    ops = factor_ops(weight.op, index, rank)
    a, b = (
        Weight(f"{name}.lora_{which}", (f"{PEFT}{name}.lora_{which}.weight",), op, weight.layer, weight.expert)
        for which, op in zip("AB", ops, strict=True)
    )
    return Factors(index, a, b)
