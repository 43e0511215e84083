"""Prompts from every kind of source, refusals with file and line, the sampler, demonstrations."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from examples import make_data
from megarl.config import (
    ConfigError,
    ConversationSource,
    EpisodeSource,
    FileSource,
    MixtureSource,
    ReasoningGymSource,
    SftData,
    SourceFormat,
)
from megarl.config.data import PromptPart
from megarl.data.conversations import Conversation
from megarl.data.gym import all_drawn, first_items
from megarl.data.prompts import Prompt
from megarl.data.sampler import Sampler
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_answers, load_conversations
from megarl.data.tokenizer import decode, load_tokenizer
from tests.unit.data.written import ROW, save_to_disk, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LETTERS = {"min_word_len": 3, "max_word_len": 8}
TERMS = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    spec = importlib.util.spec_from_file_location("make_tiny_model", Path(__file__).parents[3] / "tools" / "make_tiny_model.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    out = tmp_path_factory.mktemp("tokenizer")
    tool.fast_tokenizer(tool.train_sentencepiece(seed=1)).save_pretrained(out)
    return load_tokenizer(out)


Load = Callable[..., list[Prompt]]


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerBase) -> Load:
    def load(source: Any, *, chat: bool = True, template: str = "{prompt}", limit: int = 64) -> list[Prompt]:
        return list(load_prompts(source, tokenizer, SourceFormat(chat=chat, template=template), limit, "data.train"))

    return load


def gym(dataset: str = "spell_backward", *, seed: int = 5, items: int = 50, **more: Any) -> ReasoningGymSource:
    params = LETTERS if dataset == "spell_backward" else TERMS
    return ReasoningGymSource(**{"dataset": dataset, "params": params, "seed": seed, "items": items, **more})


def test_gym_prompts_hold_question_tokens_answer_and_metadata(load: Load, tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = load(gym())
    assert [prompt.id for prompt in prompts] == list(range(50))
    for prompt in prompts:
        word = prompt.text.split()[-1]
        assert prompt.answer == word[::-1] and prompt.meta["word"] == word and prompt.meta["source_params"] == LETTERS
        assert tokenizer.decode(prompt.tokens) == f"<|user|>{prompt.text}<|assistant|>"
    assert load(gym()) == prompts


def test_exclude_leaves_out_questions_of_the_other_source(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    held_out = load(gym(seed=20))  # items 15..49 of seed 5 are its items 0..34: reasoning-gym draws item i from seed + i
    assert {prompt.text for prompt in held_out} & {prompt.text for prompt in load(gym())}
    with caplog.at_level("INFO"):
        kept = load(gym(exclude=gym(seed=20)))
    assert not {prompt.text for prompt in held_out} & {prompt.text for prompt in kept}
    assert f"{50 - len(kept)} of 50 items left out" in caplog.text
    with pytest.raises(ConfigError, match=r"^data.train.items: all 50 items are in data.train.exclude$"):
        load(gym(exclude=gym()))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"dataset": "spell_backwards"}, r"data\.train\.dataset: .* no dataset 'spell_backwards' \(did you mean 'spell_backward'\?\)"),
        ({"params": {"min_len": 3}}, r"data\.train\.params\.min_len: spell_backward has no such parameter \(.*min_word_len.*\)"),
        ({"params": {"size": 3}}, r"data\.train\.params\.size: set data\.train\.items instead"),
        ({"params": {"min_word_len": 9, "max_word_len": 4}}, r"data\.train\.params: spell_backward refuses .*9.*4.*"),
    ],
)
def test_gym_faults_are_refused(load: Load, fault: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        load(gym(**fault))


def test_jsonl_and_parquet_give_the_same_prompts(load: Load, tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "17 + 17?"}]}]
    as_chat = [{**ROW, "prompt": [{"role": "user", "content": ROW["prompt"]}]}, rows[1]]
    parquet.write_table(pyarrow.Table.from_pylist(as_chat), tmp_path / "a.parquet")
    from_jsonl = load(write(tmp_path / "a.jsonl", *rows, ROW))  # the third is a duplicate, and stays
    from_parquet = load(FileSource(path=tmp_path / "a.parquet"))
    assert from_jsonl[:2] == from_parquet and len(from_jsonl) == 3
    first, second = from_parquet
    assert (first.text, first.answer, first.meta) == ("17 + 17?", "34", {"data_source": "sums", "extra_info": {"index": 7}})
    assert len(second.tokens) == len(first.tokens) + len("Add.") + 1


def test_datasets_on_disk_give_the_same_prompts(load: Load, tmp_path: Path) -> None:
    rows = [{**ROW, "prompt": f"{n} + 17?"} for n in range(7)]
    source = save_to_disk(tmp_path / "saved", rows)
    assert load(source) == load(write(tmp_path / "a.jsonl", *rows))
    ordered = save_to_disk(tmp_path / "ordered", rows, _indices_data_files=[{"filename": "indices.arrow"}])
    (tmp_path / "dict" / "train").mkdir(parents=True)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (tmp_path / "dict" / "train" / "state.json").write_text("{}")
    outside = save_to_disk(tmp_path / "outside", rows, _data_files=[{"filename": "../saved/data-00000-of-00002.arrow"}])
    cut = save_to_disk(tmp_path / "cut", rows, shards=1)
    data = (tmp_path / "cut" / "data-00000-of-00001.arrow").read_bytes()
    (tmp_path / "cut" / "data-00000-of-00001.arrow").write_bytes(data[: len(data) // 2])
    (tmp_path / "other").mkdir()
    for bad, message in (
        (ordered, r".*ordered was saved with an index mapping; call flatten_indices\(\) before"),
        (FileSource(path=tmp_path / "dict"), r".*dict holds several splits \(train\): name one, such as .*dict/train$"),
        (outside, ".*state.json: it names a file elsewhere"),
        (cut, ".*00001.arrow is not readable as Arrow after row 0: "),
        (FileSource(path=tmp_path / "other"), r".*other is not a directory of `datasets` \(save_to_disk\): state.json"),
    ):
        with pytest.raises(ConfigError, match=rf"^data\.train\.path: {message}"):
            load(bad)


def test_a_system_message_comes_before_each_chat_that_has_none(load: Load, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    own = {**ROW, "prompt": [{"role": "system", "content": "Own."}, {"role": "user", "content": "17 + 17?"}]}
    source = write(tmp_path / "a.jsonl", ROW, own)
    first, second = load_prompts(source, tokenizer, SourceFormat(system="Add."), 64, "data.train")
    said = write(tmp_path / "b.jsonl", {**ROW, "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "17 + 17?"}]})
    assert first.tokens == load(said)[0].tokens != load(source)[0].tokens and first.text == "17 + 17?"
    assert second == load(source)[1]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    learned, plain = (
        conversations(tmp_path / "c.jsonl", tokenizer, {"messages": row}, system=system)
        for row, system in ((chat, "Add."), ([{"role": "system", "content": "Add."}, *chat], None))
    )
    assert learned[0].tokens.tolist() == plain[0].tokens.tolist() and learned[0].prompt_length == plain[0].prompt_length


def test_a_prompt_after_which_nobody_has_to_speak_is_refused(load: Load, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", {"messages": MESSAGES[:2], "answer": "b"})
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:1: the prompt ends with the assistant's message; leave it out \(megarl sft learns whole"
    ):
        load(source.model_copy(update={"prompt_key": "messages", "answer_key": "answer"}))


def test_a_check_draws_the_first_items_and_says_so(load: Load) -> None:
    source = ReasoningGymSource(dataset="spell_backward", params=LETTERS, seed=5, items=50)
    every = load(source)
    with first_items(20) as look:
        assert load(source) == every[:20] and look.cut and not all_drawn()
    with first_items(50) as look:
        assert load(source) == every and not look.cut and all_drawn()
    assert load(source) == every and all_drawn()
    with first_items(20):
        assert len(load(source.model_copy(update={"exclude": source.model_copy(update={"items": 30})}))) == 20, (
            "20 of those not drawn are left"
        )
        assert load(MixtureSource(parts=[PromptPart(source=source, weight=0.02)])), "one of the 50 comes up"


def test_several_sources_are_one_by_their_weights(load: Load, tmp_path: Path) -> None:
    one, other = (write(tmp_path / f"{name}.jsonl", *({**ROW, "prompt": f"{n}{name}"} for n in range(10))) for name in ("a", "b"))
    parts = [PromptPart(source=one, weight=2.5), PromptPart(source=other, weight=0.3)]
    prompts = load(MixtureSource(parts=parts, seed=4))
    assert [prompt.id for prompt in prompts] == list(range(28))
    counts = Counter(prompt.text for prompt in prompts)
    assert sorted(counts[f"{n}a"] for n in range(10)) == [2] * 5 + [3] * 5
    assert sorted(counts[f"{n}b"] for n in range(10)) == [0] * 7 + [1] * 3
    assert load(MixtureSource(parts=parts, seed=4)) == prompts != load(MixtureSource(parts=parts, seed=5))
    assert [prompt.text for prompt in load(MixtureSource(parts=[PromptPart(source=one)]))] == [prompt.text for prompt in load(one)]
    bad = write(tmp_path / "c.jsonl", {"prompt": ""})
    with pytest.raises(ConfigError, match=r"^data\.train\.parts\.1\.source\.path: .*c\.jsonl:1: "):
        load(MixtureSource(parts=[PromptPart(source=one), PromptPart(source=bad)]))


def test_columns_can_be_named(load: Load, tmp_path: Path) -> None:
    row = {"q": {"text": "1+1?"}, "a.b": 2}
    source = write(tmp_path / "a.jsonl", row).model_copy(update={"prompt_key": "q.text", "answer_key": "a.b"})
    (prompt,) = load(source)
    assert (prompt.text, prompt.answer, prompt.meta) == ("1+1?", 2, {})


def test_template_replaces_the_chat_template(load: Load, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ROW, {**ROW, "prompt": [{"role": "user", "content": "{x}?"}]})
    assert [tokenizer.decode(prompt.tokens) for prompt in load(source, chat=False, template="Q: {prompt} {}\n")] == [
        "Q: 17 + 17? {}\n",
        "Q: {x}? {}\n",
    ]
    with pytest.raises(ConfigError, match=r"^data\.template: 'Q' has no \{prompt\} in it$"):
        load(source, chat=False, template="Q")


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"FILE holds no prompts"),
        ([ROW, "", ROW], r"FILE:2: empty line"),
        ([ROW, ROW, '{"prompt": '], r"FILE:3: not JSON: Expecting value at column 11"),
        (["[", ROW, "]"], r"FILE:1: not JSON: Expecting value at column 2; each line must hold one whole object"),
        ([ROW, "[1]"], r"FILE:2: must hold an object, not list"),
        ([{"text": "1"}], r"FILE:1: no value for data\.train\.prompt_key='prompt'; the row has text"),
        ([{"prompt": "1", "reward_model": {}}], r"FILE:1: no value for data\.train\.answer_key='reward_model\.ground_truth'; .*"),
        ([ROW, {**ROW, "prompt": " \n"}], r"FILE:2: the prompt is empty"),
        ([{**ROW, "prompt": []}], r"FILE:1: there are no messages"),
        ([{**ROW, "prompt": 3}], r"FILE:1: the prompt must be a text or a list of chat messages, not int"),
        (
            [{**ROW, "prompt": [{"role": "user", "content": ["a"]}]}],
            r"FILE:1: message 0 has a content that is no text but a list; join the texts of its parts",
        ),
        ([ROW, {**ROW, "prompt": "x" * 63}], r"FILE:2: prompt of 65 tokens is longer than rollout\.max_prompt_tokens=64"),
    ],
)
def test_faulty_rows_are_refused_with_file_line_and_numbers(load: Load, tmp_path: Path, rows: list[Any], message: str) -> None:
    source = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(ConfigError, match="^data.train.path: " + message.replace("FILE", str(source.path)) + "$"):
        load(source)


def test_faulty_files_are_refused(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.train\.path: no such file: .*x\.jsonl$"):
        load(FileSource(path=tmp_path / "x.jsonl"))
    (tmp_path / "a.csv").touch()
    with pytest.raises(ConfigError, match=r"^data\.train\.path: .*a\.csv must end in \.jsonl or \.parquet$"):
        load(FileSource(path=tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ConfigError, match=r"^data\.train\.path: .*a\.parquet is not readable as Parquet after row 0: .*$"):
        load(FileSource(path=tmp_path / "a.parquet"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(ConfigError, match=r"^data\.train\.path: .*latin\.jsonl:1: not JSON: .*$"):
        load(FileSource(path=tmp_path / "latin.jsonl"))
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: a chat of 3 messages needs data\.chat=true$"):
        load(write(tmp_path / "a.jsonl", {**ROW, "prompt": MESSAGES}), chat=False)


def test_template_that_refuses_a_chat_names_the_line(load: Load, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    kept, tokenizer.chat_template = (
        tokenizer.chat_template,
        "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}",
    )
    try:
        with pytest.raises(ConfigError, match=r"a\.jsonl:2: the model's chat template refuses the prompt: one only$"):
            load(write(tmp_path / "a.jsonl", ROW, {**ROW, "prompt": MESSAGES}))
        tokenizer.chat_template = None
        with pytest.raises(ConfigError, match=r"^data\.chat: the tokenizer has no chat template; .*$"):
            load(write(tmp_path / "a.jsonl", ROW))
    finally:
        tokenizer.chat_template = kept


def test_episodes_are_made_on_demand(tokenizer: PreTrainedTokenizerBase) -> None:
    source = EpisodeSource(seed=7, items=1_000_000_000)
    episodes = load_prompts(source, tokenizer, SourceFormat(), 64, "data.train")
    assert len(episodes) == source.items and [one.id for one in episodes[2:4]] == [2, 3]
    assert (episodes[-1].id, episodes[-1].seed, episodes[-1].text) == (999_999_999, 1_000_000_006, "episode 1000000006")


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: no tokenizer in .*"):
        load_tokenizer(tmp_path)


def test_decode_drops_the_ending_token_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = [*tokenizer.encode("12"), tokenizer.pad_token_id, *tokenizer.encode("3 "), tokenizer.eos_token_id]
    assert decode(tokenizer, tokens, finished=True) == "12<|pad|>3 "
    assert decode(tokenizer, tokens[:-1], finished=False) == "12<|pad|>3 "
    assert decode(tokenizer, [tokenizer.eos_token_id], finished=True) == ""


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32), st.booleans(), st.lists(st.integers(0, 30), max_size=12))
def test_every_epoch_is_a_permutation_and_the_sampler_resumes_anywhere(count: int, seed: int, shuffle: bool, takes: list[int]) -> None:
    sampler, drawn = Sampler(count, seed, shuffle), []
    for k in takes:
        resumed = Sampler(count, seed, shuffle)
        resumed.restore(json.loads(json.dumps(sampler.state())))
        part = sampler.take(k)
        assert len(part) == k and resumed.take(k) == part and resumed.state() == sampler.state()
        drawn += part
    for start in range(0, len(drawn) - count + 1, count):
        epoch = drawn[start : start + count]
        assert sorted(epoch) == list(range(count)) and (shuffle or epoch == sorted(epoch))


def test_order_differs_between_epochs_and_seeds() -> None:
    sampler = Sampler(100, 1, True)
    orders = [sampler.take(100), sampler.take(100), Sampler(100, 2, True).take(100)]
    assert len({tuple(order) for order in orders}) == 3


def test_state_of_other_data_is_refused() -> None:
    state = Sampler(10, 1, True).state()
    with pytest.raises(ValueError, match="saved with count=10, and this run has count=11"):
        Sampler(11, 1, True).restore(state)
    with pytest.raises(ValueError, match="at least one prompt"):
        Sampler(0, 1, True)


def test_a_prompt_with_its_answer_is_what_a_rollout_would_have_made(load: Load, tokenizer: PreTrainedTokenizerBase) -> None:
    source = gym()
    for prompt, said in zip(load(source), load_answers(source, tokenizer, SftData(train=source), 32, "data.train"), strict=True):
        assert said.tokens[: said.prompt_length].tolist() == prompt.tokens and said.tokens[-1] == tokenizer.eos_token_id
        assert decode(tokenizer, said.tokens[said.prompt_length :].tolist(), finished=True) == prompt.answer and said.loss_mask is None
    with pytest.raises(ConfigError, match=r"^data\.train: item \d+: prompt and response are \d+ tokens, more than sft\.max_tokens=14$"):
        load_answers(source, tokenizer, SftData(train=source), 14, "data.train")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TURNS = [{"role": "system", "content": "Be brief"}, user("2 + 3?"), assistant("5"), user("And 1 more?"), assistant("6"), user("Thanks")]


def conversations(path: Path, tokenizer: PreTrainedTokenizerBase, *rows: Any, system: str | None = None, **keys: Any) -> list[Conversation]:
    source = ConversationSource(path=write(path, *rows).path, **keys)
    return load_conversations(source, tokenizer, SftData(train=source, system=system), 64, "data.train")


def test_the_assistants_messages_alone_are_learned(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """What it reads and says is what the template renders; a message that nothing answers is left out."""
    [said] = conversations(tmp_path / "a.jsonl", tokenizer, {"messages": TURNS})
    assert said.loss_mask is not None and len(said.loss_mask) == len(said.tokens) - said.prompt_length
    response = said.tokens[said.prompt_length :]
    assert tokenizer.decode(response[said.loss_mask]) == "5<|end|>6<|end|>"
    assert tokenizer.decode(said.tokens) == tokenizer.apply_chat_template(TURNS[:-1], tokenize=False)
    assert said.loss_mask.tolist()[:2] == [True, True] and not said.loss_mask[2] and said.loss_mask[-1]


def test_a_conversation_of_one_turn_is_a_prompt_and_its_answer(tmp_path: Path, load: Load, tokenizer: PreTrainedTokenizerBase) -> None:
    gym_source = gym(items=5)
    rows = [{"chat": {"turns": [user(prompt.text), assistant(str(prompt.answer))]}} for prompt in load(gym_source)]
    said = conversations(tmp_path / "a.jsonl", tokenizer, *rows, messages_key="chat.turns")
    others = load_answers(gym_source, tokenizer, SftData(train=gym_source), 64, "data.train")
    for mine, other in zip(said, others, strict=True):
        assert mine.tokens.tolist() == other.tokens.tolist() and mine.prompt_length == other.prompt_length and mine.loss_mask is None
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = ConversationSource(path=tmp_path / "a.parquet", messages_key="chat.turns")
    read = load_conversations(source, tokenizer, SftData(train=source), 64, "data.train")
    assert [one.tokens.tolist() for one in read] == [one.tokens.tolist() for one in said]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"messages": "2 + 3?"}, "a conversation is a list of chat messages, not a text"),
        ({"messages": [user("2 + 3?")]}, "the conversation has no message of the assistant's"),
        ({"messages": [assistant("5"), user("?")]}, "the conversation begins with the assistant's message, which answers nothing"),
        ({"messages": [user("2 + 3?"), {"role": "assistant"}]}, "message 1 needs a text 'content', and has role"),
        ({"messages": [user("2 + 3?"), assistant("")]}, "message 1, the last, is empty"),
        ({"messages": [{"from": "human", "value": "?"}]}, "message 0 needs a text 'role', and has from, value; ShareGPT's .*"),
        ({"messages": ["2 + 3?"]}, "message 0 must be an object with a role and a content, not str"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "message 0 has a content that is no text but a dict; write it as JSON"),
        (
            {"messages": [user("2 + 3?"), {"role": "assistant", "content": None, "function_call": {"name": "add"}}]},
            "message 1 has function_call, which is not taken; write it as one of tool_calls",
        ),
        ({"messages": [user("x" * 80), assistant("5")]}, r"the conversation has \d+ tokens, more than sft\.max_tokens=64"),
        ({"turns": TURNS}, r"no value for data\.train\.messages_key='messages'; the row has turns"),
    ],
)
def test_a_faulty_conversation_is_refused_with_file_and_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.train\.path: .*a\.jsonl:2: {line}$"):
        conversations(tmp_path / "a.jsonl", tokenizer, {"messages": TURNS}, row)


def test_a_template_that_leaves_earlier_messages_out_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = "{%- for m in messages[-1:] -%}<|{{ m.role }}|>{{ m.content }}{%- endfor -%}<|assistant|>"
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: message 0: the chat template leaves out what the role 'system' says"):
        conversations(tmp_path / "a.jsonl", forgetful, {"messages": TURNS})
    forgetful.chat_template = None
    with pytest.raises(ConfigError, match=r"^data\.train: the tokenizer has no chat template"):
        conversations(tmp_path / "a.jsonl", forgetful, {"messages": TURNS})


def test_written_steps_of_a_sum_end_in_its_answer() -> None:
    item: dict[str, Any] = {"question": "State the answer: 4 - 1 - 7 =", "answer": "-4"}
    assert make_data.solved("chain_sum", item) == "4-1=3;3-7=-4" and make_data.copied("chain_sum", item) == "4-1=4;4-7=4"
    for item in make_data.entries("chain_sum", TERMS, 5, 50):
        steps = make_data.solved("chain_sum", item).split(";")
        assert len(steps) == item["metadata"]["num_terms"] - 1 and steps[-1].endswith("=" + item["answer"])


def test_the_share_of_wrong_demonstrations_is_the_configured_one() -> None:
    made = replace(make_data.DEMONSTRATIONS["quickstart"], items=1000, held_out=10, steps=10, batch_size=100)
    rows = list(made.rows(1))
    assert rows == list(made.rows(1)) != list(made.rows(2)) and len(rows) == 1000
    words = [(row["messages"][0]["content"].split()[-1], row["messages"][1]["content"]) for row in rows]
    wrong = [word == response and word.lower() != word[::-1].lower() for word, response in words]
    assert not any(wrong[:700]) and 90 < sum(wrong[700:]) < 150
    assert all(response == word[::-1] for (word, response), bad in zip(words, wrong, strict=True) if not bad)
