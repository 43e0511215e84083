"""The weight maps of the large published models, without their weights: names, shapes, parameters, and who holds which slice of them."""

import re
from math import prod
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megarl.config import Layout, ModelSettings
from megarl.models.families import check_layout
from megarl.models.weight_map import Weight
from megarl.models.weight_ops import Shape
from megarl.parallel.backend import choose
from megarl.parallel.build import transformer_config
from megarl.plan.parameters import stage_layers
from tests.published_models import MODELS, Published, description_of
from tools.make_tiny_model import KNOWN_AS


def transformers_shapes(model: Published) -> tuple[dict[str, Shape], int]:
    """The tensors that transformers would save, and its count of parameters; nothing is allocated."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(KNOWN_AS.get(model.kind, model.kind), **model.config))
    saved = revert_weight_conversion(built, built.state_dict())  # it holds a layer's experts in one tensor, and saves them one by one
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    stacks = re.compile(r"(?<=\.mlp\.experts\.)(?=\w+$)|(?<=put_linear\.)(?=weight$)")
    for name in [name for name in shapes if stacks.search(name)]:  # or saves the stack
        experts, *shape = shapes.pop(name)
        shapes |= {stacks.sub(f"{expert}.", name): tuple(shape) for expert in range(experts)}
    return shapes, sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_and_parameters_are_those_of_transformers_and_of_the_publisher(name: str) -> None:
    model = description_of(MODELS[name])
    ours = model.expected()
    theirs, parameters = transformers_shapes(MODELS[name])
    stored_twice = model.family.optional(model.config)  # a tied output layer, which transformers lists and a checkpoint may leave out
    assert ours == {key: shape for key, shape in theirs.items() if key not in stored_twice}
    buffers = [key for key in ours if key.endswith("e_score_correction_bias") and "moe_statics" not in key]  # but parameters in Ernie-4.5
    biases = sum(prod(ours[key]) for key in buffers)
    total = sum(prod(shape) for shape in ours.values())
    assert total - biases == parameters and total == MODELS[name].parameters


def held(weight: Weight, layout: Layout) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """What each rank that cuts the weight reads of it, as (elements of its parameter, [(which tensor, first, last row of the cut)])."""
    ranks = layout.etp if weight.expert is not None else layout.tp
    found = []
    for rank in range(ranks):
        read: list[tuple[int, int, int]] = []

        def slices(index: int, dim: int | None, start: int, stop: int, read: list[tuple[int, int, int]] = read) -> Tensor:
            shape = list(weight.op.shapes[index])
            if dim is not None:
                read.append((index, start, stop))
                shape[dim] = stop - start
            return torch.empty(shape, device="meta")

        shard = weight.op.read_shard(slices, rank, ranks)
        assert shard.shape == weight.op.shard_shape(ranks)
        found.append((shard.numel(), read))
    return found


def assert_covered(weight: Weight, layout: Layout) -> None:
    """The ranks that cut a weight read each of its elements once; where nothing is cut, each reads all of it."""
    several, dim = held(weight, layout), weight.op.dim
    if dim is None or len(several) == 1:
        assert all(elements == prod(weight.op.packed_shape) and not read for elements, read in several)
        return
    for index, shape in enumerate(weight.op.shapes):
        cuts = sorted((start, stop) for _, read in several for which, start, stop in read if which == index)
        assert [0, *(stop for _, stop in cuts)] == [*(start for start, _ in cuts), shape[dim]], "from end to end"
    assert sum(elements for elements, _ in several) == sum(prod(shape) for shape in weight.op.shapes), "no vocabulary here is padded"


def stages(config: TransformerConfig, layout: Layout) -> list[int]:
    """The layers that Megatron builds, stage by stage and chunk by chunk, counted from 0."""
    found: list[int] = []
    for stage in range(layout.pp):
        for chunk in range(layout.vpp) if layout.vpp else [None]:
            start = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
            found += range(start, start + get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_a_large_layout_hold_every_element_once(name: str) -> None:
    model, layout, first = description_of(MODELS[name]), MODELS[name].layout, MODELS[name].first
    megatron = {} if first is None else {"num_layers_in_first_pipeline_stage": first}
    check_layout(model, layout, megatron)
    config = transformer_config(model, ModelSettings(path=Path(name), megatron=megatron), layout, choose())
    weights = model.weights("lm")
    for weight in {(weight.op, weight.expert is None): weight for weight in weights}.values():
        assert_covered(weight, layout)
    assert sorted(stages(config, layout)) == list(range(config.num_layers))
    assert stages(config, layout) == [one for stage in stage_layers(config.num_layers, layout, megatron) for part in stage for one in part]
    assert config.num_moe_experts is None or config.num_moe_experts % layout.ep == 0
    assert len({weight.name for weight in weights}) == len(weights)
