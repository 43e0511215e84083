"""`megarl plan`: the command, its examples, its laws, and what a check refuses with it."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from megarl.checks.memory import check_fits, warnings
from megarl.cli import main
from megarl.config import ConfigError, SftConfig, TrainConfig, load
from megarl.plan.devices import DEVICES, GB, device_of
from megarl.plan.host import contexts
from megarl.plan.ranks import CONTEXT
from megarl.plan.search import search
from megarl.plan.show import tables
from megarl.plan.times import StepTimes
from megarl.plan.whole import build, models_of
from tests.e2e.test_environments import REWRITES
from tests.published_models import QWEN3_5_35B_A3B, QWEN3_VL_30B_A3B
from tests.unit.examples.test_configurations import EXAMPLES
from tests.unit.plan.planning import GSPO, planned

# Example -> its model, and the GPUs that there are, where these are fewer than ranks and engines apart ask for.
PLANNED: dict[str, tuple[str, int | None]] = {
    "qwen3_30b_a3b/gspo.yaml": ("Qwen3-30B-A3B", None),
    "qwen3_30b_a3b/one_node.yaml": ("Qwen3-30B-A3B", 8),
    "qwen3_30b_a3b/one_node_80gb.yaml": ("Qwen3-30B-A3B", 8),
    "qwen3_235b_a22b/gspo.yaml": ("Qwen3-235B-A22B", None),
    "qwen3_5_35b_a3b/gspo.yaml": ("Qwen3.5-35B-A3B", None),
    "deepseek_v3/gspo.yaml": ("DeepSeek-V3", 128),
    "deepseek_v3/gspo_fp8.yaml": ("DeepSeek-V3", 128),
    "gpt_oss_120b/gspo.yaml": ("gpt-oss-120b", None),
    "kimi_k2/gspo.yaml": ("Kimi-K2-Instruct", 256),
    **{f"recipes/large/{path.name}": ("Qwen3-30B-A3B", None) for path in (EXAMPLES / "recipes" / "large").glob("*.yaml")},
}
del PLANNED["recipes/large/sft.yaml"]  # of another verb


@pytest.mark.parametrize("example", PLANNED)
def test_the_large_examples_fit(published: Path, example: str) -> None:
    model, gpus = PLANNED[example]
    config = load(EXAMPLES / example, [f"model.path={published / model}"], TrainConfig)
    plan = planned(config, gpus)
    assert config.cluster.gpu_memory_gb is not None and plan.faults == []
    assert plan.host is not None and plan.host.payload.warning is None
    assert plan.notes == [], "no example assumes what no run has"
    assert plan.engine is not None and plan.engine.tp <= 8


@pytest.mark.parametrize(
    ("example", "gpus", "override", "gb"),
    [
        ("recipes/large/vapo.yaml", 32, "placement.offload=false", 80),  # both models on the device at once
        ("qwen3_30b_a3b/one_node.yaml", 8, "placement.engines=apart", 80),  # on too few GPUs for that
    ],
)
def test_layouts_that_are_named_fit_and_are_what_their_overrides_make(
    published: Path, example: str, gpus: int, override: str, gb: float
) -> None:
    """What does not fit is told with both numbers, and each layout that is named instead is planned anew, from its overrides."""
    given = [f"model.path={published / 'Qwen3-30B-A3B'}", f"cluster.gpu_memory_gb={gb}", override]
    path = EXAMPLES / example
    config = load(path, given, TrainConfig)
    plan = planned(config, gpus)
    assert plan.faults[0].startswith("layout: rank 0 ") and "and a GPU has 80 GB; it would need " in plan.faults[0]
    found = search(config, models_of(config), DEVICES["H100"], gb, gpus, most=4)
    assert len({one.changes for one in found}) == len(found) == 4
    for one in found:
        anew = planned(load(path, [*given, *one.changes], TrainConfig), gpus)
        assert not anew.faults and anew.groups[0].layout == one.layout and anew.times is not None
        assert anew.times.step == pytest.approx(one.seconds) and max(group.worst.total for group in anew.groups) == one.bytes


def test_a_rank_and_an_engine_on_one_gpu_are_both_there_in_a_weight_update(published: Path) -> None:
    """The rank's weights alone, beside the engine's: gradients and optimizer have left. Apart they need two GPUs, and each less of it."""
    path = published / "Qwen3-30B-A3B"
    one = ["layout={}", "rollout.replicas=1", "rollout.tp=1", "sync.transport=cuda_ipc", f"model.path={path}"]
    turns, apart = (planned(load(GSPO, [*one, f"placement.engines={how}"], TrainConfig), memory_gb=625) for how in ("shared", "apart"))
    assert (turns.gpus, turns.shared, apart.gpus, apart.shared) == (1, True, 2, False)
    assert turns.beside == pytest.approx(2 * turns.parameters + CONTEXT, rel=0.01) and apart.beside == 0
    assert apart.faults == turns.faults == turns.notes == []
    tight = planned(load(GSPO, [*one, "placement.engines=shared"], TrainConfig), memory_gb=130)
    assert tight.engine is not None
    [fault] = [fault for fault in tight.faults if "in a weight update" in fault]
    parts = [tight.engine.weights, tight.engine.overhead, tight.beside, tight.receiver]
    assert re.findall(r"\d+\.\d", fault) == [f"{size / GB:.1f}" for size in (*parts, sum(parts))]
    assert fault.startswith("rollout.tp=1: in a weight update") and "gpu_memory_fraction" not in fault
    assert turns.host is not None and turns.host.waiting == pytest.approx(14 * turns.parameters, rel=0.01)


@pytest.mark.parametrize(("generate", "sync", "ahead"), [(10.0, 19.0, 11.0), (3.0, 12.0, 9.0)], ids=["engines slower", "ranks slower"])
def test_a_step_of_engines_that_are_ahead_takes_as_long_as_the_slower_side(generate: float, sync: float, ahead: float) -> None:
    times = StepTimes(generate, score=2.0, update=5.0, sync=1.0, park=1.0, ahead=False)
    assert (times.step, replace(times, ahead=True).step) == (sync, ahead)


def test_engines_are_ahead_where_the_mode_says_so_and_they_have_gpus_of_their_own(published: Path) -> None:
    given = [f"model.path={published / 'Qwen3-30B-A3B'}", "algorithm.correction={type: tis}"]
    modes = [[], ["rollout.mode=ahead"], ["rollout.mode=budget", "rollout.budget_tokens=1024"], ["rollout.mode=free", "rollout.max_lag=2"]]
    configs = [load(GSPO, [*given, *mode], TrainConfig) for mode in modes]
    sync, *others = [planned(config) for config in configs]
    assert sync.times is not None and not sync.times.ahead
    ahead, budget, free = (other.times for other in others)
    assert ahead == budget == replace(sync.times, ahead=True)
    assert free is not None and replace(free, generate=sync.times.generate) == ahead and free.generate < sync.times.generate, "no tail"
    payloads = [plan.host.payload for plan in (sync, *others) if plan.host is not None]
    assert [payload.batches for payload in payloads] == [1, 2, 3, 4] and len({payload.step for payload in payloads}) == 1
    store = payloads[0].step / payloads[0].nodes * 2.5
    assert [replace(payload, store=store).warning is not None for payload in payloads] == [False, False, True, True]
    titles = [[part.title for part in tables(plan, []) if isinstance(part, Table)] for plan in (sync, others[0])]
    assert [any("longer of generate and of score + update" in str(title) for title in each) for each in titles] == [False, True]
    few = [search(config, models_of(config), DEVICES["H100"], 80, 16) for config in configs[:2]]
    assert [{"placement.engines=shared" in one.changes for one in each} for each in few] == [{True}, {False}], "they cannot take turns"


def test_an_episode_of_a_template_that_rewrites_turns_reads_its_context_in_every_turn(
    published: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """A template that only appends reads it once; of one that is not there the most is planned."""
    tiny = {name: tmp_path / name for name in ("appends", "rewrites")}
    for path in tiny.values():
        shutil.copytree(tiny_model, path)
    (tiny["rewrites"] / "chat_template.jinja").write_text(REWRITES)
    game = ["environment={source: {type: textarena, id: x}, max_turns: 5}", "data.train={type: episodes, seed: 1, items: 64}"]
    models = {**tiny, "absent": published / "Qwen3-30B-A3B"}
    configs = {name: load(GSPO, [f"model.path={path}", "routing.replay=r3"], TrainConfig) for name, path in models.items()}
    assert [contexts(config) for config in configs.values()] == [1, 1, 1], "without an environment"
    played = {name: load(GSPO, [f"model.path={path}", "routing.replay=r3", *game], TrainConfig) for name, path in models.items()}
    assert {name: contexts(config) for name, config in played.items()} == {"appends": 1, "rewrites": 5, "absent": 5}
    hosts = [planned(config).host for config in (configs["absent"], played["absent"])]
    one, several = (host for host in hosts if host is not None)
    assert several.routes == 5 * one.routes > 0 and several.payload.step == pytest.approx(5 * one.payload.step)


def test_a_check_refuses_what_does_not_fit_where_it_knows_the_memory(published: Path) -> None:
    path = f"model.path={published / 'Qwen3-30B-A3B'}"
    check_fits(load(GSPO, [path], TrainConfig))
    check_fits(load(GSPO, [path, "cluster.gpu_memory_gb=null", "layout.ep=1"], TrainConfig))
    check_fits(load(GSPO, [path, "cluster.gpus=false", "layout.ep=1"], TrainConfig))
    with pytest.raises(ConfigError, match=r"^layout: rank 0 \(pipeline stage 0\) of policy needs \d+\.\d GB .* a GPU has 80 GB"):
        check_fits(load(GSPO, [path, "layout.ep=1"], TrainConfig))
    with pytest.raises(ConfigError, match=r"^rollout\.tp=1: weights 61\.1 GB .* one sequence of 10240 tokens takes"):
        check_fits(load(GSPO, [path, "rollout.tp=1", "rollout.gpu_memory_fraction=0.8"], TrainConfig))
    host = planned(load(GSPO, [path, "routing.replay=r3"], TrainConfig)).host
    assert host is not None
    needed = [path, "routing.replay=r3", f"cluster.host_memory_gb={host.total / GB + 1}"]
    check_fits(load(GSPO, needed, TrainConfig))
    with pytest.raises(
        ConfigError, match=r"^cluster\.host_memory_gb=[\d.]+: a node needs \d+ GB: .* the experts of a step's tokens \d+\.\d"
    ):
        check_fits(load(GSPO, [*needed, "rollout.samples_per_prompt=64"], TrainConfig))


def test_a_store_that_is_too_small_is_warned_of_with_the_size_that_holds(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts of all tokens exceed the default of 200 MB; `megarl plan` says so, and so does a check (tests/unit/test_cli.py)."""
    given = [f"model.path={published / 'Qwen3-30B-A3B'}", "routing.replay=r3", "cluster.object_store_mb=200"]
    [warning] = warnings(load(GSPO, given, TrainConfig))
    assert (
        match := re.fullmatch(r"cluster\.object_store_mb=200: .* take 4\.1 GB, more than 2 x 0\.2: .*; (\d+) holds them", warning)
    ) is not None
    enough, too_small = int(match[1]), int(match[1]) - 1
    for size, line in ((enough, None), (too_small, f"warning: cluster.object_store_mb={too_small}: ")):
        assert main(["plan", str(GSPO), *given, f"cluster.object_store_mb={size}"]) == 0
        said = capsys.readouterr().out
        assert line in said if line else "warning: " not in said


