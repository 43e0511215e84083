"""Tokenizers that begin a text with a space: no context is new where the template writes what was read and sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megarl.data.tokenizer import decode, encode
from megarl.data.turns import TurnTokens, check_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = (
    "{%- for m in messages -%}{{ '[' + m.role + ']' + m.content }}{%- if m.role == 'assistant' -%}</s>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
)
SPACED = PLAIN.replace("']' + m.content", "'] ' + m.content")  # in the manner of Llama 2
KINDS = ("always", "first", "never", "normalizer")


def metaspace(kind: str, template: str) -> PreTrainedTokenizerBase:
    """A tokenizer of single letters.

    Args:
        kind: the scheme of its Metaspace; "normalizer": the space is put before by a normalizer, as in Llama 2.
        template: its chat template.
    """
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "</s>", *map(chr, range(33, 127)), "\n", "▁"]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, [], unk_token="<unk>"))
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=kind)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_with_or_without_a_space_at_its_start_is_no_new_context(kind: str) -> None:
    """What was sampled goes on in the tokens that were sampled, whichever way the template begins a turn."""
    for template, begins in ((PLAIN, ("", " ")), (SPACED, (" ",))):
        tokenizer = metaspace(kind, template)
        turns, said = TurnTokens(tokenizer), "a b"
        assert template == SPACED or not check_turns(tokenizer, ["user"], "environment")
        for begin in begins:
            dialogue = turns.prompted({"prompt": "q r"})
            context = dialogue.opening()
            for _ in range(3):
                sampled = [*tokenizer.convert_tokens_to_ids([*(begin + said).replace(" ", "▁")]), tokenizer.eos_token_id]
                assert decode(tokenizer, [*context, *sampled], finished=True).endswith(f"[assistant]{begin}{said}"), "the text that it is"
                reading = dialogue.after(sampled, decode(tokenizer, sampled, finished=True), [{"role": "user", "content": "q r"}])
                assert reading is not None and not reading.anew, (template, begin)
                context += [*sampled, *reading.tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_context_is_the_templates_rendering(kind: str) -> None:
    tokenizer = metaspace(kind, PLAIN.replace("m.content", "m.content.split(';')[-1]"))
    assert not check_turns(tokenizer, ["user"], "environment"), "nothing in it has a semicolon"
    dialogue = TurnTokens(tokenizer).prompted({"prompt": "q r"})
    dialogue.opening()
    sampled = [*encode(tokenizer, ["a;b"], special=False)[0], tokenizer.eos_token_id]
    reading = dialogue.after(sampled, "a;b", [{"role": "user", "content": "q r"}])
    assert reading is not None and reading.anew and reading.follows.strip() == "[user]q r[assistant]"
    assert reading.tokens == encode(tokenizer, ["[user]q r[assistant]b</s>[user]q r[assistant]"], special=False)[0]
