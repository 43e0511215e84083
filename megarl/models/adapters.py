"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): which matrices of a model have one, by the names of PEFT's files.

Each Hugging Face matrix W [out, in] that is adapted has A [rank, in] and B [out, rank] of its own, also where Megatron fuses several
matrices into one parameter, so that an adapter is PEFT's, one to one: W + alpha / rank B A.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError
from megarl.models.weight_map import QKV, GateUp, HeadKind, Op, Plain, Weight

if TYPE_CHECKING:
    from megarl.config import LoraSettings
    from megarl.models.description import ModelDescription

# Families of which tests/distributed/test_lora.py has compared the gradients of every layout with those of one rank.
PROVEN = ("qwen3", "qwen3_moe")
PEFT = "base_model.model."  # begins the names in PEFT's files
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_FOLDER = "adapter"  # in the directory of the merged model
_OPS = (Plain, QKV, GateUp)  # between the matrices and Megatron's parameter


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
    family = model.config["model_type"]
    if family not in PROVEN:
        raise ConfigError(f"model.lora: not supported for {family}; it is for {', '.join(PROVEN)}")
    candidates = [(weight, _group(weight)) for weight in model.weights(head) if weight.linear and weight.layer is not None]
    known = {group for _, group in candidates} | {_leaf(name) for weight, _ in candidates for name in weight.hf}
    for target in settings.targets or ():
        if target not in known:
            raise ConfigError(f"model.lora.targets: {target} is none of {family}'s: {', '.join(sorted(known))}")
    chosen = set(settings.targets or known)
    found: dict[str, tuple[Weight, list[Factors]]] = {}
    for weight, group in candidates:
        indices = [index for index, name in enumerate(weight.hf) if group in chosen or _leaf(name) in chosen]
        if indices:
            found[weight.name] = weight, [_factors(weight, index, settings.rank) for index in indices]
    return found


def factor_weights(parameters: Iterable[tuple[Weight, list[Factors]]]) -> list[Weight]:
    """All factors of `adapted`, those of one layer and kind following each other in the order of the experts, as exports need them."""
    kinds: dict[tuple[int | None, str], list[Weight]] = {}
    for weight, factors in parameters:
        for one in factors:
            kind = weight.hf[one.index].replace(f".{weight.expert}.", ".*.") if weight.expert is not None else weight.hf[one.index]
            for part in (one.a, one.b):
                kinds.setdefault((weight.layer, f"{kind} {part is one.a}"), []).append(part)
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
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(set(targets)),
        "inference_mode": True,
    }


def check_peft_config(given: Mapping[str, Any], settings: LoraSettings, where: str) -> None:
    """Raise ConfigError unless a PEFT directory's adapter_config.json describes an adapter that `settings` can begin from."""
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


def _group(weight: Weight) -> str:
    if weight.expert is not None:
        return "experts"
    return "attention" if ".self_attention." in weight.name else "mlp"


def _leaf(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _factors(weight: Weight, index: int, rank: int) -> Factors:
    name = weight.hf[index].removesuffix(".weight")
    if not isinstance(weight.op, _OPS):
        raise ConfigError(f"model.lora.targets: {name}: its layout in Megatron ({type(weight.op).__name__}) has no adapter")
    rows, columns = weight.op.shapes[index]
    if rank > min(rows, columns):
        raise ConfigError(f"model.lora.rank={rank}: {name} is [{rows}, {columns}]")
    dim = weight.op.dim

    def factor(which: str, shape: tuple[int, int], axis: int) -> Weight:
        op: Op = Plain(shape, axis if dim == axis else None)
        return Weight(f"{name}.lora_{which}", (f"{PEFT}{name}.lora_{which}.weight",), op, weight.layer, weight.expert)

    return Factors(index, factor("A", (rank, columns), 1), factor("B", (rows, rank), 0))
