"""Layouts for GPUs that are too few, or too small: what is named is what a check takes, and what would help is told with figures."""

import re
from pathlib import Path

import pytest

from megarl.checks.memory import check_fits
from megarl.cli import main
from megarl.cluster.process_kinds import demand
from megarl.config import ConfigError, DpoConfig, Layout, RunSettings, SftConfig, TrainConfig, load
from megarl.plan.devices import DEVICES, GB
from megarl.plan.facts import facts
from megarl.plan.forward import Pipeline, stage_seconds
from megarl.plan.parameters import model_elements
from megarl.plan.search import nearest, search, smallest_engine
from megarl.plan.whole import Plan, build, models_of
from tests.e2e.job import SFT
from tests.unit.examples.test_configurations import EXAMPLES, root_of

LARGE = EXAMPLES / "qwen3_30b_a3b"
H100 = DEVICES["H100"]
AWAY = "optimizer.megatron.optimizer_cpu_offload=true optimizer.megatron.optimizer_offload_fraction=1.0"


def planned(config: RunSettings, memory_gb: float = 80) -> Plan:
    return build(config, models_of(config), H100, memory_gb)


@pytest.fixture
def path(published: Path) -> str:
    return f"model.path={published / 'Qwen3-30B-A3B'}"


@pytest.mark.parametrize(("gpus", "memory_gb", "offloaded"), [(16, 80, False), (8, 80, False), (8, 64, True)])
def test_layouts_for_too_few_gpus_are_ones_that_a_check_takes(path: str, gpus: int, memory_gb: int, offloaded: bool) -> None:
    """The 32 GPUs of the example are not there: engines and ranks take turns, and of 8 small ones Adam is in host memory."""
    given = [path, f"cluster.gpu_memory_gb={memory_gb}"]
    config = load(LARGE / "gspo.yaml", given, TrainConfig)
    found = search(config, models_of(config), H100, memory_gb, gpus)
    assert 4 < len({one.layout for one in found}) == len(found) <= 8
    for one in found:
        anew = load(LARGE / "gspo.yaml", [*given, *one.changes], TrainConfig)
        check_fits(anew)
        assert (anew.placement.engines, anew.sync.transport) == ("shared", "cuda_ipc")
        assert sum(kind.processes for kind in demand(anew)) == gpus == anew.rollout.replicas * anew.rollout.devices
        assert anew.optimizers["optimizer"].offloaded == offloaded


