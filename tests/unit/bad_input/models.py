"""Models that are refused, as data (see `configurations`)."""

import json
from pathlib import Path

from tests.unit.bad_input.cases import Case, config_json, given, header, model, pipe, template, wrote
from tests.unit.bad_input.configurations import DEEP, LONG
from tools.make_tiny_model import build


def says(key: str, value: str, more: str = "") -> str:
    """The line of a value of config.json."""
    return rf"^model\.path: .*config\.json's {key}={value}.*{more}"


def dense(copy: Path) -> None:
    build(copy, layers=1, hidden=128, experts=2, expert_hidden=32, seed=1, family="qwen3")


def few_experts(copy: Path) -> None:
    build(copy, layers=1, hidden=128, experts=2, expert_hidden=32, seed=1)


def deep_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_bytes(DEEP)


COUNTS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TABLE = [
    # --- experts that cannot be replayed
    *(
        Case(f"{name} ({verb})", verb, model(change, *overrides), line)
        for verb in ("train", "eval", "pairs")
        for name, change, overrides, line in (
            (
                "data-parallel attention of a dense model",
                dense,
                ("rollout.dp=2",),
                r"^rollout\.dp=2: the model has no experts; rollout\.replicas makes more engines$",
            ),
            (
                "whole experts of a dense model",
                dense,
                ("rollout.expert_parallel=true",),
                r"^rollout\.expert_parallel=true: the model has no experts$",
            ),
            (
                "fewer experts than GPUs",
                few_experts,
                ("rollout.dp=3", "rollout.expert_parallel=true"),
                r"^rollout\.expert_parallel=true: 2 experts for rollout\.dp\*rollout\.tp=3\*1=3 GPUs$",
            ),
            (
                "experts that data-parallel ranks cannot slice",
                few_experts,
                ("rollout.dp=3",),
                r"^rollout\.dp\*rollout\.tp=3\*1=3: does not divide the model's moe_intermediate_size=32; rollout\.expert_parallel=true ",
            ),
        )
    ),
    Case(
        "replay in a dense model",
        "train",
        model(dense, "routing.replay=r3"),
        r"^routing\.replay=r3: model\.path=.* is a qwen3, which has no",
    ),
    Case("replay for no critic", "train", given("routing={critic: true}"), r"^.*routing\.critic=true: algorithm\.type=\w+ has no critic$"),
    # --- config.json
    Case("epsilon as NaN", "train", config_json({"rms_norm_eps": float("nan")}), says("rms_norm_eps", "nan", "finite|greater")),
    Case("no model_type", "pairs", config_json({}, "model_type"), says("model_type", "None", "'qwen3_moe'")),
    Case("10^30 hidden units", "train", config_json({"hidden_size": 10**30}), says("hidden_size", r"1\d+ is", "2147483647")),
    Case(
        "10^400 positions",
        "train",
        config_json({"max_position_embeddings": 10**400}),
        says("max_position_embeddings", r"1\d+ is", "2147483647"),
    ),
    Case("config.json of lists", "train", wrote("config.json", DEEP), r"^model\.path: .*config\.json is not JSON: nested too deeply$"),
    Case(
        "config.json of mappings",
        "train",
        wrote("config.json", b'{"a": ' * 50_000),
        r"^model\.path: .*config\.json is not JSON: nested too deeply$",
    ),
    Case(
        "config.json in Latin-1",
        "train",
        wrote("config.json", b'{"a": "\xe9"}'),
        r"^model\.path: .*config\.json is not JSON: 'utf-8' codec",
    ),
    Case(
        "config.json with a key twice",
        "train",
        wrote("config.json", b'{"a": 1, "a": 2}'),
        r"^model\.path: .*config\.json is not JSON: 'a' is there twice$",
    ),
    Case(
        "config.json with half a surrogate pair",
        "train",
        config_json({"note": "\ud800"}),
        r"^model\.path: .*config\.json is not JSON: .*surrogates not allowed$",
    ),
    Case("config.json is a pipe", "train", pipe("config.json"), r"^model\.path: .* has no config\.json$"),
    Case("weights are a pipe", "train", pipe("model.safetensors"), r"^model\.path: .* has neither model\.safetensors nor "),
    Case("a tokenizer of lists", "train", model(deep_tokenizer), r"^model\.path: no usable tokenizer in "),
    Case("a header of lists", "train", header(DEEP), r"^model\.path: .*its header is not a JSON object: nested too deeply$"),
    Case(
        "a header of mappings", "train", header(b'{"a": ' * 50_000), r"^model\.path: .*its header is not a JSON object: nested too deeply$"
    ),
    Case(
        "a header with a name twice",
        "train",
        header(b'{"a": 1, "a": 2}'),
        r"^model\.path: .*its header is not a JSON object: 'a' is there twice$",
    ),
    Case(
        "an index of lists",
        "train",
        wrote("model.safetensors.index.json", DEEP),
        r"^model\.path: .*index\.json is not JSON: nested too deeply$",
    ),
    Case(
        "an index of long names",
        "train",
        wrote("model.safetensors.index.json", json.dumps({"weight_map": {"a": LONG}}).encode()),
        r"index\.json names 'x{100}.*, which is not a file in the directory$",
    ),
    Case(
        "generation defaults of lists",
        "train",
        wrote("generation_config.json", DEEP),
        r"generation_config\.json is not JSON: nested too deeply$",
    ),
    Case("a tokenizer's settings of lists", "train", wrote("tokenizer_config.json", DEEP), r"^model\.path: no usable tokenizer in "),
    # --- chat templates
    Case(
        "a template that counts for some prompts",
        "train",
        template("{{ messages[0].content }}{% if 'f7' not in messages[0].content %}" + COUNTS + "{% endif %}"),
        r"^data\.train: item 0: the model's chat template refuses one of 64 prompts from here on: not done within",
    ),
]
