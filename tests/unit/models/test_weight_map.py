"""The operations of weight maps are exact inverses, read only their slices, and say what a checkpoint and a layout must be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config import ConfigError, Layout
from megarl.models.checkpoint_names import parameter_shape
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint, check_layout, family_of
from megarl.models.hf import read_config
from megarl.models.weight_ops import QKV, Fused, GateUp, OneRow, Op, Plain, Sections
from megarl.parallel.weights import canonical
from tests.distributed import tiny_training
from tests.distributed.tiny_training import make_checkpoint

EIGHT = {"num_experts": 8}
TINY = {**tiny_training.TINY, **EIGHT}
OPS: dict[str, Op] = {
    "replicated": Plain((12,)),
    "one_row": OneRow(12),
    "column": Plain((12, 5), 0),
    "row": Plain((5, 12), 1),
    "vocabulary": Plain((13, 5), 0, pads=True),
    "qkv": QKV(heads=12, groups=4, head_dim=3, rest=(5,)),
    "qkv_bias": QKV(heads=12, groups=4, head_dim=3, rest=()),
    "gate_up": GateUp(ffn=12, hidden=5),
    "fused_qkv": Fused(QKV(heads=12, groups=4, head_dim=3, rest=(5,))),
    "fused_qkv_bias": Fused(QKV(heads=12, groups=4, head_dim=3, rest=())),
    "gated_qkv": QKV(heads=12, groups=4, head_dim=3, rest=(5,), gated=True),
    "sections": Sections(4, (("a", 3), ("b", 2), ("c", 1)), (2, 1), (5,)),
    "interleaved_sections": Sections(4, (("a", 3), ("b", 2), ("c", 1)), (2, 1), (5,), interleaved=True),
    "kernel_sections": Sections(4, (("a", 3), ("b", 2)), (2,), (1, 5)),
    "fused_gate_up": Fused(GateUp(ffn=12, hidden=5)),
}


def drawn(op: Op) -> list[Tensor]:
    return [torch.randn(*shape) for shape in op.shapes]


@pytest.mark.parametrize("name", OPS)
def test_unpack_is_the_inverse_of_pack(name: str) -> None:
    op, tensors = OPS[name], drawn(OPS[name])
    packed = op.pack(tensors)
    assert packed.shape == op.packed_shape
    assert all(torch.equal(one, two) for one, two in zip(op.unpack(packed), tensors, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", OPS)
def test_shards_are_chunks_of_the_packed_tensor_and_join_to_the_whole(name: str, ranks: int) -> None:
    op, tensors = OPS[name], drawn(OPS[name])
    seen = 0

    def read(index: int, dim: int | None, start: int, stop: int) -> Tensor:
        nonlocal seen
        piece = tensors[index] if dim is None else tensors[index].narrow(dim, start, stop - start)
        seen += piece.numel()
        return piece

    shards = [op.read_shard(read, rank, ranks) for rank in range(ranks)]
    assert all(shard.shape == op.shard_shape(ranks) for shard in shards)
    assert all(torch.equal(one, two) for one, two in zip(op.join(shards), tensors, strict=True))
    if op.axis is not None:
        assert seen == sum(tensor.numel() for tensor in tensors), "every element is read by one rank alone"
        packed = torch.cat(shards, dim=op.axis)
        assert torch.equal(packed.narrow(op.axis, 0, op.packed_shape[op.axis]), op.pack(tensors))
        assert not packed[op.packed_shape[0] :].any(), "vocabulary padding is zero"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", OPS)
def test_a_parameter_is_its_shard_in_the_order_of_its_pieces(name: str, ranks: int) -> None:
    op = OPS[name]
    whole = op.parameter(op.pack(drawn(op)))
    assert torch.equal(op.parameter(op.chunk(whole, 1)), whole)
    assert len(whole) == sum(parameter_shape(piece)[0] for piece in op.pieces.values())
    if op.axis != 0 or op.pads:
        return
    pieces = [piece.chunk(ranks) for piece in whole.split([parameter_shape(piece)[0] for piece in op.pieces.values()])]
    for rank, shard in enumerate(op.chunk(whole, 1).chunk(ranks)):
        assert torch.equal(op.parameter(shard), torch.cat([piece[rank] for piece in pieces]))
        assert torch.equal(op.chunk(op.parameter(shard), ranks), shard)


def test_qkv_is_interleaved_by_group() -> None:
    query, key, value = torch.arange(4.0), torch.tensor([10.0, 11.0]), torch.tensor([20.0, 21.0])
    packed = QKV(heads=4, groups=2, head_dim=1, rest=()).pack([query, key, value])
    assert packed.tolist() == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_gates_follow_the_queries_of_their_group() -> None:
    query = torch.tensor([0.0, -0.5, 1.0, -1.5, 2.0, -2.5, 3.0, -3.5])  # a head's query, then its gate
    packed = QKV(heads=4, groups=2, head_dim=1, rest=(), gated=True).pack([query, torch.tensor([10.0, 11.0]), torch.tensor([20.0, 21.0])])
    assert packed.tolist() == [[0, 1, -0.5, -1.5, 10, 20], [2, 3, -2.5, -3.5, 11, 21]]


def test_sections_are_kind_after_kind_in_a_parameter() -> None:
    op = Sections(2, (("a", 2), ("b", 1)), (2,), (), interleaved=True)
    assert op.parameter(op.pack([torch.arange(6.0)])).tolist() == [0, 1, 3, 4, 2, 5]


def test_every_tensor_of_a_family_is_in_one_exported_row() -> None:
    for head in family_of(TINY).heads:
        names = [name for weight in family_of(TINY).weights(TINY, head) if not weight.alias for name in weight.hf]
        assert len(names) == len(set(names)) == 3 + 4 * (9 + 8 * 3)


@pytest.mark.parametrize(
    ("built", "name"),
    [
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.5.input_layernorm.weight"),
        ("decoder.layers.1.self_attention.linear_qkv.weight", "decoder.layers.5.self_attention.linear_qkv.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.4.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight3", "decoder.layers.4.mlp.experts.local_experts.11.linear_fc1.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
            "decoder.layers.4.mlp.experts.local_experts.11.linear_fc2.weight",
        ),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
    ],
)
def test_names_of_both_layer_specs_become_canonical(built: str, name: str) -> None:
    assert canonical(built, layers=[4, 5], first_expert=8) == name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", **EIGHT)


def rewrite(path: Path, **changes: Any) -> None:
    """Changes tensors of a checkpoint; None removes one."""
    tensors = {**load_file(path / "model.safetensors"), **{name.replace("/", "."): value for name, value in changes.items()}}
    save_file({name: value for name, value in tensors.items() if value is not None}, path / "model.safetensors")


def test_checkpoint_that_fits_is_accepted(path: Path) -> None:
    assert check_checkpoint(path).config["num_experts"] == 8


def test_num_local_experts_of_transformers_5_is_understood(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["num_local_experts"] = config.pop("num_experts")
    (path / "config.json").write_text(json.dumps(config))
    assert check_checkpoint(path).config["num_experts"] == read_config(path)["num_experts"] == 8


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: no such directory: .*nowhere$"):
        check_checkpoint(tmp_path / "nowhere")


def test_missing_tensor_is_refused_by_name(path: Path) -> None:
    rewrite(path, **{"model.layers.2.mlp.experts.5.up_proj.weight": None, "model.norm.weight": None})
    with pytest.raises(ConfigError, match=r"^model\.path: .* lacks the tensor model\.norm\.weight \(2 of 135 are missing\)$"):
        check_checkpoint(path)


def test_wrong_shape_is_refused_with_both_shapes(path: Path) -> None:
    rewrite(path, **{"model.layers.1.self_attn.k_proj.weight": torch.zeros(32, 128)})
    expected = r"^model\.path: .*: model\.layers\.1\.self_attn\.k_proj\.weight has shape \[32, 128\], expected \[64, 128\] by config\.json$"
    with pytest.raises(ConfigError, match=expected):
        check_checkpoint(path)


def test_unknown_tensor_is_refused_by_name(path: Path) -> None:
    rewrite(path, **{"model.layers.4.input_layernorm.weight": torch.zeros(128)})
    with pytest.raises(
        ConfigError, match=r"holds the tensor model\.layers\.4\.input_layernorm\.weight, which Qwen3MoeForCausalLM does not have"
    ):
        check_checkpoint(path)


def test_quantized_tensor_is_refused(path: Path) -> None:
    rewrite(path, **{"model.norm.weight": torch.zeros(128, dtype=torch.int8)})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is stored as I8"):
        check_checkpoint(path)


CLASSIFIER: dict[str, Any] = {"architectures": ["Qwen3MoeForSequenceClassification"], "num_labels": 1}


def test_critic_may_come_from_a_language_model_or_from_a_classifier_with_one_label(path: Path, tmp_path: Path) -> None:
    critic = make_checkpoint(tmp_path / "critic", **EIGHT, **CLASSIFIER)
    assert "score.weight" in load_file(critic / "model.safetensors")
    for directory in (path, critic):
        check_layout(check_checkpoint(directory, "value"), Layout(ranks=2, tp=2))


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({}, {"score.weight": torch.zeros(2, 128)}, "score.weight has shape [2, 128], expected [1, 128] by config.json"),
        ({}, {"score.weight": torch.zeros(1, 64)}, "score.weight has shape [1, 64], expected [1, 128] by config.json"),
        ({}, {"score.weight": None}, "lacks the tensor score.weight (1 of 135 are missing)"),
        (
            {},
            {"score.bias": torch.zeros(1)},
            "holds the tensor score.bias, which Qwen3MoeForSequenceClassification does not have (1 such tensors)",
        ),
        (
            {},
            {"lm_head.weight": torch.zeros(128, 128)},
            "holds the tensor lm_head.weight, which Qwen3MoeForSequenceClassification does not have",
        ),
        ({"hidden_size": 64}, {}, "model.embed_tokens.weight has shape [128, 128], expected [128, 64] by config.json"),
        ({"num_labels": 3}, {}, "classifies into 3 labels; a critic or reward model must have exactly 1"),
        ({"num_labels": None}, {}, "classifies into None labels; a critic or reward model must have exactly 1"),
        ({"id2label": {"0": "bad", "1": "good"}}, {}, "classifies into 2 labels; a critic or reward model must have exactly 1"),
        ({"architectures": ["Qwen3MoeForTokenClassification"]}, {}, "architecture 'Qwen3MoeForTokenClassification' is not supported"),
    ],
)
def test_critic_of_another_size_or_head_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    critic = make_checkpoint(tmp_path / "critic", **EIGHT, **CLASSIFIER)
    rewrite(critic, **tensors)
    (critic / "config.json").write_text(json.dumps({**TINY, **CLASSIFIER, **changes}))
    with pytest.raises(ConfigError) as refused:
        check_checkpoint(critic, "value", "critic.model.path")
    assert str(refused.value).startswith("critic.model.path: ") and message in str(refused.value) and "\n" not in str(refused.value)


def test_critic_is_no_policy(tmp_path: Path) -> None:
    critic = make_checkpoint(tmp_path / "critic", **EIGHT, **CLASSIFIER)
    expected = r"critic is a Qwen3MoeForSequenceClassification: a critic or reward model, where a language model \(Qwen3MoeForCausalLM\)"
    with pytest.raises(ConfigError, match=rf"^model\.path: .*{expected} is needed$"):
        check_checkpoint(critic)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture 'GPT2LMHeadModel' is not supported (supported: Qwen3Moe",
        ),
        ({"mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for Qwen3-MoE"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported: {'quant_method': 'awq'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
    ],
)
def test_config_outside_of_the_family_is_refused(path: Path, change: dict[str, Any], message: str) -> None:
    (path / "config.json").write_text(json.dumps({**TINY, **change}))
    with pytest.raises(ConfigError) as refused:
        check_checkpoint(path)
    assert str(refused.value).startswith("model.path: ") and message in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(ranks=3, tp=3), "layout.tp=3: model has 4 attention heads, not divisible by 3"),
        (Layout(ranks=4, tp=4), "layout.tp=4: model has 2 key-value heads, not divisible by 4"),
        (Layout(ranks=3, ep=3), "layout.ep=3: model has 8 experts, not divisible by 3"),
        (Layout(ranks=3, etp=3), "layout.etp=3: model has 64 units in an expert, not divisible by 3"),
        (Layout(ranks=3, pp=3), "layout.pp=3: model has 4 layers, not divisible by 3"),
        (Layout(ranks=2, pp=2, vpp=3), "layout.vpp=3: model has 4 layers, not divisible by pp*vpp=2*3=6"),
    ],
)
def test_layout_that_does_not_divide_the_model_is_refused(layout: Layout, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_layout(ModelDescription.of(TINY), layout)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "layout", [Layout(ranks=8, tp=2, pp=2, ep=4), Layout(ranks=8, ep=8), Layout(ranks=2, pp=2, vpp=2), Layout(ranks=2, cp=2)]
)
def test_layout_that_divides_the_model_is_accepted(layout: Layout) -> None:
    check_layout(ModelDescription.of(TINY), layout)
