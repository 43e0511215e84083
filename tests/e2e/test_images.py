"""SFT and RL learn from images; what SFT saves is transformers' model, and sees what it saw."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from megarl.batch import pack
from megarl.checks.without_engines import check_sft
from megarl.checks.without_ranks import check_eval
from megarl.config import EvalConfig, SftConfig, TrainConfig, load
from megarl.data.conversations import sample
from megarl.data.tokenizer import load_tokenizer
from megarl.images import PlacedImage
from megarl.loops.sft import sft
from megarl.models.image_processor import ImageProcessor
from megarl.observe.samples import files
from tests.e2e.job import ROOT
from tests.e2e.lab import Lab
from tests.image_samples import PAD
from tests.rows import rows
from tools.check_logits import transformers_model
from tools.make_tiny_model import build

CONFIG = """
name: seeing
model: {path: model, dtype: float32, max_pixels: 1024}
cluster: {gpus: false}
layout: {ranks: 2, tp: 2, ep: 2}
optimizer: {lr: 5.0e-3}
data:
  train: {type: conversations, path: train.jsonl}
  eval: {type: conversations, path: eval.jsonl}
sft: {steps: 8, batch_size: 8, micro_batch_tokens: 512, max_tokens: 160, eval_every: 4}
"""


def conversations(folder: Path, name: str, count: int, seed: int) -> None:
    """Rows that ask for the colours of one to three pictures, or of none."""
    rng, rows = np.random.default_rng(seed), list[str]()
    for number in range(count):
        parts, answer = list[dict[str, str]](), ""
        for index in range(number % 4):
            colour = int(rng.integers(3))
            file = f"{name}-{number}-{index}.png"
            pixels = np.zeros((int(rng.integers(20, 50)), int(rng.integers(20, 50)), 3), np.uint8)
            pixels[..., colour] = 255
            Image.fromarray(pixels).save(folder / file)
            parts.append({"type": "image", "image": file})
            answer += "rgb"[colour]
        parts.append({"type": "text", "text": "which?"})
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer or "none"}]
        rows.append(json.dumps({"messages": messages}))
    (folder / f"{name}.jsonl").write_text("\n".join(rows))


@pytest.mark.parametrize("family", rows(["qwen3_vl_moe", "qwen3_5_moe_vl"], ["qwen3_vl_moe"]))
def test_sft_learns_from_images_and_what_it_saves_sees_them(lab: Lab, tmp_path: Path, family: str) -> None:
    build(tmp_path / "model", layers=2, hidden=128, experts=4, expert_hidden=32, seed=1, family=family)
    conversations(tmp_path, "train", 64, seed=1)
    conversations(tmp_path, "eval", 8, seed=2)
    (tmp_path / "sft.yaml").write_text(CONFIG)
    places = [f"{key}={tmp_path / name}" for key, name in (("run_dir", ""), ("model.path", "model"))]
    places += [f"data.{name}.path={tmp_path / name}.jsonl" for name in ("train", "eval")]
    config = load(tmp_path / "sft.yaml", places, SftConfig)
    with lab.stage():
        sft(config)
    lines = [json.loads(line) for line in (tmp_path / "seeing" / "metrics.jsonl").read_text().splitlines()]
    measured = [row["eval/heldout/sft/loss"] for row in lines if "eval/heldout/sft/loss" in row]
    assert len(measured) == 3 and measured[-1] < 0.7 * measured[0]
    for directory, loss in ((tmp_path / "model", measured[0]), (tmp_path / "seeing" / "model", measured[-1])):
        assert abs(transformers_loss(directory, config) - loss) < 1e-4
    before, after = (load_file(place / "model.safetensors") for place in (tmp_path / "model", tmp_path / "seeing" / "model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed and not any(name.startswith("model.visual.") for name in changed)
    assert ImageProcessor(tmp_path / "seeing" / "model").cut == ImageProcessor(tmp_path / "model", most=1024).cut


RL = """
name: playing
model: {path: model, dtype: float32, vision: train}
cluster: {gpus: false}
optimizer: {lr: 1.0e-3, warmup_steps: 1}
algorithm: {type: grpo}
data: {train: {type: file, path: train.jsonl, answer_key: answer}, eval: {type: file, path: train.jsonl, answer_key: answer, rows: 8}}
reward: {source: {type: function, path: "tests.e2e.reward_by_letter:starts"}}
routing: {replay: r3}
rollout: {samples_per_prompt: 4, max_prompt_tokens: 160, max_response_tokens: 6, max_num_seqs: 16, kv_cache_mb: 32}
sync: {transport: shm}
train: {steps: 3, prompts_per_step: 8, micro_batch_tokens: 1024, eval_every: 3}
"""


LEARNERS = [("qwen3_vl_moe", "{}"), ("qwen3_5_moe_vl", "{ranks: 2, pp: 2}")]


@pytest.mark.parametrize(("family", "layout"), rows(LEARNERS, LEARNERS[:1]))
def test_rl_trains_on_what_engines_sampled_from_images(lab: Lab, tmp_path: Path, family: str, layout: str) -> None:
    """Tower and language model change together, engines follow, and each token of image and text has the engine's experts."""
    build(tmp_path / "model", layers=2, hidden=128, experts=4, expert_hidden=32, seed=1, family=family)
    conversations(tmp_path, "asked", 24, seed=1)
    asked = [json.loads(line)["messages"] for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    questions = [json.dumps({"prompt": row[:1], "answer": row[1]["content"]}) for row in asked]
    (tmp_path / "train.jsonl").write_text("\n".join(questions))
    (tmp_path / "rl.yaml").write_text(RL)
    files = [
        f"{key}.path={tmp_path / name}" for key, name in (("model", "model"), ("data.train", "train.jsonl"), ("data.eval", "train.jsonl"))
    ]
    config = load(tmp_path / "rl.yaml", [f"run_dir={tmp_path}", f"layout={layout}", *files], TrainConfig)
    lab.train(config, own_engine=True)
    steps = [json.loads(line) for line in (tmp_path / "playing" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in steps if "training/rollout_probs_diff_max" in row]
    assert len(trained) == 3 and max(row["training/rollout_probs_diff_max"] for row in trained) < 1e-4
    assert {row["routing/replay_hit_rate"] for row in trained} == {1.0}
    before, after = (saved(place) for place in (tmp_path / "model", tmp_path / "playing" / "model"))
    assert before.keys() == after.keys()
    for part in ("model.visual.", "model.language_model."):
        assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith(part))


def saved(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face directory of one or several files."""
    return {name: weight for file in directory.glob("*.safetensors") for name, weight in load_file(file).items()}


EVAL = """
name: eval
run_dir: {place}
model: {{path: {place}/model, dtype: float32}}
cluster: {{gpus: false}}
data: {{eval: {{type: file, path: {place}/rows.jsonl, answer_key: answer}}}}
reward: {{source: {{type: function, path: "tests.e2e.reward_by_letter:starts"}}}}
rollout: {{temperature: 1.0, max_prompt_tokens: 160, max_response_tokens: 6, max_num_seqs: 16, kv_cache_mb: 32}}
"""


@pytest.mark.long
def test_what_generate_and_eval_answer_to_images_is_what_transformers_answers(tmp_path: Path) -> None:
    """Greedily, from the command line; the picture of a row is shown beside its answer."""
    build(tmp_path / "model", layers=2, hidden=128, experts=4, expert_hidden=32, seed=1, family="qwen3_vl_moe")
    conversations(tmp_path, "asked", 8, seed=1)
    asked = [json.loads(line)["messages"] for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": row[:1], "answer": row[1]["content"]}) for row in asked))
    (tmp_path / "eval.yaml").write_text(EVAL.format(place=tmp_path))
    rows_of = ["--file", "rows.jsonl", "--cpu", "--temperature", "0", "--max-tokens", "6", "--out", "answers.jsonl"]
    called("generate", "model", *rows_of, place=tmp_path)
    called("eval", "eval.yaml", place=tmp_path)
    generated = [json.loads(line)["response"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    [records] = [[record for record in file.records() if record.greedy] for file in files(tmp_path / "eval")]
    config = load(tmp_path / "eval.yaml", [], EvalConfig)
    assert generated == [record.response for record in records] == transformers_answers(tmp_path / "model", config, 6)
    assert [len(record.images) for record in records] == [0, 1, 2, 3] * 2
    assert (tmp_path / "eval" / "report.html").read_text().count('src="data:image/jpeg;base64,') >= 6


def transformers_loss(directory: Path, config: SftConfig) -> float:
    """transformers' loss of a learned token of the held-out conversations."""
    model, processor = transformers_model(directory).eval(), ImageProcessor(directory, most=config.model.max_pixels)
    total = count = 0.0
    for one in check_sft(config).held_out:
        batch = pack([sample(one)])
        with torch.no_grad():
            logp_TV = model(batch.input_T[None], **seen(processor, batch.input_T, one.images)).logits[0].log_softmax(-1)
        logp_T = logp_TV.gather(1, batch.target_T[:, None])[:, 0]
        total, count = total - float(logp_T[batch.mask_T].sum()), count + float(batch.mask_T.sum())
    return total / count


def transformers_answers(directory: Path, config: EvalConfig, count: int) -> list[str]:
    """transformers' greedy answers of at most `count` tokens to the held-out prompts."""
    model, processor = transformers_model(directory).eval(), ImageProcessor(directory, most=config.model.max_pixels)
    tokenizer, answers = load_tokenizer(directory), list[str]()
    [held_out] = check_eval(config)
    for prompt in held_out.prompts:
        tokens_T = torch.tensor(prompt.tokens)
        while len(tokens_T) < len(prompt.tokens) + count and tokens_T[-1] != tokenizer.eos_token_id:
            with torch.no_grad():
                next_ = model(tokens_T[None], **seen(processor, tokens_T, prompt.images)).logits[0, -1].argmax()
            tokens_T = torch.cat([tokens_T, next_[None]])
        answers.append(tokenizer.decode(tokens_T[len(prompt.tokens) :], skip_special_tokens=True))
    return answers


def seen(processor: ImageProcessor, tokens_T: torch.Tensor, images: Sequence[PlacedImage]) -> dict[str, torch.Tensor]:
    """What transformers' model takes besides tokens."""
    if not images:
        return {}
    return {
        "pixel_values": torch.cat([processor.pixels(placed.image) for placed in images]),
        "image_grid_thw": torch.tensor([placed.image.grid for placed in images]),
        "mm_token_type_ids": (tokens_T[None] == PAD).int(),
    }


def called(*arguments: str, place: Path) -> None:
    """Run megarl from the command line."""
    program = [sys.executable, "-c", "from megarl.cli import main; raise SystemExit(main())", *arguments]
    subprocess.run(program, cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=300)
