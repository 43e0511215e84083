"""Directories that the engines cannot start from before the policy's weights come (`model.base`), as data (see `configurations`)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.bad_input.cases import Case, Make, Room
from tests.unit.bad_input.environments import EPISODES, says
from tests.unit.bad_input.models import dense
from tools.make_tiny_model import build


def base(change: Callable[[Path], object], *overrides: str) -> Make:
    """The engines start from a copy of the model that was changed."""

    def make(room: Room) -> list[str]:
        shutil.copytree(room.model, room.here / "base")
        change(room.here / "base")
        return [str(room.config()), f"model.base={room.here}/base", *overrides]

    return make


def larger(copy: Path) -> None:
    shutil.rmtree(copy)
    build(copy, layers=3, hidden=128, experts=8, expert_hidden=64, seed=1)


def with_json(file: str, **changes: Any) -> Callable[[Path], object]:
    """A change of values in a JSON file."""
    return lambda copy: (copy / file).write_text(json.dumps({**json.loads((copy / file).read_text()), **changes}))


def reworded(copy: Path) -> None:
    file = copy / "chat_template.jinja"
    file.write_text("be brief: " + file.read_text())


TABLE = [
    *(
        Case(f"a base {name}", "train", base(change), rf"^model\.base: {line}")
        for name, change, line in (
            ("of another architecture", dense, ".* has a different architecture from model.path="),
            ("of another size", larger, "num_layers is 3 in .*base and 2 in model.path="),
            (
                "of other end tokens",
                with_json("generation_config.json", eos_token_id=[1, 60]),
                r"eos_token_id is \[1, 60\] in .*base and \[1\] in model.path=",
            ),
            (
                "of another tokenizer",
                with_json("tokenizer_config.json", eos_token="<|pad|>"),
                r"its tokenizer differs from model.path's: eos_token is '<\|pad\|>' in .*base and '<\|end\|>' in ",
            ),
            (
                "of another RoPE",
                with_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
                r"rope_theta is 500000\.0 in .*base and ",
            ),
            (
                "with less room",
                with_json("config.json", max_position_embeddings=16),
                ".*base: 28 tokens, and the model supports at most 16",
            ),
        )
    ),
    Case(
        "a base of another chat template",
        "train",
        base(reworded, says("{}"), *EPISODES),
        r"^model\.base: its chat template, which renders what the environment says, is another than that of ",
    ),
]
