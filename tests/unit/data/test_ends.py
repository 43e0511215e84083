"""The end of the assistant's message, and the form of its calls, where templates differ between a conversation's end and its history."""

from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, SourceFormat
from megarl.data.template import ChatTemplate
from megarl.data.tokenizer import load_tokenizer
from tests.unit.data.templates import dressed
from tests.unit.data.test_rendering import CALL, RESULT, USER, conversations, learned, says

TURN = "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
PROMPT = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
# Command-R7B: the text always goes on to where the assistant speaks, which is a run of tokens.
ONWARD = (
    "{%- for m in messages -%}{{ '<|im_start|><|' + m.role + '|>' }}{%- if m.role == 'assistant' -%}{{ '<start_of_turn>' + m.content }}"
    "{{ '<end_of_turn>' }}{%- else -%}{{ m.content }}{%- endif -%}{{ '<|im_end|>' }}{%- endfor -%}{{ '<|im_start|><|assistant|>' }}"
)
# One token more at the very end.
MORE = TURN + "{{ '<|im_end|>' }}{%- endfor -%}{%- if not add_generation_prompt -%}{{ '<|eot_id|>' }}{%- endif -%}" + PROMPT
# A turn ends only where another one follows.
OPEN = TURN + "{%- if not loop.last or add_generation_prompt -%}{{ '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}" + PROMPT
HEADERS = (
    "{{ bos_token }}{%- for m in messages -%}{{ '<|' + m.role + '|>' + m.content }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
UNMARKED = (
    "{%- for m in messages -%}{{ '<turn>' + m.role + '\n' + m.content + '</turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<turn>assistant\n' }}{%- endif -%}"
)
ENDS = {  # template, the tokenizer's end token, the text that is learned
    "onward": (ONWARD, "<|im_end|>", "<start_of_turn>4<end_of_turn><|im_end|>"),
    "one more": (MORE, "<|eot_id|>", "4<|im_end|>"),
    "open": (OPEN, "<|eot_id|>", "4<|im_end|>"),
    "headers": (HEADERS, "<|eot_id|>", "4<|eot_id|>"),
    "tokens that are not marked as special": (UNMARKED, "<|eot_id|>", "4</turn>"),
}


def tokenizer_of(tiny_model: Path, template: str, eos: str = "<|im_end|>") -> Any:
    tokenizer = dressed(load_tokenizer(tiny_model), "chatml")
    tokenizer.add_tokens(["<turn>", "</turn>"])
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    return tokenizer


@pytest.mark.parametrize("kind", ENDS)
def test_a_turn_ends_as_it_does_in_history(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    template, eos, text = ENDS[kind]
    tokenizer = tokenizer_of(tiny_model, template, eos)
    samples = conversations(tmp_path, tokenizer, {"messages": [USER, says("4"), USER, says("4")]})
    goes_on = kind != "headers"  # whose history has no end token
    assert learned(tokenizer, samples) == ([[text, text]] if goes_on else [[text], [text]])
    assert text.endswith(ChatTemplate(tokenizer, SourceFormat()).end)


# DeepSeek-R1-Distill: calls are written only where the content is null, and their arguments only as JSON.
NULL = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' and m.content is none -%}{%- for call in m.tool_calls -%}"
    "{{ '<|assistant|>' + call.function.name + ' ' + call.function.arguments + '<|im_end|>' }}{%- endfor -%}"
    "{%- else -%}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] + '<|im_end|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
# QwQ: a message of history must have a content, and one at the end need not.
LATER = (
    "{%- for m in messages -%}{{ '<|' + m.role + '|>' }}{%- if not loop.last -%}{{ m.content.strip() }}{%- else -%}{{ m.content }}"
    "{%- endif -%}{%- for call in m.tool_calls or [] -%}{{ call.function.name }}{{ call.function.arguments | tojson }}{%- endfor -%}"
    "{{ '<|im_end|>' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


@pytest.mark.parametrize(("template", "text"), [(NULL, 'add {"a": 2, "b": 3.5}'), (LATER, 'add{"a": 2, "b": 3.5}')], ids=["null", "later"])
def test_a_call_without_text_is_given_as_the_template_takes_it(template: str, text: str, tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tiny_model, template)
    samples = conversations(tmp_path, tokenizer, {"messages": [USER, says(None, tool_calls=[CALL]), RESULT, says("5.5")]})
    assert [one for texts in learned(tokenizer, samples) for one in texts] == [f"{text}<|im_end|>", "5.5<|im_end|>"]
    if template is NULL:
        with pytest.raises(ConfigError, match=r"a\.jsonl:1: message 1: the chat template leaves out its tool_calls$"):
            conversations(tmp_path, tokenizer, {"messages": [USER, says("Let me", tool_calls=[CALL]), RESULT, says("5.5")]})


def test_reasoning_that_a_finished_turn_closes_at_once_is_learned_as_written(tiny_model: Path, tmp_path: Path) -> None:
    """DeepSeek-V3.1: the generation prompt opens reasoning, and a finished turn begins with <think></think>."""
    template = (
        "{%- for m in messages -%}{{ '<|' + m.role + '|>' }}{%- if m.role == 'assistant' -%}{{ '<think></think>' }}{%- endif -%}"
        "{{ m.content.split('</think>', 1)[-1] + '<|im_end|>' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|><think>' }}"
        "{%- endif -%}"
    )
    tokenizer = tokenizer_of(tiny_model, template)
    rows = [{"messages": [USER, says(text)]} for text in ("<think>It is</think>4", "It is</think>4", "4")]
    texts = learned(tokenizer, conversations(tmp_path, tokenizer, *rows))
    assert texts == [["It is</think>4<|im_end|>"], ["It is</think>4<|im_end|>"], ["</think>4<|im_end|>"]]


def test_a_differing_tag_is_shown_from_its_start(tiny_model: Path, tmp_path: Path) -> None:
    template = (
        "{%- for m in messages -%}{{ '<|' + m.role + '|>' }}{%- if m.role == 'assistant' -%}{{ '</think>' }}{%- endif -%}"
        "{{ m.content + '<|im_end|>' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|><think>' }}{%- endif -%}"
    )
    line = r"writes '</think>4<\|im_end\|>' where the model reads '<think>' before it speaks, and the message has no </think>$"
    with pytest.raises(ConfigError, match=line):
        conversations(tmp_path, tokenizer_of(tiny_model, template), {"messages": [USER, says("4")]})
