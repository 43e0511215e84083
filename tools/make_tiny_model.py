"""Make a tiny model with random weights, and a tokenizer trained on the spot, as an ordinary Hugging Face directory.

    python tools/make_tiny_model.py OUT [--family qwen3_moe] [--layers 4] [--seed 1]

A Qwen3-MoE of four layers, eight experts (top-2) and 1.0M parameters, or the same sizes in another family's architecture. transformers and
vLLM load OUT as it is. The same options give the same bytes.

The tokenizer is a sentencepiece character model in which the two example tasks' question phrases are single pieces, so that their
prompts are short. Every printable ASCII text survives encode and decode exactly; a character outside the 128 pieces becomes `<|unk|>`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # takes ten seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PAD, END, UNK, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|system|>"
# reasoning-gym's words around the questions of spell_backward and chain_sum.
PHRASES = ("Spell this word backward (example: sun -> nus): ", "State the final answer to the following arithmetic problem: ")
SYMBOLS = "×÷±≤≥≠√π°²³–—‘’“”…éäöüß"  # fills the vocabulary up to 128, a round number for any tensor-parallel split
VOCABULARY = 128
SPACE = "▁"  # how sentencepiece writes a space
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # pieces of a model that sees images, as published
CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}"
    "{%- if message.role == 'assistant' -%}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
# The same, of messages that are texts or lists of parts, of which an image is one.
IMAGE_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{%- if message.role == 'assistant' -%}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def train_sentencepiece(seed: int, more: tuple[str, ...] = ()) -> bytes:
    """Train a sentencepiece model on generated questions of the two tasks, and return it serialised (`tokenizer.model`).

    `more` are further special pieces. No dummy prefix, no normalisation, no collapsing of spaces, so that text survives a round trip.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_corpus(random.Random(seed)),
        model_writer=model,
        model_type="char",
        vocab_size=VOCABULARY,
        required_chars="".join(chr(code) for code in range(33, 127)) + SPACE + SYMBOLS[len(more) :],
        user_defined_symbols=["\n", "\t", *(phrase.replace(" ", SPACE) for phrase in PHRASES)],
        control_symbols=[USER, ASSISTANT, SYSTEM, *more],
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece=PAD,
        eos_piece=END,
        unk_piece=UNK,
        unk_surface=UNK,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def _corpus(rng: random.Random) -> Iterator[str]:
    for _ in range(2000):
        yield PHRASES[0] + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))
        terms = [str(rng.randint(0, 9)) for _ in range(rng.randint(3, 4))]
        yield PHRASES[1] + f" {rng.choice('+-')} ".join(terms) + " ="


