"""Which matrices have adapters, and what is refused."""

from math import prod
from typing import Any

import pytest

from megarl.config import ConfigError, Layout, LoraSettings
from megarl.models.adapters import adapted, check_peft_config, factor_weights, peft_config
from megarl.plan.parameters import count, shards
from tests.published_models import MODELS, description_of

MOE = "Qwen3-30B-A3B"


def test_targets_are_groups_or_names() -> None:
    model = description_of(MODELS[MOE])
    of = lambda targets: adapted(model, LoraSettings(rank=8, targets=targets))  # noqa: E731
    assert of(["attention", "experts"]).keys() == of(None).keys() == of(["q_proj", "o_proj", "gate_proj", "down_proj"]).keys()
    one = of(["v_proj"])
    assert len(one) == model.sizes.layers and {factors[0].index for _, factors in one.values()} == {2}
    assert [len(factors) for _, factors in of(["attention"]).values()][:2] == [3, 1]


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (MOE, {"targets": ["mlp"]}, "model.lora.targets: mlp is none of qwen3_moe's: attention, down_proj, experts, gate_proj, k_proj"),
        ("Qwen3-8B", {"targets": ["router"]}, "model.lora.targets: router is none of qwen3's: attention, down_proj"),
        (MOE, {"rank": 1024}, r"model.lora.rank=1024: model.layers.0.self_attn.k_proj is \[512, 2048\]"),
        ("Nemotron-3-Nano-30B-A3B", {}, "model.lora: not supported for nemotron_h; it is for deepseek_v2, deepseek_v3"),
        ("Granite-3.1-3B-A800M", {"targets": ["gate_proj"]}, "gate_proj is none of granitemoe's: attention, experts, input_linear, k_proj"),
    ],
)
def test_what_no_adapter_can_be_made_for_is_refused(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted(description_of(MODELS[model]), LoraSettings(**changes))


def test_a_peft_configuration_is_read_back_and_others_are_refused() -> None:
    settings = LoraSettings(rank=8, alpha=16.0)
    written = peft_config(settings, "base", ["q_proj"])
    check_peft_config(written, settings, "there")
    for change in ({"r": 4}, {"lora_alpha": 8}, {"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"q_proj": 2}}):
        with pytest.raises(ConfigError, match=f"model.lora.init: there: {next(iter(change))}"):
            check_peft_config({**written, **change}, settings, "there")


@pytest.mark.parametrize("layout", [Layout(), Layout(ranks=8, tp=2, ep=4, etp=2), Layout(ranks=8, pp=2, ep=4)])
def test_the_plan_counts_the_factors(layout: Layout) -> None:
    """On all ranks together, but for copies, as many elements as the factors have; the weights themselves are frozen."""
    model, settings = description_of(MODELS[MOE]), LoraSettings(rank=16)
    stages = shards(model, "lm", layout, {}, settings)
    whole = shards(model, "lm", layout, {})
    weights = factor_weights(adapted(model, settings).values())

    def elements(expert: bool) -> int:
        found = [one for one in weights if (one.expert is not None) == expert]
        ranks = layout.etp if expert else layout.tp
        return sum(prod(one.op.packed_shape) // (ranks if one.op.axis is not None else 1) for one in found)

    assert sum(count(chunk.dense) for stage in stages for chunk in stage) == elements(expert=False)
    assert sum(count(chunk.experts) for stage in stages for chunk in stage) * layout.ep == elements(expert=True)
    assert sum(chunk.frozen for stage in stages for chunk in stage) == sum(chunk.elements for stage in whole for chunk in stage)
