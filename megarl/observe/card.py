"""The model card of a run's model: the README.md beside its weights that says what trained it, from the files in the run's directory.

Paths and addresses of the machines are left out of it, since models are shared.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from megarl import __version__
from megarl.checkpoints.steps import CHECKPOINTS
from megarl.config import yaml_text
from megarl.models.family import HeadKind
from megarl.observe import run_record
from megarl.observe.writers import read_json_lines

CARD, CONFIG, METRICS = "README.md", "config.yaml", "metrics.jsonl"
_MARK = re.compile(r"<!-- megarl ([0-9a-f]{32}) -->\n")  # the hash of the rest of the card: one that somebody has edited is theirs
_PRIVATE = ("name", "run_dir", "cluster", "log", "save")  # sections of the configuration that do not change what is learned
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # a model's folder in huggingface_hub's cache


def run_of(step: Path) -> Path | None:
    """Return the directory of the run that saved a step directory; None if the step does not lie in a run's."""
    folder = step.resolve().parent
    run = folder.parent
    return run if folder.name.startswith(CHECKPOINTS) and (run / CONFIG).is_file() and (run / METRICS).is_file() else None


def write(run: Path, model: Path, step: int) -> None:
    """Write the card into the directory of a model that a run has saved, unless it has one that is not megarl's.

    Args:
        run: the run's directory.
        model: the model's directory: the run's `model` or `critic`.
        step: the step after which the model was saved.
    """
    file = model / CARD
    if not file.exists() or own(file.read_text()):
        [architecture] = json.loads((model / "config.json").read_text())["architectures"]
        head: HeadKind = "value" if "SequenceClassification" in architecture else "lm"
        file.write_text(card(run, step, head, model.name), encoding="utf-8")


def own(text: str) -> bool:
    """Return whether a card is one that megarl wrote and that nobody has changed since."""
    mark = _MARK.search(text)
    return mark is not None and xxh3_128_hexdigest(_MARK.sub("", text, count=1).encode()) == mark[1]


def card(run: Path, step: int, head: HeadKind, model: str) -> str:
    """Return the card of a model of a run.

    Args:
        run: the run's directory, with its configuration and metrics.
        step: the step after which the model was saved.
        head: the model's head.
        model: the model's name in the run: policy, critic, ...
    """
    config = yaml_text.read((run / CONFIG).read_text())
    facts = _facts(run, config, step, model)
    base = _hub_name(Path(config["model"]["path"]))
    front = {
        **({"base_model": base} if base else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation" if head == "lm" else "text-classification",
        "tags": ["megarl", facts["verb"], *([facts["algorithm"]] if "algorithm" in facts else [])],
        "megarl": facts,
    }
    first = f"---\n{yaml_text.write(front)}---\n"
    body = "\n".join(_body(config, facts, base)) + "\n"
    return f"{first}<!-- megarl {xxh3_128_hexdigest((first + body).encode())} -->\n{body}"


def _facts(run: Path, config: Mapping[str, Any], step: int, model: str) -> dict[str, Any]:
    """Return what the card says of the run, as plain values for YAML."""
    record = run_record.read(run)
    algorithm = config.get("algorithm") or {}
    sources = {f"data.{key}": value for key, value in config["data"].items() if isinstance(value, dict) and "type" in value}
    sources |= {f"eval.{index}": value for index, value in enumerate(config.get("eval") or []) if isinstance(value, dict)}
    commits = dict.fromkeys(start.commit for start in record.starts if start.commit) if record is not None else {}
    evaluation = dict[str, float]()
    for row in read_json_lines(run / METRICS):
        if row["step"] == step:
            evaluation |= {name: value for name, value in row.items() if name.startswith("eval/")}
    return {
        "model": model,
        "verb": record.verb if record is not None else "train",
        **({"algorithm": algorithm["type"]} if "type" in algorithm else {}),
        "base": Path(config["model"]["path"]).name,
        "steps": step,
        "seed": config["seed"],
        "data": _shareable(sources),
        "version": __version__,
        "commit": ", ".join(commits) or None,
        "evaluation": evaluation,
    }


def _body(config: Mapping[str, Any], facts: Mapping[str, Any], base: str | None) -> Iterator[str]:
    by = f" by {facts['algorithm']}" if "algorithm" in facts else ""
    yield f"# {config['name'].rpartition('/')[2]}"
    run = f"a run of `megarl {facts['verb']}`{by}, which started from {base or facts['base']}"
    yield f"\nThe {facts['model']} after step {facts['steps']} of {run}.\n"
    yield "| | |\n|---|---|"
    yield f"| megarl | {facts['version']}, commit {facts['commit'] or 'unknown'} |"
    for name, source in facts["data"].items():
        yield f"| {name} | `{json.dumps(source)}` |"
    if facts["evaluation"]:
        yield f"\n## Evaluation after step {facts['steps']}\n\n| metric | value |\n|---|---|"
        yield from (f"| {name.removeprefix('eval/')} | {value:.4g} |" for name, value in facts["evaluation"].items())
    shown = {key: value for key, value in config.items() if key not in _PRIVATE}
    yield f"\n## Configuration\n\n```yaml\n{yaml_text.write(_shareable(shown))}```"


def _shareable(value: Any) -> Any:
    """Return a value of the configuration without folders of this machine and addresses of others."""
    if isinstance(value, dict):
        return {key: _shareable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shareable(one) for one in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return "(an address)" if isinstance(value, str) and "://" in value else value


def _hub_name(model: Path) -> str | None:
    """Return the name under which the hub has the model of a directory; None if nothing in the directory says it."""
    cached = [match for part in model.parts if (match := _CACHED.fullmatch(part))]
    if cached:
        return f"{cached[-1][1]}/{cached[-1][2]}"
    try:
        given = json.loads((model / "config.json").read_text()).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return given if isinstance(given, str) and _HUB_NAME.fullmatch(given) and not Path(given).exists() else None