def fast_tokenizer(model: bytes, more: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer that splits text exactly as the sentencepiece model does, with the chat template.

    `more` are its further special pieces.
    """
    import sentencepiece
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    # Characters that the corpus lacks score -inf, which tokenizer.json cannot hold.
    vocabulary = [(pieces.id_to_piece(index), max(pieces.get_score(index), -20.0)) for index in range(len(pieces))]
    assert len(vocabulary) == VOCABULARY, f"{len(vocabulary)} pieces, expected {VOCABULARY}"
    # Phrases score 0 and characters less, so the best path takes every phrase whole, as sentencepiece does.
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=pieces.unk_id()))
    # A literal U+2581 would come back as a space: make it an unknown character instead.
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(SPACE), "\N{REPLACEMENT CHARACTER}"), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNK,
        extra_special_tokens=[USER, ASSISTANT, SYSTEM, *more],
        clean_up_tokenization_spaces=False,
        chat_template=IMAGE_TEMPLATE if more else CHAT_TEMPLATE,
        model_max_length=512,
    )


_UNGROUPED = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
_INDEXER = {"index_topk": 12, "index_head_dim": 32, "index_n_heads": 64}  # so many heads that scores are seldom 0, which would be ties
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
KNOWN_AS = {"kimi_k2": "deepseek_v3"}  # model_type that transformers does not know -> the one whose class it is

_GRANITE = {
    "tie_word_embeddings": True,
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.25, "residual_multiplier": 0.22, "logits_scaling": 0.5},
}

# model_type, and the fields of its configuration in addition to or instead of those of `_common`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True, "router_aux_loss_coef": 0.01}),
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "ministral": ("ministral", {"sliding_window": 12}),  # with the layer types of `_mlp`
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {"q_lora_rank": 48}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 12}),
    "deepseek_v32": ("deepseek_v32", {"q_lora_rank": 48, **_INDEXER}),
    "glm4_moe": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True}),
    "moonlight": ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2, "rms_norm_eps": 1e-2, **_UNGROUPED, **_PLAIN}),
    "kimi_k2": ("kimi_k2", {"q_lora_rank": 48, "routed_scaling_factor": 2.827, **_UNGROUPED}),
    "deepseek_v2": ("deepseek_v2", {"q_lora_rank": 48, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}),
    "deepseek_v2_lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", **_UNGROUPED}),
    "glm4_moe_lite": ("glm4_moe_lite", {"q_lora_rank": 48, "rms_norm_eps": 1e-2, **_UNGROUPED, **_PLAIN}),
    "glm_moe_dsa": ("glm_moe_dsa", {"q_lora_rank": 48, "rms_norm_eps": 1e-2, **_INDEXER, **_UNGROUPED, **_PLAIN}),
    "minimax_m2": ("minimax_m2", {"rotary_dim": 16, "bos_token_id": None}),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [0]}),
    "olmoe": ("olmoe", {}),
    "qwen3_next": ("qwen3_next", {"norm_topk_prob": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_5": ("qwen3_5_text", {"tie_word_embeddings": True}),
    "granite": ("granite", {**_GRANITE, "logits_scaling": 4.0}),  # with a smaller one it repeats the last token, whatever is drawn
    "granitemoe": ("granitemoe", _GRANITE),
    "ernie4_5_moe": ("ernie4_5_moe", {"tie_word_embeddings": True}),
    # A time_step_min that no time step is below: transformers alone applies it.
    "nemotron_h": ("nemotron_h", {"layer_norm_epsilon": 1e-3, "time_step_min": 1e-6, "time_step_max": 1.0, "time_step_floor": 0.1}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {}),
    "qwen3_vl": ("qwen3_vl", {"tie_word_embeddings": True}),
    "qwen3_5_moe_vl": ("qwen3_5_moe", {}),
    "qwen3_5_vl": ("qwen3_5", {"tie_word_embeddings": True}),
}
# Families that see images. Their language model's configuration is a part of the model's.
SEEING = ("qwen3_vl_moe", "qwen3_vl", "qwen3_5_moe_vl", "qwen3_5_vl")
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 36,
    "initializer_range": 0.2,  # so much that images change logits as texts do
}
# preprocessor_config.json, with the keys of published models: 4 to 64 tokens an image.
CUTTING: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 4 * 64, "longest_edge": 64 * 64},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def build(
    out: Path, *, layers: int, hidden: int, experts: int, expert_hidden: int, seed: int, family: str = "qwen3_moe", **changes: Any
) -> int:
    """Write the directory and return the number of parameters. `changes`: further fields of the configuration."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    sees = family in SEEING
    sentencepiece_model = train_sentencepiece(seed, VISION if sees else ())
    (out / "tokenizer.model").write_bytes(sentencepiece_model)
    tokenizer = fast_tokenizer(sentencepiece_model, VISION if sees else ())
    tokenizer.save_pretrained(out)
    if sees:
        (out / "preprocessor_config.json").write_text(json.dumps(CUTTING, indent=2))
        (out / "video_preprocessor_config.json").write_text(
            json.dumps({**CUTTING, "video_processor_type": "Qwen3VLVideoProcessor"}, indent=2)
        )
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = configuration(family, layers=layers, hidden=hidden, experts=experts, expert_hidden=expert_hidden, **{**tokens, **changes})
    torch.manual_seed(seed)
    model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config)
    if family != "qwen3_moe":
        _stir(model)
    if sees:
        _embed_padding(model)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    if family == "qwen3_vl_moe":
        _turn_experts(out / "model.safetensors")
    if family == "qwen3_5_moe_vl":
        _stack_experts(out / "model.safetensors", layers, experts)
    if FAMILIES[family][0] in KNOWN_AS:
        written = json.loads((out / "config.json").read_text()) | {"model_type": FAMILIES[family][0]}
        (out / "config.json").write_text(json.dumps(written, indent=2))
    return sum(parameter.numel() for parameter in model.parameters())


