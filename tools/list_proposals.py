"""The table of `megarl/plan/proposals.md`: what `megarl init` proposes for models on 8 to 256 GPUs. `--write` writes it (2 min)."""

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path

from megarl.cli import init
from megarl.config import ConfigError, TrainConfig, load
from megarl.plan.devices import GB, device_of
from megarl.plan.whole import build, models_of
from tests.published_models import MODELS, config_of
from tools.list_upstream import show_or_write
from tools.make_tiny_model import fast_tokenizer, train_sentencepiece

PAGE = Path(__file__).parents[1] / "megarl" / "plan" / "proposals.md"
START = "<!-- python -m tools.list_proposals --write -->\n"
NAMES = ("Qwen3-30B-A3B", "gpt-oss-120b", "GLM-4.6", "Qwen3-235B-A22B", "DeepSeek-V3")
GPUS, MEMORY_GB = (8, 16, 32, 64, 128, 256), 80.0
TOKENS = 1024  # of a prompt, about: a sentence has 32


def table() -> str:
    """The table in Markdown."""
    head = [
        "| model | GPUs | ranks | engines | recompute, offload | fullest rank, GB | seconds of a step |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(row(name, gpus) for name in NAMES for gpus in GPUS)]) + "\n"


def row(name: str, gpus: int) -> str:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as directory:
        path, data, out = Path(directory) / name, Path(directory) / "data.jsonl", Path(directory) / "own.yaml"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config_of(MODELS[name])))
        fast_tokenizer(train_sentencepiece(seed=1)).save_pretrained(path)
        prompt = "What is the sum of 17 and 17? " * (TOKENS // 32)
        data.write_text("".join(json.dumps({"question": prompt, "answer": str(number)}) + "\n" for number in range(512)))
        try:
            with chdir(directory), open(os.devnull, "w") as silent, redirect_stdout(silent):
                init.main([str(path), str(data), "--gpus", str(gpus), "--out", str(out)])
        except ConfigError as error:
            assert "does not fit" in str(error), error
            return f"| {name} | {gpus} | does not fit | | | | |"
        config = load(out, [], TrainConfig)
        models = models_of(config)
        plan = build(config, models, device_of(MEMORY_GB), MEMORY_GB)
    assert plan.times is not None
    layout, rollout = config.layout, config.rollout
    sizes = _sizes(layout.model_dump(), ("tp", "pp", "vpp", "cp", "ep", "etp"))
    ranks = f"{layout.ranks}: {sizes}" + ", shared with engines" * (config.placement.engines == "shared")
    engines = f"{rollout.replicas} x {_sizes(rollout.model_dump(), ('tp', 'dp'))}"
    saved = [f"recompute {config.model.recompute}"] * (config.model.recompute != "none") + ["models take turns"] * config.placement.offload
    fullest = max(stage.total for group in plan.groups for stage in group.stages)
    cells = [name, str(gpus), ranks, engines, ", ".join(saved), f"{fullest / GB:.1f}", f"{plan.times.step:.0f}"]
    return f"| {' | '.join(cells)} |"


def _sizes(sizes: dict[str, int | None], keys: Sequence[str]) -> str:
    return " ".join(f"{key}{sizes[key]}" for key in keys if (sizes[key] or 1) > 1) or "tp1"


if __name__ == "__main__":
    show_or_write(__doc__, PAGE, START, table())
