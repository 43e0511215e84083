"""What `megarl serve` takes from a client."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from megarl.config import ConfigError, PromptFormat
from megarl.data.prompts import Renderer
from megarl.data.tokenizer import load_tokenizer
from megarl.driver.rank_group import RankGroup
from megarl.loops.serve import Service

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

MOST = 64


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model)


def service(tokenizer: PreTrainedTokenizerBase) -> Service:
    return Service(MOST, Renderer(tokenizer, PromptFormat(), MOST, "serve.max_tokens"), Mock(spec=RankGroup), 60.0)


@pytest.mark.parametrize(
    "prompt",
    [
        "a" * 100_000,
        [{"role": "user", "content": "a"}] * 10_000,
        [{"role": "system", "content": "a" * 100_000}, {"role": "user", "content": "a"}],
        [{"role": "user", "content": "a", "reasoning": ["a"] * 100_000}],
    ],
)
def test_a_long_prompt_is_refused_before_the_chat_template_sees_it(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    served = service(tokenizer)
    rendered = Mock(side_effect=AssertionError("rendered"))
    monkeypatch.setattr("megarl.data.template.render", rendered)
    with pytest.raises(ConfigError, match=r"^sample 1: the prompt, as JSON: .* characters are more than serve.max_tokens=64 tokens"):
        served.read([{"prompt": "a", "response": "b"}, {"prompt": prompt, "response": "b"}])
    rendered.assert_not_called()


def test_a_client_s_prompt_cannot_keep_the_chat_template_busy(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that reads, as the server calls it."""
    monkeypatch.setattr("megarl.data.template.TEMPLATE_S", 0.2)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    slow = copy.deepcopy(tokenizer)
    slow.chat_template = "{{ messages[0].content }}{% if messages[0].content == 'loop' %}" + loop + "{% endif %}"
    served = service(slow)
    with ThreadPoolExecutor(1) as reader:
        with pytest.raises(ConfigError, match=r"^sample 0: the model's chat template refuses .*not done within 0.2\d* s of CPU time$"):
            reader.submit(served.read, [{"prompt": "loop", "response": "b"}]).result()
        [read] = reader.submit(served.read, [{"prompt": "a", "response": "b"}]).result()
    assert len(read.tokens) > 2


@pytest.mark.parametrize("content", ["héllo", '[{"role": "user", "content": "a"}]'])
def test_a_prompt_is_read_as_a_text_and_as_messages(tokenizer: PreTrainedTokenizerBase, content: str) -> None:
    samples = [{"prompt": prompt, "response": "b"} for prompt in (content, [{"role": "user", "content": content}])]
    text, chat = service(tokenizer).read(samples)
    assert text.tokens.tolist() == chat.tokens.tolist()
    assert text.tokens[-1] == tokenizer.eos_token_id


def test_a_row_s_arguments_an_open_thought_and_an_end_are_read_as_in_training(tokenizer: PreTrainedTokenizerBase) -> None:
    dressed: Any = copy.deepcopy(tokenizer)
    dressed.chat_template = tokenizer.chat_template.replace("<|assistant|>{%- endif -%}", "<|assistant|>{{ opening }}{%- endif -%}")
    served = service(dressed)
    for meta, response, text in (
        ({}, "b<|end|>", "<|user|>a<|assistant|>b<|end|>"),
        ({"chat_template_kwargs": {"opening": "<think>"}}, "<think>b</think>c", "<|user|>a<|assistant|><think>b</think>c<|end|>"),
    ):
        [sample] = served.read([{"prompt": "a", "response": response, "meta": meta}])
        assert tokenizer.decode(sample.tokens) == text
    with pytest.raises(ConfigError, match=r"^sample 0: tools: the chat template leaves out the schemas$"):
        served.read([{"prompt": "a", "response": "b", "meta": {"tools": [{"name": "add"}]}}])