def _turn_experts(file: Path) -> None:
    """Transpose the experts' matrices, which transformers 5 saves the other way round than published models have them."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    turned = {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(turned, file, metadata={"format": "pt"})


def _stack_experts(file: Path, layers: int, experts: int) -> None:
    """Stack the experts' matrices, as published models have them; transformers 5 saves each by itself."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    for layer in range(layers):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        for name, leaves in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            each = [torch.cat([tensors.pop(f"{prefix}{expert}.{leaf}.weight") for leaf in leaves]) for expert in range(experts)]
            tensors[prefix + name] = torch.stack(each)
    save_file(tensors, file, metadata={"format": "pt"})


def configuration(family: str, *, layers: int, hidden: int, experts: int, expert_hidden: int, **changes: Any) -> PreTrainedConfig:
    """Return transformers' configuration of the model that `build` writes."""
    from transformers import AutoConfig

    kind, own = FAMILIES[family]
    kind = KNOWN_AS.get(kind, kind)
    fields = {**_common(layers, hidden), **_mlp(kind, layers, hidden, experts, expert_hidden), **own, **changes}
    if family in SEEING:
        tokens = dict(zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), range(6, 10), strict=True))
        deepstack = {"deepstack_visual_indexes": [0, 1] if kind.startswith("qwen3_vl") else []}
        parts = {"text_config": fields, "vision_config": {**TOWER, **deepstack, "out_hidden_size": hidden}}
        return AutoConfig.for_model(kind, tie_word_embeddings=fields["tie_word_embeddings"], dtype="float32", **tokens, **parts)
    return AutoConfig.for_model(kind, **fields)