def test_where_nothing_fits_the_nearest_layout_says_what_it_needs(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(LARGE / "gspo.yaml", [path], TrainConfig)
    assert search(config, models_of(config), H100, 80, 2) == []
    said = nearest(config, models_of(config), H100, 80, 2)
    assert said is not None and (match := re.fullmatch(r"(.*) needs (\d+\.\d) GB of a GPU", said)) is not None
    overrides, needs = match[1].split(), float(match[2])
    closest = load(LARGE / "gspo.yaml", [path, *overrides], TrainConfig)
    assert planned(closest, needs - 0.1).faults and not planned(closest, needs + 0.1).faults
    assert main(["plan", str(LARGE / "gspo.yaml"), path, "--gpus", "2"]) == 1
    assert said in capsys.readouterr().out


def test_a_rank_that_does_not_fit_is_told_what_would_make_it_smaller(path: str) -> None:
    given = [path, "model.recompute=none", "layout.ranks=8"]
    fault, *_ = planned(load(LARGE / "gspo.yaml", given, TrainConfig)).faults
    figures = dict(re.findall(r"(\d+\.\d) GB with (.+?)(?=, \d|$)", fault))
    remedies = {how: float(size) for size, how in figures.items()}
    assert list(remedies) == ["model.recompute=full", AWAY, "all of it"]
    assert remedies["all of it"] < min(remedies["model.recompute=full"], remedies[AWAY])
    for how, size in remedies.items():
        changes = ["model.recompute=full", *AWAY.split()] if how == "all of it" else how.split()
        [group] = planned(load(LARGE / "gspo.yaml", [*given, *changes], TrainConfig)).groups
        assert f"{group.worst.total / GB:.1f}" == f"{size:.1f}"
    with pytest.raises(ConfigError, match=re.escape(f"GB with {AWAY}")):
        check_fits(load(LARGE / "gspo.yaml", given, TrainConfig))


@pytest.mark.parametrize("example", ["dpo.yaml", "rm.yaml", "../recipes/large/sft.yaml"])
def test_supervised_stages_of_30_b_fit_and_have_layouts(path: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = root_of(LARGE / example)
    assert planned(load(LARGE / example, [path], root)).faults == []
    given = [path, "layout={}"]
    config = load(LARGE / example, given, root)
    assert planned(config).faults[0].startswith("layout: rank 0 ")
    found = search(config, models_of(config), H100, 80, 16)
    assert len(found) == 8
    for one in found:
        anew = load(LARGE / example, [*given, *one.changes], root)
        plan = planned(anew)
        check_fits(anew)
        assert plan.gpus == anew.layout.ranks == 16 and plan.times is not None and plan.times.step == pytest.approx(one.seconds)
    verb = root.section  # type: ignore[attr-defined]
    assert main(["plan", str(LARGE / example), path, "--verb", verb, "--gpus", "16"]) == 0
    said = capsys.readouterr().out
    assert "layouts that fit" in said and "engines" not in said and said.rstrip().endswith("fits")


def test_a_reference_is_counted_where_the_loss_has_one(path: str) -> None:
    with_, without = (load(LARGE / "dpo.yaml", [path, f"algorithm={{type: {name}}}"], DpoConfig) for name in ("dpo", "simpo"))
    both, alone = (planned(config) for config in (with_, without))
    weights = alone.groups[0].worst.parts["weights"]
    assert both.groups[0].worst.parts["weights"] == pytest.approx(2 * weights, rel=0.01)
    assert both.times is not None and alone.times is not None and both.times.score > 0 == alone.times.score


@pytest.mark.parametrize(
    ("name", "memory", "gpus"),
    [
        ("Qwen2.5-0.5B", (), 1),
        ("Qwen3-30B-A3B", (), 2),  # 61 GB, and an engine takes 60 % of the 80 GB that are assumed
        ("Qwen3-30B-A3B", ("cluster.gpu_memory_gb=40",), 4),
        ("Llama-3-70B", ("cluster.gpu_memory_gb=141",), 2),
        ("Qwen3-235B-A22B", (), None),
    ],
)
def test_the_fewest_gpus_of_an_engine_with_a_stages_model(
    name: str, memory: tuple[str, ...], gpus: int | None, published: Path, tmp_path: Path
) -> None:
    (tmp_path / "sft.yaml").write_text(SFT.format(runs=tmp_path, model=published / name))
    asked = ("cluster.gpus=true", "model.dtype=bfloat16")
    assert smallest_engine(load(tmp_path / "sft.yaml", [*asked, *memory], SftConfig)) == gpus
    assert smallest_engine(load(tmp_path / "sft.yaml", [], SftConfig)) == 1, "on a CPU it is one process"


@pytest.mark.parametrize(
    ("name", "gpus", "memory_gb", "expected"),
    [
        ("Qwen3-30B-A3B", 8, 80, {"pp": 1, "ep": 8}),  # as slime, verl and NeMo-RL have it
        ("Qwen3-30B-A3B", 32, 80, {"pp": 1, "ep": 8}),
        ("Qwen3-235B-A22B", 128, 80, {"pp": 8, "ep": 8}),
    ],
)
def test_the_first_layout_is_one_that_others_publish(
    published: Path, name: str, gpus: int, memory_gb: float, expected: dict[str, int]
) -> None:
    config = load(LARGE / "gspo.yaml", [f"model.path={published / name}", "layout={}", "model.megatron={}"], TrainConfig)
    first, *_ = search(config, models_of(config), H100, memory_gb, gpus)
    assert {size: getattr(first.layout, size) for size in expected} == expected and first.layout.cp == 1


def test_the_stage_with_the_output_layer_sets_the_pace(published: Path) -> None:
    """152 thousand columns have the FLOPs of five layers of Qwen3-30B-A3B: a stage of three and these takes more than twice as long."""
    model = models_of(load(LARGE / "gspo.yaml", [f"model.path={published / 'Qwen3-30B-A3B'}"], TrainConfig))["model"]
    layout, given = Layout(ranks=16, pp=16), (facts(model), model_elements(model))
    equal = stage_seconds(*given, layout, {}, H100, 16384, 4096, training=False)
    assert len(set(equal[:-1])) == 1 and 2 < equal[-1] / equal[0] < 3
    ends = {"num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 1}
    uneven = stage_seconds(*given, layout, ends, H100, 16384, 4096, training=False)
    assert sum(uneven) == pytest.approx(sum(equal)) and uneven[-1] < equal[-1]
    assert Pipeline(uneven, 8, 1).seconds < Pipeline(equal, 8, 1).seconds
    assert Pipeline([1.0, 2.0, 1.0], 4, 1).seconds == 10.0, "four times the slowest, and the others once"
    assert Pipeline([1.0, 1.0], 4, 2).seconds == 4.5, "an interleaved pipeline fills in half the time"
