"""The tiny model's directory is an ordinary one, its tokenizer loses nothing, and the same seed gives the same bytes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.tokenizer import load_tokenizer
from megarl.models.families import check_checkpoint
from megarl.models.hf import inventory

TOOL = Path(__file__).parents[3] / "tools" / "make_tiny_model.py"
SPELL = "Spell this word backward (example: sun -> nus): "
SUM = "State the final answer to the following arithmetic problem: "
ASCII = st.text(alphabet="".join(map(chr, range(32, 127))) + "\n\t")
# Phrases, their beginnings and ends, runs of spaces: where a cut could go wrong.
PIECES = st.lists(st.one_of(st.sampled_from([SPELL, SUM, SPELL[:9], SPELL[-7:], SUM[-4:], "  ", " "]), ASCII)).map("".join)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "a"
    subprocess.run([sys.executable, str(TOOL), str(out)], check=True, capture_output=True, timeout=6000)
    return out


def test_same_seed_gives_same_bytes_and_another_seed_other_weights(tiny: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_tiny_model", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    again, other = tiny.parent / "b", tiny.parent / "c"  # from this process, where the fixture used another one
    for out, seed in ((again, 1), (other, 2)):
        tool.build(out, layers=4, hidden=128, experts=8, expert_hidden=64, seed=seed)
    for path in sorted(tiny.iterdir()):
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name
    assert (tiny / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_directory_is_the_qwen3_moe_that_the_issue_asks_for(tiny: Path) -> None:
    config = check_checkpoint(tiny).config
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_hidden_layers"], config["num_local_experts"], config["num_experts_per_tok"]) == (4, 8, 2)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["norm_topk_prob"]) == (4, 2, True)
    tensors = inventory(tiny)
    assert "model.layers.3.self_attn.q_norm.weight" in tensors and "model.layers.3.mlp.experts.7.down_proj.weight" in tensors
    parameters = 0
    for tensor in tensors.values():
        size = 1
        for length in tensor.shape:
            size *= length
        parameters += size
    assert 0.9e6 < parameters < 1.2e6
    generation = json.loads((tiny / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"] == load_tokenizer(tiny).eos_token_id


def test_transformers_loads_model_and_tokenizer_without_remote_code(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    assert len(tokenizer) == model.config.vocab_size == 128
    ours = load_tokenizer(tiny)
    for text in (SPELL + "horse", SUM + "4 - 1 + 3 =", "  a\n\tb  ", "日本x▁"):
        assert tokenizer.encode(text) == ours.encode(text)
    assert model(torch.tensor([tokenizer.encode(SPELL + "horse")])).logits.shape == (1, 6, 128)


def test_tokenizer_round_trips_text_and_cuts_as_sentencepiece_does(tiny: Path) -> None:
    tokenizer, pieces = load_tokenizer(tiny), sentencepiece.SentencePieceProcessor(model_file=str(tiny / "tokenizer.model"))

    @settings(deadline=None)
    @given(PIECES)
    def check(text: str) -> None:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        if "<|" not in text:  # a special token's name is that token here, and plain characters to sentencepiece
            assert tokens == pieces.encode(text)

    check()


def test_unknown_characters_become_visible_unk(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    assert tokenizer.decode(tokenizer.encode("×é")) == "×é"
    for text in ("日", "▁", "\r", "\0"):
        assert tokenizer.decode(tokenizer.encode(f"a{text}b")) == "a<|unk|>b"


def test_questions_of_both_tasks_are_short(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    chat = [{"role": "user", "content": SPELL + "horse"}]
    assert len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) == 1 + 1 + 5 + 1
    answered = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "esroh"}], tokenize=False)
    assert answered == f"<|user|>{SPELL}horse<|assistant|>esroh<|end|>"
    assert len(tokenizer.encode(SUM + "4 - 1 + 3 =")) == 1 + 9 + 2


def test_impossible_shapes_are_refused(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(TOOL), str(tmp_path), "--hidden", "100"], capture_output=True, text=True, timeout=600)
    assert run.returncode == 2 and "--hidden: 100 is not a multiple of 64" in run.stderr