def test_the_command_prints_tables_and_json_without_megatron(published: Path) -> None:
    code = (
        "import sys; from megarl.cli import main; main(sys.argv[1:]); print('JSON'); main([*sys.argv[1:], '--json']);"
        "assert not {'megatron', 'ray', 'vllm'} & set(sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "plan", str(GSPO), f"model.path={published / 'Qwen3-30B-A3B'}"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    tables, plain = run.stdout.split("JSON\n")
    assert "worst" in tables and tables.rstrip().endswith("fits")
    told = json.loads(plain)
    [group] = told["groups"]
    assert told["faults"] == [] and told["layouts"] and f"{group['stages'][0]['total'] / GB:.1f}" in tables


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["layout.tp=3", "layout.ranks=24"], "layout.tp=3: model has 32 attention heads"),
        (["model.megatron.hidden_sise=1"], "model.megatron.hidden_sise: no such field"),
        (["rollout.tp=5"], "rollout.tp=5: does not divide"),
        (["--gpus", "0"], "plan: --gpus 0: must be above 0"),
        (["--gpu-gb", "nan"], "plan: --gpu-gb nan: must be above 0"),
        (["model.path=nowhere"], "model.path: no such directory: "),
        (["cluster.gpu_memory_gb=-1"], "cluster.gpu_memory_gb: Input should be greater than 0"),
    ],
)
def test_bad_input_is_refused_in_one_line(published: Path, capsys: pytest.CaptureFixture[str], more: list[str], line: str) -> None:
    assert main(["plan", str(GSPO), f"model.path={published / 'Qwen3-30B-A3B'}", *more]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"megarl: error: {line}")


@pytest.mark.parametrize(
    ("example", "kind", "model"),
    [
        ("qwen3_vl_30b_a3b/sft", SftConfig, QWEN3_VL_30B_A3B),
        ("qwen3_vl_30b_a3b/gspo", TrainConfig, QWEN3_VL_30B_A3B),
        ("qwen3_5_35b_a3b/gspo_images", TrainConfig, QWEN3_5_35B_A3B),
    ],
)
def test_the_examples_with_images_fit(tmp_path: Path, example: str, kind: Any, model: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = load(EXAMPLES / f"{example}.yaml", [f"model.path={tmp_path}"], kind)
    plan = build(config, models_of(config), device_of(80, config.cluster.gpus_per_node), 80, None)
    assert plan.faults == []
