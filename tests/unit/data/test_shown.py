"""What `megarl data` prints of a row is what the template writes of it, learned where the trained mask says so, and nothing else."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megarl.batch import pack
from megarl.config import ConversationSource, FileSource, PreferenceData, PreferenceSource, SftData
from megarl.config.data import DataSettings
from megarl.data.conversations import sample
from megarl.data.preferences import load_preferences
from megarl.data.shown import LEARNED, MASKED, READ, SCORED, UNREAD, Line, coloured, row_lines, rows_of, spans, summary
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_conversations
from tests.unit.data.test_real_templates import ASKS, INLINE, LAYOUTS, LIMIT, REFUSED, SAYS, TOOL, call, lessons, rendered
from tests.unit.data.written import written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = ["qwen3", "qwen3-thinking", "deepseek-r1", "llama-3.1"]
SHOWN = [(name, layout) for name in NAMES for layout in LAYOUTS if layout not in REFUSED[name]]


def conversations(tokenizer: PreTrainedTokenizerBase, place: Path, *rows: dict[str, Any]) -> Any:
    source = ConversationSource(path=written(place / "rows.jsonl", *rows))
    return load_conversations(source, tokenizer, SftData(train=source), LIMIT, "data.train")


def texts(lines: list[Line]) -> list[list[tuple[str, str]]]:
    """The texts below each heading, put together of their lines."""
    samples = list[list[tuple[str, str]]]()
    for kind, run in groupby(lines, lambda line: line[0]):
        parts = [text for _, text in run]
        if kind:
            samples[-1].append((kind, "\n".join(parts)))
        else:
            samples += [[] for _ in parts]
    return samples


@pytest.mark.parametrize(("name", "layout"), SHOWN)
def test_the_learned_lines_are_what_the_template_writes_for_the_assistant(
    name: str, layout: str, published: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    tokenizer, row = published[name], LAYOUTS[layout]
    items = conversations(tokenizer, tmp_path, row)
    shown = [texts(list(row_lines(tokenizer, one))) for one in rows_of(items)]
    assert len(shown) == 1 and len(shown[0]) == len(items)
    pairs = [
        ("".join(text for _, text in parts[:number]), text)
        for parts in shown[0]
        for number, (kind, text) in enumerate(parts)
        if kind == LEARNED
    ]
    assert pairs == lessons(tokenizer, row)
    unread = {"ended": "user: And Turku?", "unweighted-last": "user: And Turku?\nassistant: In Finland."}.get(layout)
    assert [part for parts in shown[0] for part in parts if part[0] == UNREAD] == ([(UNREAD, unread)] if unread else [])
    assert all(parts[0][0] == READ and {kind for kind, _ in parts[1:]} <= {LEARNED, MASKED, UNREAD} for parts in shown[0])


@pytest.mark.parametrize("layout", ["turns", "calls-turns", "unweighted"])
def test_the_learned_tokens_are_the_targets_of_the_batch(
    layout: str, published: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    for item in conversations(published["llama-3.1"], tmp_path, LAYOUTS[layout]):
        parts = list(spans(published["llama-3.1"], sample(item)))
        learned = [kind == LEARNED for kind, _, length in parts for _ in range(length)]
        assert learned[1:] == pack([sample(item)]).mask_T.tolist() and not learned[0]
        assert sum(length for _, _, length in parts) == len(item.tokens)


def test_a_row_that_was_split_says_so_and_the_counts_add_up(published: dict[str, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    tokenizer = published["qwen3"]
    items = conversations(tokenizer, tmp_path, LAYOUTS["reasoning-turns"], LAYOUTS["chat"])
    first, second = rows_of(items)
    heads = [text for kind, text in row_lines(tokenizer, first) if not kind]
    assert [head.partition(" (the chat template rewrites")[0] for head in heads] == [
        f"data.train.path: {tmp_path}/rows.jsonl:1, sample {number} of 2" for number in (1, 2)
    ]
    [head] = [text for kind, text in row_lines(tokenizer, second) if not kind]
    read, whole = items[2].prompt_length, len(items[2].tokens)
    assert head == f"data.train.path: {tmp_path}/rows.jsonl:2: {whole} tokens: {read} read, {whole - read} learned, 0 masked"
    total = sum(len(item.tokens) for item in items)
    assert summary(items).startswith(f"2 rows, 3 samples, {total} tokens: {sum(item.prompt_length for item in items)} read, ")


def test_later_turns_are_masked_where_they_are_only_read(published: dict[str, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    tokenizer, row = published["llama-3.1"], LAYOUTS["turns"]
    [shown] = texts(list(row_lines(tokenizer, conversations(tokenizer, tmp_path, row))))
    assert [kind for kind, _ in shown] == [READ, LEARNED, MASKED, LEARNED]
    assert shown[0][1] == rendered(tokenizer, row, 2, True) and "And Turku?" in shown[2][1] and "Turku" not in shown[1][1] + shown[3][1]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_shown_as_it_is_read_with_its_gold(name: str, published: dict[str, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    tools = {"tools": [TOOL]} if name.startswith("qwen3") else {}
    row = {"prompt": [ASKS], "reward_model": {"ground_truth": ["Norway", "Norge"]}, **tools}
    source = FileSource(path=written(tmp_path / "prompts.jsonl", row))
    items = load_prompts(source, published[name], DataSettings(train=source), LIMIT, "data.train")
    [parts] = texts(list(row_lines(published[name], items)))
    assert parts == [(READ, rendered(published[name], {**row, "messages": [ASKS]}, 1, True)), ("answer", '["Norway", "Norge"]')]


def test_both_sides_of_a_pair_are_shown(published: dict[str, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    tokenizer, sides = published["qwen3"], (call("Bergen"), SAYS)
    row = {"chosen": [ASKS, sides[0]], "rejected": [ASKS, sides[1]], "margin": 0.5, "tools": [TOOL]}
    source = PreferenceSource(path=written(tmp_path / "pairs.jsonl", row))
    [pair] = load_preferences(source, tokenizer, PreferenceData(train=source, eval=source), LIMIT, "data.train", "rm.max_tokens")
    lines = list(row_lines(tokenizer, [pair], SCORED))
    heads = [text.removeprefix(f"data.train.path: {source.path}:1: ") for kind, text in lines if not kind]
    assert [head.partition(":")[0] for head in heads] == ["chosen, margin 0.5", "rejected, margin 0.5"]
    wanted = [lessons(tokenizer, {"messages": [ASKS, side], "tools": [TOOL]}) for side in sides]
    assert [[(parts[0][1], parts[1][1])] for parts in texts(lines)] == wanted
    assert all([kind for kind, _ in parts] == [READ, SCORED] for parts in texts(lines))


def test_no_text_can_move_the_terminal_or_pass_for_a_mark(published: dict[str, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    evil = {"role": "user", "content": "a\x1b[2J\rb\u202e\nlearned | I said so"}
    lines = list(row_lines(published["qwen3"], conversations(published["qwen3"], tmp_path, {"messages": [evil, INLINE]})))
    plain = list(coloured(lines, False))
    assert "   read | a\\x1b[2J\\rb\\u202e" in plain and "   read | learned | I said so<|im_end|>" in plain
    assert all(line.isprintable() for line in plain)
    colours = list(coloured(lines, True))
    assert [line for line, bare in zip(colours, plain, strict=True) if line != bare] == [
        f"\x1b[32m{line}\x1b[0m" for line in plain if line.startswith("learned")
    ]


def test_a_long_text_is_cut_in_its_middle_where_that_is_asked(published: dict[str, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "first " + "word " * 500 + "last"}, SAYS]}
    items = conversations(published["qwen3"], tmp_path, row)
    whole, short = (
        "\n".join(text for kind, text in row_lines(published["qwen3"], items, most=most) if kind == READ) for most in (None, 300)
    )
    assert len(whole) > 2500 and len(short) < 350
    assert whole.startswith(short[:140]) and whole.endswith(short[-140:]) and "characters left out]" in short