def _common(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def has_experts(family: str) -> bool:
    """Whether a family's layers are mixtures of experts."""
    return not _mlp(KNOWN_AS.get(FAMILIES[family][0], FAMILIES[family][0]), 1, 1, 1, 1).keys().isdisjoint(("num_experts_per_tok", "moe_k"))


def _mlp(kind: str, layers: int, hidden: int, experts: int, expert_hidden: int) -> dict[str, Any]:
    """Return the fields of a family's configuration that describe its experts, or differ between its layers."""
    routed = {"moe_intermediate_size": expert_hidden, "num_experts_per_tok": 2}
    sigmoid = {
        **routed,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1 if layers > 1 else 0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    if kind == "ernie4_5_moe":
        own = {"moe_num_experts": experts, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": expert_hidden}
        return {**own, "moe_layer_start_index": min(1, layers - 1)}
    if kind == "olmoe":
        return {"intermediate_size": expert_hidden, "num_experts": experts, "num_experts_per_tok": 2}
    if kind == "qwen2_moe":
        return {**routed, "num_experts": experts, "shared_expert_intermediate_size": 2 * expert_hidden}
    if kind == "qwen3_moe":
        return {**routed, "num_experts": experts}
    if kind in ("qwen3_vl_moe", "qwen3_vl"):
        mixture = {**routed, "moe_intermediate_size": 3 * expert_hidden // 4, "num_experts": experts, "norm_topk_prob": True}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        return {**(mixture if kind == "qwen3_vl_moe" else {}), "rope_parameters": rope}
    if kind in ("mixtral", "granitemoe"):
        return {"intermediate_size": expert_hidden, "num_local_experts": experts, "num_experts_per_tok": 2}
    if kind == "gpt_oss":
        yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        mlp = {"intermediate_size": expert_hidden, "num_local_experts": experts, "num_experts_per_tok": 2}
        return {**mlp, "rope_parameters": {**yarn, "original_max_position_embeddings": 64}}
    if kind == "ministral":
        return {"layer_types": ["full_attention" if layer % 4 == 1 else "sliding_attention" for layer in range(layers)]}
    if kind == "minimax_m2":  # its keys as in the published config.json; transformers' class has none of the last two, which vLLM needs
        chosen = {"intermediate_size": expert_hidden, "num_local_experts": experts, "num_experts_per_tok": 2}
        return {**chosen, "scoring_func": "sigmoid", "use_routing_bias": True}
    if kind in ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_5_moe", "qwen3_5"):
        mixture = {**routed, "num_experts": experts, "shared_expert_intermediate_size": expert_hidden // 2}
        axes = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        return {
            **(mixture if kind not in ("qwen3_5_text", "qwen3_5") else {}),
            **({"partial_rotary_factor": 0.5} if kind == "qwen3_next" else {"rope_parameters": {**rope, **axes}}),
            "layer_types": [("linear_attention", "full_attention", "linear_attention")[layer % 3] for layer in range(layers)],
            "linear_num_key_heads": hidden // 32,
            "linear_num_value_heads": hidden // 16,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 3,
        }
    if kind == "nemotron_h":
        return {
            **{key: value for key, value in sigmoid.items() if key != "first_k_dense_replace"},
            "layers_block_type": [("linear_attention", "moe", "full_attention", "mlp")[layer % 4] for layer in range(layers)],
            "moe_shared_expert_intermediate_size": 2 * expert_hidden,
            "mamba_num_heads": hidden // 8,
            "mamba_head_dim": 24,
            "ssm_state_size": 16,
            "n_groups": hidden // 32,
        }
    if kind == "glm4_moe":
        return {**sigmoid, "num_mtp_layers": 0}
    if kind in ("deepseek_v3", "deepseek_v32", "deepseek_v2", "glm4_moe_lite", "glm_moe_dsa"):
        yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32}
        router = {  # as in the published config.json: vLLM needs it, and transformers assumes it
            "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_mtp_layers": 0},
            "deepseek_v32": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
            "deepseek_v2": {"scoring_func": "softmax", "norm_topk_prob": False},
            "glm_moe_dsa": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
            "glm4_moe_lite": {"topk_method": "noaux_tc", "first_k_dense_replace": 1},
        }[kind]
        return {
            **sigmoid,
            **router,
            "num_key_value_heads": hidden // 32,
            **({"head_dim": 16} if kind == "deepseek_v3" else {}),  # of the part with rotary embedding
            "num_experts_per_tok": 4,
            "n_group": experts // 2,
            "topk_group": 2,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 24,
            "rope_parameters": {**yarn, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        }
    return {}


def _stir(model: PreTrainedModel) -> None:
    """Randomize vectors that transformers fills with ones or zeros (norms, biases, a router's expert bias), so that tests cover them."""
    import torch

    generator = torch.Generator().manual_seed(7)
    vectors = [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))]
    biases = {name: tensor for name, tensor in model.named_parameters() if name.endswith("_bias") and tensor.ndim == 2}  # of experts
    for vector in (*(tensor for tensor in vectors if tensor.ndim == 1), *biases.values()):
        vector.data += 0.1 * torch.randn(vector.shape, generator=generator)
    for name, tensor in biases.items():
        if name.endswith("gate_up_proj_bias"):  # some are beyond gpt-oss's limit, 7
            tensor.data += 0.5 * torch.randn(tensor.shape, generator=generator) ** 3
    for tensor in model.parameters():
        if tensor.ndim == 2 and not tensor.any():  # Ernie-4.5's routers
            tensor.data += 0.06 * torch.randn(tensor.shape, generator=generator)


def _embed_padding(model: PreTrainedModel) -> None:
    """Randomize the embedding of the padding token, which transformers fills with zeros, and which responses may have.

    At 0 a norm multiplies the gradient by a thousand, and a delta net, whose output has a gate without a bias, hands on 0 to the next norm.
    One such token in Qwen3.5's first layer has made a gradient of 1e5, here and in transformers alike.
    """
    import torch

    embedding = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(8)
    embedding.weight.data[embedding.padding_idx] = 0.06 * torch.randn(embedding.embedding_dim, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny model with random weights, as a Hugging Face directory.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_moe")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 64: heads are 32 wide, two to a key/value head")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--expert-hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.hidden % 64 or given.hidden < 64:
        parser.error(f"--hidden: {given.hidden} is not a multiple of 64")
    if given.experts < 2:
        parser.error(f"--experts: {given.experts} is below 2, the experts a token uses")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    count = build(
        given.out,
        layers=given.layers,
        hidden=given.hidden,
        experts=given.experts,
        expert_hidden=given.expert_hidden,
        seed=given.seed,
        family=given.family,
    )
    print(f"{given.out}: {count / 1e6:.2f}M parameters, {VOCABULARY} pieces")


if __name__ == "__main__":
    main()
