"""What a resumed run may change in its configuration, and what it may not."""

from collections.abc import Callable
from fnmatch import filter as filter_names
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoints.may_differ import MAY_DIFFER, MAY_NOT, compare, completed
from megarl.cli.describe import keys
from megarl.config import HttpReward, TeacherServer, TrainConfig, dump, load, yaml_text
from megarl.engines.vllm.arguments import argument_fields
from megarl.models.megatron_fields import megatron_fields
from megarl.models.optimizer_fields import optimizer_fields

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart" / "rl.yaml"


def tree(*overrides: str) -> dict[str, Any]:
    """The resolved configuration of a training run."""
    return load(EXAMPLE, list(overrides), TrainConfig).model_dump(mode="json")


def test_an_unchanged_configuration_may_be_resumed() -> None:
    """From the configuration as its checkpoint has it."""
    config = load(EXAMPLE, [], TrainConfig)
    assert compare(yaml_text.read(dump(config)), config.model_dump(mode="json")) == []


def test_a_checkpoint_of_an_earlier_version_lacks_keys_and_may_be_resumed() -> None:
    saved = tree()
    for key in ("dp", "quantization"):
        del saved["rollout"][key]
    assert compare(completed(saved, TrainConfig), tree()) == []
    [changed] = compare(completed(saved, TrainConfig), tree("rollout.quantization=fp8"))
    assert changed.startswith("rollout.quantization: None in the checkpoint and 'fp8' now")
    saved["rollout"]["gone"] = 1
    assert any("rollout.gone: 1 in the checkpoint" in line for line in compare(completed(saved, TrainConfig), tree()))


def test_relative_paths_are_those_of_where_the_command_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, here = load(EXAMPLE, ["model.path=models/m", "run_dir=runs"], TrainConfig), Path.cwd()
    assert (config.model.path, config.run_dir, config.model.weights) == (here / "models/m", here / "runs", None)
    assert config.directory == here / "runs" / config.name
    monkeypatch.chdir(tmp_path)
    assert load(EXAMPLE, ["model.path=models/m"], TrainConfig).model.path == tmp_path / "models/m"


@pytest.mark.parametrize(
    "override",
    [
        "layout={ranks: 4, tp: 2, ep: 2}",
        "train.steps=77",
        "train.eval_every=3",
        "train.micro_batch_tokens=99999",
        "log.tensorboard=false",
        "cluster.phase_timeout_s=11",
        "name=elsewhere",
        "rollout.replicas=3",
        "rollout.dp=2",
        "rollout.request_routing=affinity",
        "rollout.expert_parallel=true",
        "model.recompute=full",
        "sync.bucket_mb=7",
        "data.eval.seed=12345",
        "model.megatron={num_layers_in_first_pipeline_stage: 1, num_layers_in_last_pipeline_stage: 3, recompute_num_layers: 2}",
        "optimizer.megatron={optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5, overlap_cpu_optimizer_d2h_h2d: true}",
        "optimizer.ddp={overlap_grad_reduce: true, bucket_size: 1000}",
        "rollout.engine.args={enforce_eager: true}",
        "reward.sandbox={memory_gb: 2, readable: [/data]}",
        "routing={sample: 0.5, alarm: 0.5}",
    ],
)
def test_layout_place_and_length_of_a_run_may_differ(override: str) -> None:
    assert tree(override) != tree()
    assert compare(tree(), tree(override)) == []


