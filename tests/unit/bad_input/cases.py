"""How the inputs of the table are made: each function says what to write into an empty directory, and which arguments name it."""

import json
import os
import re
import shlex
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megarl.checkpoints.files import read_record, write_file
from megarl.checkpoints.step_writer import StepWriter
from megarl.checkpoints.steps import MANIFEST, Manifest, encode
from tests.e2e.job import RL

COMMON = """
name: job
run_dir: {runs}
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false}}
log: {{tensorboard: false}}
"""
GYM = "{{type: reasoning_gym, dataset: spell_backward, seed: 7, items: 8}}"
ENGINES = "reward: {{source: {{type: reasoning_gym}}}}\nrollout: {{max_prompt_tokens: 64, max_response_tokens: 64, kv_cache_mb: 16}}\n"
LEARN = "{{steps: 1, batch_size: 2, max_tokens: 64, micro_batch_tokens: 256}}\n"
EPISODES = ("data.train={type: episodes, seed: 1, items: 64}", "reward={source: {type: environment}}")
# A function would be imported in a process of its own, in each of hundreds of cases.
LOOP = RL.replace('type: function, path: "tests.e2e.rewards:share_of_letters"', "type: reasoning_gym")
VERBS = {
    "train": LOOP,
    "value": LOOP,
    "sft": f"{COMMON}data: {{{{train: {GYM}}}}}\nsft: {LEARN}",
    "rm": f"{COMMON}data: {{{{train: {{{{path: p.jsonl}}}}, eval: {{{{path: p.jsonl}}}}}}}}\nrm: {LEARN}",
    "dpo": f"{COMMON}data: {{{{train: {{{{path: p.jsonl}}}}, eval: {{{{path: p.jsonl}}}}}}}}\ndpo: {LEARN}",
    "pairs": f"{COMMON}data: {{{{train: {GYM}, eval: {GYM}}}}}\n{ENGINES}",
    "eval": f"{COMMON}data: {{{{eval: {GYM}}}}}\n{ENGINES}",
    "serve": f"{COMMON}serve: {{{{max_tokens: 64}}}}\n",
}


@dataclass(frozen=True)
class Room:
    """Where a case makes its input."""

    here: Path  # empty
    model: Path  # the tiny one, not to be touched
    verb: str

    @property
    def runs(self) -> Path:
        return self.here / "out"

    def config(self, model: Path | None = None) -> Path:
        """A configuration that passes every check."""
        path = self.here / "job.yaml"
        path.write_text(VERBS[self.verb].format(runs=self.runs, model=model or self.model))
        return path


Make = Callable[[Room], list[str]]
"""Makes the input; returns what follows the verb."""


class Case(NamedTuple):
    """One bad input."""

    name: str
    verb: str
    make: Make
    line: str  # regular expression of what follows "megarl: error: "


def given(*overrides: str) -> Make:
    """A good configuration with overrides, in which HERE and MODEL stand for directories."""
    return lambda room: [
        str(room.config()),
        *(override.replace("HERE", str(room.here)).replace("MODEL", str(room.model)) for override in overrides),
    ]


def typed(*arguments: str) -> Make:
    """The same, where FILE=TEXT is a file of the model, or what its config.json says otherwise, and EPISODES need an environment."""
    files = dict(argument.split("=", 1) for argument in arguments if re.match(r"\w+\.(json|jinja)=", argument))
    lists = (EPISODES if argument == "EPISODES" else (argument,) for argument in arguments if argument.split("=")[0] not in files)
    overrides = [override for one in lists for override in one]

    def change(copy: Path) -> None:
        for name, text in files.items():
            before = json.loads((copy / name).read_text()) if name == "config.json" else None
            (copy / name).write_text(text if before is None else json.dumps({**before, **json.loads(text)}))

    return model(change, *overrides) if files else given(*overrides)


def refusals(file: Path) -> list[Case]:
    """The cases of a text: the verb and its arguments as a shell reads them, then the line, in which ... stands for any text."""
    cases = []
    for command, line in re.findall(r"^(\w.*)\n    (.*)$", file.read_text(), re.M):
        verb, *arguments = shlex.split(command)
        cases.append(Case(command, verb, typed(*arguments), f"^{'.*'.join(map(re.escape, line.split('...')))}$"))
    return cases


def config(text: bytes | Callable[[], bytes]) -> Make:
    """A configuration of these bytes."""

    def make(room: Room) -> list[str]:
        (room.here / "job.yaml").write_bytes(text if isinstance(text, bytes) else text())
        return [str(room.here / "job.yaml")]

    return make


