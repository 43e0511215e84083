"""What a stranger would bring: a model, a tokenizer and data of one's own, here for the task of writing a word in capitals.

    python examples/own_task/make.py DIRECTORY

Leaves in DIRECTORY: tiny/ (Llama's shape, random weights; a byte is a token, and so is each of a few phrases), prompts.jsonl (200),
talks.jsonl (conversations to learn from), calls.jsonl (conversations in which the assistant thinks and calls the tool of my_tools.py),
pairs.jsonl and pairs_heldout.jsonl (preferences). Nothing in it comes from megarl.
"""

import json
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROMPTS, TALKS, CALLS, PAIRS, HELD_OUT = 200, 2000, 1000, 400, 64
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>"]
TAGS = ["<tools>", "<think>", "</think>", "<tool_call>", "</tool_call>"]  # tokens, but text of a message as any other
THOUGHT = "The tool does that."
PHRASES = [  # tokens, so that texts are short and the letters in them are those of the word
    *("upper(word): Writes a word in capitals. Form: ", "JSON", "Capitals: "),
    *(THOUGHT, '{"name": "upper", "arguments": {"word": "', '"}}'),
]
CHAT = """\
{%- if tools %}<tools>
    {%- for tool in tools %}
        {{- tool.function.name }}({{ tool.function.parameters.properties | join(", ") }}): {{ tool.function.description }}
    {%- endfor %} Form: <tool_call>JSON</tool_call>
{%- endif %}
{%- for message in messages %}
    {{- "<" ~ message.role ~ ">" }}
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {{- message.content or "" }}
    {%- for call in message.tool_calls or [] %}
        {{- "<tool_call>" ~ {"name": call.function.name, "arguments": call.function.arguments} | tojson ~ "</tool_call>" }}
    {%- endfor %}
    {%- if message.role == "assistant" %}<end>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
TOOL = {
    "name": "upper",
    "description": "Writes a word in capitals.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "the word."}}, "required": ["word"]},
}


def make_model(out: Path) -> None:
    """Model and tokenizer, as transformers saves them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of a model that is written in no time
    letters = [*SPECIAL, *TAGS, *PHRASES, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[]))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    pieces.add_tokens([*TAGS, *PHRASES])
    pad, end, *others = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token=pad, eos_token=end, extra_special_tokens=others, chat_template=CHAT
    )
    tokenizer.save_pretrained(out)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size): with the default, 0.02, attention learns late where to look
        bos_token_id=None,
        eos_token_id=letters.index(end),
        pad_token_id=letters.index(pad),
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(out)


def question(word: str) -> str:
    """What is asked of a word."""
    return f"Capitals: {word}"


def words(count: int, seed: int) -> Iterator[str]:
    """Words of three letters."""
    draw = random.Random(seed)
    return ("".join(draw.choices(string.ascii_lowercase, k=3)) for _ in range(count))


def careless(word: str, draw: random.Random) -> str:
    """The word in capitals, but for its end, which stays as it was."""
    kept = draw.randrange(len(word))
    return word[:kept].upper() + word[kept:]


def conversation(word: str, *answers: dict[str, Any]) -> list[dict[str, Any]]:
    """The question and what follows it."""
    return [{"role": "user", "content": question(word)}, *answers]


def with_call(word: str) -> list[dict[str, Any]]:
    """A conversation in which the assistant thinks, calls the tool, and gives its answer."""
    call = {"type": "function", "function": {"name": TOOL["name"], "arguments": {"word": word}}}
    return conversation(
        word,
        {"role": "assistant", "reasoning_content": THOUGHT, "content": None, "tool_calls": [call]},
        {"role": "tool", "content": word.upper()},
        {"role": "assistant", "content": word.upper()},
    )


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_data(out: Path) -> None:
    """Prompts with answers, conversations, preferences."""
    draw = random.Random(1)
    write(out / "prompts.jsonl", ({"question": question(word), "answer": word.upper()} for word in words(PROMPTS, seed=1)))
    said = ((word, word.upper() if draw.random() < 0.7 else careless(word, draw)) for word in words(TALKS, seed=2))
    write(out / "talks.jsonl", ({"messages": conversation(word, {"role": "assistant", "content": text})} for word, text in said))
    tools = [{"type": "function", "function": TOOL}]
    write(out / "calls.jsonl", ({"messages": with_call(word), "tools": tools} for word in words(CALLS, seed=5)))
    for name, count, seed in (("pairs", PAIRS, 3), ("pairs_heldout", HELD_OUT, 4)):
        pairs = ({"prompt": question(word), "chosen": word.upper(), "rejected": careless(word, draw)} for word in words(count, seed))
        write(out / f"{name}.jsonl", pairs)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    make_model(directory / "tiny")
    make_data(directory)
    print(f"made {directory}")
