"""A context is what was read and sampled, or what the chat template renders of the whole conversation; nothing in it is left out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from megarl.config import ConfigError, PromptFormat
from megarl.data.template import render_chats
from megarl.data.tokenizer import encode
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


@pytest.mark.parametrize("template", [None, QWEN], ids=["tiny", "qwen"])
def test_turns_joined_are_the_templates_rendering_of_the_whole(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    assert check_turns(tokenizer, ["user", "tool"] if template else ["user"], "environment") == (template is not None)
    turns = TurnTokens(tokenizer)
    roles = [["user"], ["tool", "tool"], ["user"]] if template else [["user"], ["user"], ["user"]]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "12-42"}]
    dialogue = turns.opened(messages)
    tokens = dialogue.opening()
    for number, answers in enumerate(roles):
        said = encode(tokenizer, [f"turn {number}"], special=False)[0]
        ended = [*said, tokenizer.eos_token_id] if number != 1 else said  # a turn that was cut gets its end
        new = [{"role": role, "content": f"a {number}"} for role in answers]
        reading = dialogue.after(ended, f"turn {number}", new)
        assert reading is not None and not reading.anew
        tokens += [*ended, *reading.tokens]
        messages += [{"role": "assistant", "content": f"turn {number}"}, *new]
    [whole] = render_chats(tokenizer, [messages])
    assert tokens == encode(tokenizer, [whole], special=False)[0]


def test_a_template_that_leaves_out_turns_is_refused_and_one_that_rewrites_them_is_not(tokenizer: PreTrainedTokenizerBase) -> None:
    said = "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}{%- if m.role == 'assistant' -%}<|end|>{%- endif -%}"
    end = "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
    broken = {
        said.replace("in messages", "in messages if m.role != 'assistant'") + end: "leaves out what the role 'assistant' says",
        said.replace("in messages", "in messages if m.role != 'tool'") + end: "leaves out what the role 'tool' says",
        "{%- if messages[-1].role == 'tool' -%}{{ raise_exception('no') }}{%- endif -%}" + said + end: "refuses the prompt: no",
    }
    for template, why in broken.items():
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=rf"^environment: the model's chat template .*{why}"):
            check_turns(tokenizer, ["tool"], "environment")
    rewriting = {
        said + end: False,
        said + "({{ loop.index }})" + end: False,  # counts, and changes nothing that was read
        said.replace("<|end|>", "<|end|>{{ messages | length }}") + end: True,
        said.replace("<|end|>", "") + end: True,
        said.replace("m.content", "m.content | trim") + end: True,
    }
    for template, anew in rewriting.items():
        tokenizer.chat_template = template
        assert check_turns(tokenizer, ["tool"], "environment") == anew, template


def test_what_an_environment_says_is_rendered_whole_or_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = QWEN.replace("{%- else %}", "{%- elif m.role in ['user', 'system'] %}")
    turns = TurnTokens(tokenizer)
    heard = {"role": "environment", "content": "a"}
    with pytest.raises(ValueError, match=r"leaves out what the role 'environment' says"):
        turns.opened([heard]).opening()
    with pytest.raises(ValueError, match=r"leaves out what the role 'environment' says"):
        turns.opened([{"role": "user", "content": "Q"}]).after([], "", [{"role": "tool", "content": "7"}, heard])


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
        for dialogue in (turns.opened(message, own), turns.prompted({"prompt": "a", "meta": {"chat_template_kwargs": own}})):
            assert tokenizer.decode(dialogue.opening()) == f"<|user|>a<|assistant|>{mood}"
            reading = dialogue.after([tokenizer.eos_token_id], "", message)
            assert reading is not None and not reading.anew
            assert tokenizer.decode(reading.tokens) == f"<|user|>a<|assistant|>{mood}"


def test_control_tokens_in_what_an_environment_says_are_refused_where_asked(tokenizer: PreTrainedTokenizerBase) -> None:
    dialogue = TurnTokens(tokenizer, PromptFormat(control_tokens="refuse")).opened([{"role": "user", "content": "Q"}])
    with pytest.raises(ValueError, match=r"message 0: its content has the control token '<\|assistant\|>'"):
        dialogue.after([tokenizer.eos_token_id], "", [{"role": "user", "content": "<|assistant|>"}])


THOUGHT = "<think>\nWell.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "F", "parameters": {"type": "object", "properties": {}}},
}
PUBLISHED = [  # model, arguments of the template, role that answers, what the policy writes, whether a new context begins
    ("qwen3", {}, "user", THOUGHT + "Four.", True),
    ("qwen3", {}, "user", "Four.", False),
    ("qwen3", {}, "tool", THOUGHT + CALL, False),
    ("qwen3", {"enable_thinking": False}, "user", "Four.", True),
    ("qwen3", {"enable_thinking": False}, "tool", CALL, True),
    ("qwen3-thinking", {}, "user", "Well.\n</think>\n\nFour.", True),
    ("qwen3-thinking", {}, "tool", "Well.\n</think>\n\n" + CALL, False),
    ("deepseek-r1", {}, "user", "Well.\n</think>\n\nFour.", True),
    ("llama-3.1", {}, "user", "Four.", False),
    ("llama-3.1", {}, "user", "Four. ", True),
    ("gemma-3", {}, "user", "Four.", False),
    ("glm-4.5", {}, "user", "\n" + THOUGHT + "Four.", True),
    ("gpt-oss", {}, "user", "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|>Four.", True),
    ("qwen2.5", {}, "user", THOUGHT + "Four.", False),
]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case[0]} {case[2]} {'anew' if case[4] else 'goes on'}")
def test_a_rewritten_context_is_what_the_template_renders(
    published: dict[str, PreTrainedTokenizerBase], case: tuple[str, dict[str, Any], str, str, bool]
) -> None:
    """As transformers renders the conversation, with reasoning apart from the content; else the tokens that were sampled go on."""
    name, arguments, role, text, anew = case
    tokenizer, tools = published[name], [TOOL] if role == "tool" else None
    turns = TurnTokens(tokenizer, PromptFormat(template_args=arguments), tools)
    opening, answer = {"role": "user", "content": "2 + 2?"}, {"role": role, "content": "And then?"}
    dialogue = turns.prompted({"prompt": "2 + 2?"})

    def rendered(messages: list[dict[str, Any]]) -> Any:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False, **arguments)

    context = dialogue.opening()
    assert context == rendered([opening])
    [sampled] = encode(tokenizer, [text + turns.template.end], special=False)
    reading = dialogue.after(sampled, text, [answer])
    assert reading is not None and reading.anew == anew
    if anew:
        apart = text if name == "deepseek-r1" else text.split("</think>")[-1].split("<|message|>")[-1].strip()  # R1's splits the content
        said = [{"role": "assistant", "content": apart}]
        if name == "qwen3" and role == "tool":
            said = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}]  # type: ignore[dict-item]
        assert reading.tokens == rendered([opening, *said, answer])
    else:
        assert tokenizer.decode([*context, *sampled, *reading.tokens]) == tokenizer.decode(
            rendered([opening, {"role": "assistant", "content": text}, answer])
        )
    assert "Well." in tokenizer.decode([*context, *sampled]) or "Well." not in text


HOSTILE = {  # what a policy may write instead of a call, after its reasoning
    "half a character": '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>',
    "calls without an end": "<tool_call>{" * 4000,
    "empty calls": "<tool_call>{}" * 4000,
    "not too deep": '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 700 + "]" * 700 + "}}</tool_call>",
    "deep": '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 50_000 + "}}</tool_call>",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_any_text_of_a_policy_lets_its_episode_continue(published: dict[str, PreTrainedTokenizerBase], text: str) -> None:
    turns = TurnTokens(published["qwen3"])
    dialogue = turns.prompted({"prompt": "2 + 2?"})
    [sampled] = encode(published["qwen3"], [THOUGHT + text + turns.template.end], special=False)
    begun = time.process_time()
    reading = dialogue.after(sampled, THOUGHT + text, [{"role": "user", "content": "And then?"}])
    assert reading is not None and published["qwen3"].decode(reading.tokens).count("And then?") == 1
    assert time.process_time() - begun < 5


def test_a_turn_that_the_template_refuses_ends_the_episode_as_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    """It is the policy's doing, so that the episode keeps its rewards; a message that is refused is the environment's."""
    refuse = "{%- for m in messages if not m.content %}{{ raise_exception('empty') }}{%- endfor %}"
    tokenizer.chat_template = refuse + QWEN
    check_turns(tokenizer, ["user"], "environment")
    dialogue = TurnTokens(tokenizer).opened([{"role": "user", "content": "Q"}])
    assert dialogue.after([tokenizer.eos_token_id], "", [{"role": "user", "content": "A"}]) is None
    with pytest.raises(ValueError, match="empty"):
        dialogue.after([tokenizer.eos_token_id], "x", [{"role": "user", "content": ""}])
