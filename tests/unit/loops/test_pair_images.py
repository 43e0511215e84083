"""What `megarl pairs` writes of prompts with images is read as the policy read them, from a folder that can be moved."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from megarl.checks.data import PromptReader
from megarl.config import FileSource, PairsConfig, PreferenceData, PreferenceSource
from megarl.data.images import ImageReader
from megarl.data.preferences import load_preferences
from megarl.data.tokenizer import encode, load_tokenizer
from megarl.loops.pairs import pairs_of
from megarl.models.image_processor import ImageProcessor
from tests.image_samples import PAD, picture

FILES = [picture(np.random.default_rng(number)) for number in range(2)]
QUESTIONS: list[dict[str, Any]] = [
    {"prompt": "a<image><image>b<image>", "images": ["0", "1", "0"]},
    {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "image", "image": "1"}, "x"]}]},
    {"prompt": "an <image> that is none"},
]
QUESTIONS[1]["prompt"][1]["content"][1] = {"type": "text", "text": "<image> in words"}


def test_pairs_have_the_prompt_s_images_in_their_own_folder(seeing: Path, tmp_path: Path) -> None:
    (data := tmp_path / "data").mkdir()
    for number, file in enumerate(FILES):
        (data / str(number)).write_bytes(file)
    (data / "rows.jsonl").write_text("\n".join(json.dumps(row | {"answer": "1"}) for row in QUESTIONS))
    source = FileSource(type="file", path=data / "rows.jsonl", answer_key="answer")
    sections: dict[str, Any] = {"model": {"path": seeing}, "data": {"train": source, "eval": source}, "rollout": {"max_prompt_tokens": 400}}
    reward = {"source": {"type": "function", "path": "tests.e2e.reward_by_letter:starts"}}
    config = PairsConfig.model_validate({"name": "x", "reward": reward, **sections})
    tokenizer = load_tokenizer(seeing)
    prompts = PromptReader.of(config).prompts(config.data.train, "data.train", tokenizer)
    assert [len(prompt.images) for prompt in prompts] == [3, 1, 0]
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    rows = [row for prompt in prompts for row in pairs_of(prompt, [("good", 1.0), ("bad", 0.0)], 1, random.Random(0), run)]
    (run / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert sorted(file.read_bytes() for file in (run / "images").iterdir()) == sorted(FILES)
    shutil.rmtree(data)
    moved = run.rename(tmp_path / "moved")
    pairs = PreferenceSource(path=moved / "train.jsonl")
    reader = ImageReader(ImageProcessor(seeing), PAD, 400, "limit")
    loaded = load_preferences(pairs, tokenizer, PreferenceData(train=pairs, eval=pairs), 400, "data.train", "limit", reader=reader)
    for prompt, pair in zip(prompts, loaded, strict=True):
        for side, text in ((pair.chosen, "good"), (pair.rejected, "bad")):
            assert side.tokens.tolist() == [*prompt.tokens, *encode(tokenizer, [text], special=False)[0], tokenizer.eos_token_id]
            assert [*side.images] == [*prompt.images]
            assert all(placed.image.source.path.startswith(str(moved)) for placed in side.images)
