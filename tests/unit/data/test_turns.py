"""A conversation's tokens are those of its turns, or the chat template is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megarl.config import ConfigError, PromptFormat
from megarl.data.template import render_chats
from megarl.data.tokenizer import encode, load_tokenizer
from megarl.data.turns import TurnTokens, check_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# In the manner of Qwen3: a separator after the end token, answers of tools inside a message of the user, earlier thinking dropped.
QWEN = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{{ '<|user|>\n<tool_response>\n' + m.content + '\n</tool_response><|end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{%- set content = m.content.split('</think>')[-1] if loop.index0 < ns.last else m.content %}"
    "{{ '<|assistant|>\n' + content + '<|end|>\n' }}"
    "{%- else %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}"
)


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model)


@pytest.mark.parametrize("template", [None, QWEN], ids=["tiny", "qwen"])
def test_turn_by_turn_is_the_whole_that_the_template_renders(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    check_turns(tokenizer, ["user", "tool"] if template else ["user"], "environment")
    turns = TurnTokens(tokenizer)
    roles = [["user"], ["tool", "tool"], ["user"]] if template else [["user"], ["user"], ["user"]]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "12-42"}]
    tokens = turns.opening(messages)
    for number, answers in enumerate(roles):
        said = encode(tokenizer, [f"turn {number}"], special=False)[0]
        ended = [*said, tokenizer.eos_token_id] if number != 1 else said  # a turn that was cut gets its end
        new = [{"role": role, "content": f"a {number}"} for role in answers]
        tokens += [*ended, *turns.after(new, ended)]
        messages += [{"role": "assistant", "content": f"turn {number}"}, *new]
    [whole] = render_chats(tokenizer, [messages])
    assert tokens == encode(tokenizer, [whole], special=False)[0]


def test_a_template_that_cannot_be_continued_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    said = "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}{%- if m.role == 'assistant' -%}<|end|>{%- endif -%}"
    end = "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
    broken = {
        said.replace("in messages", "in messages if m.role != 'assistant'") + end: "renders '",
        said + "({{ loop.index }})" + end: "renders '|writes '",
        said.replace("<|end|>", "<|end|>{{ loop.index0 // 2 }}") + end: "writes '",
        said.replace("in messages", "in messages if m.role != 'tool'") + end: "leaves out what the role 'tool' says",
        "{%- if messages[-1].role == 'tool' -%}{{ raise_exception('no') }}{%- endif -%}" + said + end: "raises TemplateError: no",
        said.replace("<|end|>", "") + end: "renders '",
    }
    for template, why in broken.items():
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=rf"^environment: the model's chat template .*({why})"):
            check_turns(tokenizer, ["tool"], "environment")


def test_what_an_environment_says_is_rendered_whole_or_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = QWEN.replace("{%- else %}", "{%- elif m.role in ['user', 'system'] %}")
    turns = TurnTokens(tokenizer)
    heard = {"role": "environment", "content": "a"}
    with pytest.raises(ValueError, match=r"leaves out what the role 'environment' says"):
        turns.opening([heard])
    with pytest.raises(ValueError, match=r"leaves out what the role 'environment' says"):
        turns.after([{"role": "tool", "content": "7"}, heard], [])


def test_arguments_of_the_template_reach_every_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    header = "{{ '<|assistant|>' + (mood or '') }}"
    tokenizer.chat_template = (
        f"{{%- for m in messages %}}{{%- if m.role == 'assistant' %}}{header}{{{{ m.content + '<|end|>' }}}}{{%- else %}}"
        f"{{{{ '<|' + m.role + '|>' + m.content }}}}{{%- endif %}}{{%- endfor %}}{{%- if add_generation_prompt %}}{header}{{%- endif %}}"
    )
    data = PromptFormat(template_args={"mood": "1"})
    check_turns(tokenizer, ["user"], "environment", data)
    turns, message = TurnTokens(tokenizer, data), [{"role": "user", "content": "a"}]
    for own, mood in (({}, "1"), ({"mood": "2", "tokenize": True}, "2"), ({}, "1")):
        assert tokenizer.decode(turns.opening(message, own)) == f"<|user|>a<|assistant|>{mood}"
        assert tokenizer.decode(turns.after(message, [tokenizer.eos_token_id], own)) == f"<|user|>a<|assistant|>{mood}"