@pytest.mark.parametrize(
    ("override", "key", "now"),
    [
        ("seed=99", "seed", 99),
        ("optimizer.lr=0.5", "optimizer.lr", 0.5),
        ("train.prompts_per_step=1024", "train.prompts_per_step", 1024),
        ("rollout.temperature=0.25", "rollout.temperature", 0.25),
        ("rollout.quantization=fp8", "rollout.quantization", "fp8"),
        ("data.train.seed=12345", "data.train.seed", 12345),
        ("model.dtype=bfloat16", "model.dtype", "bfloat16"),
        ("reward.require_finished=false", "reward.require_finished", False),
        ("data.chat=false", "data.chat", False),
        ("optimizer.megatron={apply_wd_to_qk_layernorm: true}", "optimizer.megatron.apply_wd_to_qk_layernorm", True),
        ("model.megatron={moe_aux_loss_coeff: 0.1}", "model.megatron.moe_aux_loss_coeff", 0.1),
        ("rollout.engine.args={kv_cache_dtype: fp8}", "rollout.engine.args.kv_cache_dtype", "fp8"),
        ("routing={replay: r2}", "routing.replay", "r2"),
    ],
)
def test_settings_that_change_the_result_are_refused_with_both_values(override: str, key: str, now: object) -> None:
    before: Any = tree()
    for part in key.split("."):
        before = before.get(part, "(absent)")
    assert before != now
    assert compare(tree(), tree(override)) == [f"{key}: {before!r} in the checkpoint and {now!r} now: a resumed run cannot change it"]


def test_parts_of_a_sum_may_differ_in_the_same_keys_as_a_single_reward() -> None:
    def summed(parts: str) -> dict[str, Any]:
        return tree(f"reward.source={{type: sum, parts: [{{name: right, source: {{type: math_verify}}}}, {parts}]}}")

    before, moved = (summed(f"{{name: far, source: {{type: http, {place}}}}}") for place in ("url: 'http://a'", "url_file: b, attempts: 9"))
    assert before != moved and compare(before, moved) == []
    [line] = compare(before, summed("{name: far, source: {type: http, url: 'http://a'}, weight: 2}"))
    assert line.startswith("reward.source.parts.1.weight: 1.0 in the checkpoint and 2.0 now")
    [line] = compare(before, tree("reward.source={type: sum, parts: [{name: right, source: {type: math_verify}}]}"))
    assert line.startswith("reward.source.parts: [{'name': 'right'")


def test_a_teachers_server_may_move_and_another_model_is_refused() -> None:
    def taught(one: str) -> dict[str, Any]:
        return tree("algorithm={type: reinforce}", f"distillation={{servers: {{a: {{{one}}}}}}}")

    before = taught("url: 'http://a', model: m")
    assert compare(before, taught("url: 'http://b', model: m, attempts: 9")) == []
    [line] = compare(before, taught("url: 'http://a', model: n"))
    assert line.startswith("distillation.servers.a.model: 'm' in the checkpoint and 'n' now")


def test_another_algorithm_is_refused_in_one_line() -> None:
    [line] = compare(tree(), tree("algorithm={type: reinforce}"))
    assert line.startswith("algorithm.type: ") and "'reinforce' now" in line


def test_a_key_that_one_side_lacks_is_refused() -> None:
    saved = tree()
    del saved["seed"]
    assert compare(saved, tree()) == ["seed: '(absent)' in the checkpoint and 1 now: a resumed run cannot change it"]
    assert compare(tree(), saved) == ["seed: 1 in the checkpoint and '(absent)' now: a resumed run cannot change it"]


def test_every_key_that_may_differ_is_one_of_the_configuration() -> None:
    """A renamed key would silently be refused."""
    known = {key.name for key, _ in keys(TrainConfig)}
    upstream: dict[str, Callable[[], dict[str, Any]]] = {
        "model.megatron": megatron_fields,
        "optimizer.megatron": optimizer_fields,
        "rollout.engine.args": argument_fields,
    }
    known |= {f"{mapping}.{name}" for mapping, fields in upstream.items() for name in fields()}
    known |= {f"reward.source.parts.0.source.{key}" for key in HttpReward.model_fields}
    known |= {f"distillation.servers.math.{key}" for key in TeacherServer.model_fields}
    assert [pattern for pattern in (*MAY_DIFFER, *MAY_NOT) if not filter_names(known, pattern)] == []
