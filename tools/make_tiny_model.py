"""A tiny Qwen3-MoE with random weights and a tokenizer trained on the spot, as an ordinary Hugging Face directory.

    python tools/make_tiny_model.py OUT [--layers 4] [--seed 1]

Four layers, eight experts (top-2), 1.0M parameters. transformers and vLLM load OUT as it is. The same options give the same bytes.

The tokenizer is a sentencepiece character model in which the two example tasks' question phrases are single pieces, so that their
prompts are short. Every printable ASCII text survives encode and decode exactly; a character outside the 128 pieces becomes `<|unk|>`.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # ten seconds to import
    from transformers import PreTrainedTokenizerFast

PAD, END, UNK, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|system|>"
# reasoning-gym's words around the questions of spell_backward and chain_sum.
PHRASES = ("Spell this word backward (example: sun -> nus): ", "State the final answer to the following arithmetic problem: ")
SYMBOLS = "×÷±≤≥≠√π°²³–—‘’“”…éäöüß"  # fills the vocabulary up to 128, a round number for any tensor-parallel split
VOCABULARY = 128
SPACE = "▁"  # how sentencepiece writes a space
CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}"
    "{%- if message.role == 'assistant' -%}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def train_sentencepiece(seed: int) -> bytes:
    """The serialised sentencepiece model (`tokenizer.model`), trained on generated questions of the two tasks.

    No dummy prefix, no normalisation, no collapsing of spaces: what goes in comes out.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_corpus(random.Random(seed)),
        model_writer=model,
        model_type="char",
        vocab_size=VOCABULARY,
        required_chars="".join(chr(code) for code in range(33, 127)) + SPACE + SYMBOLS,
        user_defined_symbols=["\n", "\t", *(phrase.replace(" ", SPACE) for phrase in PHRASES)],
        control_symbols=[USER, ASSISTANT, SYSTEM],
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


def fast_tokenizer(model: bytes) -> PreTrainedTokenizerFast:
    """The transformers tokenizer that cuts text exactly as the sentencepiece model does, with the chat template."""
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
        extra_special_tokens=[USER, ASSISTANT, SYSTEM],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def build(out: Path, *, layers: int, hidden: int, experts: int, expert_hidden: int, seed: int) -> int:
    """Write the directory and return the number of parameters."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    sentencepiece_model = train_sentencepiece(seed)
    (out / "tokenizer.model").write_bytes(sentencepiece_model)
    tokenizer = fast_tokenizer(sentencepiece_model)
    tokenizer.save_pretrained(out)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=expert_hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny Qwen3-MoE with random weights, as a Hugging Face directory.")
    parser.add_argument("out", type=Path)
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
    )
    print(f"{given.out}: {count / 1e6:.2f}M parameters, {VOCABULARY} pieces")


if __name__ == "__main__":
    main()