def model(change: Callable[[Path], object], *overrides: str) -> Make:
    """A good configuration whose model's directory was changed."""

    def make(room: Room) -> list[str]:
        copy = room.here / "model"
        shutil.copytree(room.model, copy)
        change(copy)
        return [str(room.config(copy)), *overrides]

    return make


def config_json(changes: Mapping[str, Any], *without: str) -> Make:
    """A model whose config.json says otherwise."""

    def change(copy: Path) -> None:
        held = json.loads((copy / "config.json").read_text())
        text = json.dumps({key: value for key, value in {**held, **changes}.items() if key not in without})
        (copy / "config.json").write_text(text)

    return model(change)


def wrote(name: str, data: bytes) -> Make:
    """A model one of whose files is this."""
    return model(lambda copy: (copy / name).write_bytes(data))


def header(text: bytes) -> Make:
    """A model whose safetensors file has this header and no data."""
    return wrote("model.safetensors", struct.pack("<Q", len(text)) + text)


def pipe(name: str) -> Make:
    """A model one of whose files is a pipe, at which nobody writes."""

    def change(copy: Path) -> None:
        (copy / name).unlink()
        os.mkfifo(copy / name)

    return model(change)


def template(text: str, *overrides: str) -> Make:
    """A model with another chat template."""
    return model(lambda copy: (copy / "chat_template.jinja").write_text(text), *overrides)


def rows(text: bytes | str, key: str = "data.train", more: str = "") -> Make:
    """A good configuration with a .jsonl file of this content as a source."""

    def make(room: Room) -> list[str]:
        (room.here / "rows.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
        return [str(room.config()), f"{key}={{path: {room.here}/rows.jsonl{more}}}"]

    return make


def prompts(*lines: Any, key: str = "data.train") -> Make:
    """Rows of prompts: texts as they stand, other values as JSON."""
    return rows("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), key, ", type: file")


def checkpoint(spoil: Callable[[Path], object], trainer: Any = None, where: str = "steps", *arguments: str) -> Make:
    """A good configuration with a step directory HERE/`where`/step_000001 of this trainer.json, which is then spoilt."""

    def make(room: Room) -> list[str]:
        aside = StepWriter(room.here / where, 1)
        aside.begin(["policy"])
        data = trainer if isinstance(trainer, bytes) else json.dumps(trainer).encode()
        files = {"trainer.json": write_file(aside.path / "trainer.json", data)}
        aside.commit(Manifest(1, 1, {}, {}, {"policy": POLICY}, files), keep_last=9, keep_every=0)
        spoil(room.here / where / "step_000001")
        return given(*arguments)(room)

    return make


POLICY = {"model_type": "qwen3_moe", "vocab_size": 128, "optimizer": None}


def manifest(data: bytes | None = None, **changes: Any) -> Make:
    """`model.weights` is a step directory whose manifest holds `data`, or these values in the place of its own, sealed."""

    def spoil(step: Path) -> None:
        held = Manifest(1, 1, {}, {}, {"policy": POLICY}, {"trainer.json": read_record(step / "trainer.json")})
        (step / MANIFEST).write_bytes(encode(replace(held, **changes)) if data is None else data)

    return checkpoint(spoil, None, "steps", "model.weights=HERE/steps/step_000001")


def piped_manifest(room: Room) -> list[str]:
    """`model.weights` is a step directory whose manifest is a pipe, at which nobody writes."""

    def spoil(step: Path) -> None:
        (step / MANIFEST).unlink()
        os.mkfifo(step / MANIFEST)

    return checkpoint(spoil, None, "steps", "model.weights=HERE/steps/step_000001")(room)


RUN = {
    **{"step": 1, "learned": 1, "metrics_bytes": 0, "evaluations": {}, "results": {}, "whole": {}, "warnings": {}},
    **{"ended_by": None, "restarts": []},
}
TRAINER: dict[str, Any] = {"verb": "train", "progress": {"step": 1, "sampler": {"count": 64}}, "run": RUN, "where": {}, "config": "{}"}


def trainer(data: bytes | None = None, **changes: Any) -> Make:
    """The run goes on from a step directory whose trainer.json holds `data`, or these values in the place of its own."""
    return checkpoint(lambda step: None, {**TRAINER, **changes} if data is None else data, "out/job/checkpoints")
