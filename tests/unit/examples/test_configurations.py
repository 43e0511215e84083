"""Every example configuration is valid; the one for 32 GPUs passes every check that needs no GPU."""

import json
import re
import struct
from pathlib import Path

import pytest
import yaml

from megarl.checks.train import check_train
from megarl.config import DpoConfig, EvalConfig, PairsConfig, RmConfig, RunSettings, ServeConfig, SftConfig, TrainConfig, load
from megarl.host.unchecked import naming_unchecked
from megarl.models.families import family_of
from tests.published_models import MODELS, config_of

EXAMPLES = Path(__file__).parents[3] / "examples"
QWEN3_30B_A3B = {**config_of(MODELS["Qwen3-30B-A3B"]), "torch_dtype": "bfloat16"}


def keys_of(path: Path) -> set[str]:
    """The sections of a configuration, with those of the files that it lies over."""
    tree = yaml.safe_load(path.read_text())
    return set(tree) | (keys_of(path.parent / tree["base"]) if "base" in tree else set())


def root_of(path: Path) -> type[RunSettings]:
    keys = keys_of(path)
    for kind in (SftConfig, RmConfig, DpoConfig):
        if kind.section in keys:
            return kind
    if "pairs" in keys:
        return PairsConfig
    if "serve" in keys:
        return ServeConfig
    return TrainConfig if "train" in keys else EvalConfig


NO_RUNS = ("variants.yaml", "expected.yaml")  # in test_ablation and test_run_examples
CONFIGS = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.name not in NO_RUNS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_example_is_valid(path: Path) -> None:
    assert load(path, [], root_of(path)).name


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if "models/" in path.read_text()], ids=lambda path: str(path.relative_to(EXAMPLES))
)
def test_the_head_of_an_example_says_where_its_model_is_fetched(path: Path) -> None:
    [model] = {value for line in path.read_text().splitlines() for value in re.findall(r"^(?!#).*path: (models/[\w.-]+)", line)}
    assert re.search(rf"^#   hf download [\w-]+/{model.removeprefix('models/')} .*--local-dir {model}\b", path.read_text(), re.MULTILINE)


def test_the_data_of_gspo_are_fetched_to_where_they_are_read() -> None:
    path = EXAMPLES / "qwen3_30b_a3b" / "gspo.yaml"
    fetched = re.findall(r"^#   hf download \S+ (data/\S+) --repo-type dataset --local-dir \.$", path.read_text(), re.MULTILINE)
    assert fetched == [part["path"] for part in yaml.safe_load(path.read_text())["data"].values()]


def write_headers(directory: Path, config: dict[str, object]) -> None:
    """A checkpoint of the real shapes whose 60 GB of weights are holes in a sparse file: every check reads headers alone."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in family_of(config).expected(config).items():
        size = 2
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (directory / "config.json").write_text(json.dumps(config))


# As Qwen3's tells of tools, and has their answers.
TEMPLATE = (
    "{%- if tools %}<|system|># Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Return <tool_call>\n{...}\n</tool_call><|end|>{% endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response><|end|>"
    "{%- else %}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)


@pytest.mark.parametrize("name", ["gspo", "agent", "software", "long"])
def test_qwen3_30b_a3b_passes_every_check(
    name: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a login node, which need have no podman."""
    monkeypatch.setenv("PATH", "/nowhere")
    model = tmp_path / "model"
    model.mkdir()
    config_json: dict[str, object] = {**QWEN3_30B_A3B}
    if name == "long":  # as its head says
        [line] = re.findall(r"\| (\{.*\})\)\)' MODEL/config\.json$", (EXAMPLES / "qwen3_30b_a3b" / "long.yaml").read_text(), re.MULTILINE)
        config_json |= json.loads(line)
    write_headers(model, config_json)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).write_bytes((tiny_model / file).read_bytes())
    (model / "chat_template.jinja").write_text(TEMPLATE)
    prompts = tmp_path / "prompts.jsonl"
    task = {"instance_id": "a__b-1", "test_patch": "", "FAIL_TO_PASS": ["t.py::t"], "PASS_TO_PASS": []}
    rows = [{"reward_model": {"ground_truth": str(n + 1)}, **task, "prompt": f"1+{n}=", "problem_statement": f"1+{n}="} for n in range(128)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"model.path={model}", f"data.train.path={prompts}", f"data.eval.path={prompts}"]
    config = load(EXAMPLES / "qwen3_30b_a3b" / f"{name}.yaml", overrides, TrainConfig)
    assert config.layout.ranks + config.rollout.replicas * config.rollout.tp == (48 if name == "long" else 32)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    assert longest <= config.train.micro_batch_tokens
    assert (longest == 131_072) is (name == "long")
    with naming_unchecked():
        assert len(check_train(config).train) == 128
    missing = "podman: no such program on this machine"
    assert (f"the environment's processes: environment.source.containers: {missing}" in capsys.readouterr().err) == (name == "software")
    assert sum(path.stat().st_size for path in model.glob("*.safetensors")) > 60e9
