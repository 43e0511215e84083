"""A toy of software repair: a model, its warm start's demonstrations, and tasks for a container.

    python examples/swe/make.py runs/swe [--seed 1]

A task is a file of one function with a wrong operator, and an issue that says in words what it must do. The demonstrations read the file,
edit it, and are done; in two of three the new operator is a wrong one, so that reinforcement learning, whose reward are the tests, has
something to do. The names of held-out tasks are in no other ones.
"""

import argparse
import json
import keyword
import random
import string
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OPERATORS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "//", "take the rest": "%"}
PAIRS = ((7, 2), (9, 4), (20, 6))  # of numbers that the tests use
WRONG = 2 / 3  # of the demonstrations
DEMONSTRATIONS, TASKS, HELD_OUT = 200 * 96, 4096, 32
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>"]
READ, EDIT = '<tool_call>{"name": "bash", "arguments": {"command": "cat ', '<tool_call>{"name": "edit", "arguments": {"path": "'
OLD, NEW, LAST = '", "old": "', '", "new": "', '"}}</tool_call>'
CODE, TOOLS = " = lambda a, b: ", "Tools: bash edit, as <tool_call>JSON</tool_call>. "
TEXTS = [
    READ,
    EDIT,
    OLD,
    NEW,
    LAST,
    CODE,
    TOOLS,
    ".py",
    " must ",
    "replaced",
    "done",
]  # tokens of their own, so that conversations are short
CHAT = """\
{%- if tools %}Tools: {% for tool in tools %}{{ tool.function.name }}{{ ", " if loop.last else " " }}{% endfor -%}
    as <tool_call>JSON</tool_call>. {% endif %}
{%- for message in messages %}{{- "<" ~ message.role ~ ">" ~ message.content }}
    {%- if message.role == "assistant" %}<end>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def make_model(out: Path, seed: int) -> None:
    """A Qwen3-MoE of two layers with random weights, and a tokenizer of bytes and of the texts that calls are made of."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    letters = [*SPECIAL, *TEXTS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[]))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    pieces.add_tokens(TEXTS)
    pad, end, *others = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token=pad, eos_token=end, extra_special_tokens=others, chat_template=CHAT
    ).save_pretrained(out)
    config = Qwen3MoeConfig(
        vocab_size=len(letters),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=letters.index(end),
        pad_token_id=letters.index(pad),
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(out)


def drawn(draw: random.Random, held_out: bool) -> tuple[str, str, str]:
    """A name, what the function must do, and the wrong operator that it has."""
    while True:
        name = "".join(draw.choices(string.ascii_lowercase, k=3))
        if not keyword.iskeyword(name) and (zlib.crc32(name.encode()) % 8 == 0) == held_out:
            break
    aim = draw.choice(list(OPERATORS))
    return name, aim, draw.choice([sign for sign in OPERATORS.values() if sign != OPERATORS[aim]])


def task(draw: random.Random, held_out: bool) -> dict[str, Any]:
    """One row: the issue, the file, and the tests, which the model never sees."""
    name, aim, sign = drawn(draw, held_out)
    checks = "\n".join(f"assert {name}({a}, {b}) == {a} {OPERATORS[aim]} {b}" for a, b in PAIRS)
    return {
        "prompt": f"{name} must {aim}",
        "files": {f"{name}.py": f"{name}{CODE}a {sign} b"},
        "tests": {"check.py": f"from {name} import {name}\n{checks}\n"},
        "test": "python -S check.py",
    }


def demonstration(draw: random.Random) -> dict[str, Any]:
    """A conversation that calls the tools as it should, and mostly puts a wrong operator."""
    name, aim, sign = drawn(draw, held_out=False)
    right = OPERATORS[aim]
    new = draw.choice([one for one in OPERATORS.values() if one != right]) if draw.random() < WRONG else right
    said = [
        f"{name} must {aim}",
        f"{READ}{name}.py{LAST}",
        f"{name}{CODE}a {sign} b",
        f"{EDIT}{name}.py{OLD}{sign}{NEW}{new}{LAST}",
        "replaced",
        "done",
    ]
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "tool", "assistant", "tool", "assistant"), said, strict=True)
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": tool}} for tool in ("bash", "edit")]}


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(sys.argv[1:])
    given.out.mkdir(parents=True, exist_ok=True)
    make_model(given.out / "tiny", given.seed)
    draw = random.Random(given.seed)
    write(given.out / "demonstrations.jsonl", (demonstration(draw) for _ in range(DEMONSTRATIONS)))
    write(given.out / "train.jsonl", (task(draw, held_out=False) for _ in range(TASKS)))
    draw = random.Random(0)
    write(given.out / "eval.jsonl", (task(draw, held_out=True) for _ in range(HELD_OUT)))
    print(f"made {given.out}")


if __name__ == "__main__":
    main()
