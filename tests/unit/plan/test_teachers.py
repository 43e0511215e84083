"""Teachers in a plan: on ranks, on engines of their own, or on servers."""

import shutil
from pathlib import Path

import pytest

from megarl.config import TrainConfig, load
from megarl.plan.devices import GB
from megarl.plan.whole import Plan
from tests.unit.examples.test_configurations import EXAMPLES
from tests.unit.plan.planning import planned


def test_a_teacher_takes_ranks_and_time(published: Path) -> None:
    """On ranks of its own it scores beside the policy, on the policy's ranks after it."""
    given = [f"model.path={published / 'Qwen3-8B'}", f"distillation.teacher={published / 'Qwen3-30B-A3B'}"]

    def plan(*changes: str) -> Plan:
        config = load(EXAMPLES / "qwen3_30b_a3b" / "distill_8b.yaml", [*given, *changes], TrainConfig)
        return planned(config, 16, memory_gb=141)

    apart, shared, alone = (
        plan(),
        plan("placement.teacher=null", "layout={ranks: 8, tp: 2}"),
        plan("layout={ranks: 8, tp: 2}", "distillation=null", "placement={}"),
    )
    assert max(group.worst.total for group in apart.groups) < 80 * GB
    assert [group.name for group in apart.groups] == ["policy", "teacher"] and apart.faults == [] and apart.gpus == 16
    assert [group.name for group in shared.groups] == ["policy+teacher"]
    assert apart.times is not None and shared.times is not None and alone.times is not None
    assert shared.times.score > 1.5 * alone.times.score and shared.times.update == alone.times.update


def test_several_teachers_share_ranks_and_tokens(published: Path, tmp_path: Path) -> None:
    """Each takes its memory; a model of two sources is there once, and every token is scored once."""
    large, other, small = published / "Qwen3-30B-A3B", tmp_path / "other", published / "Qwen3-8B"
    shutil.copytree(large, other)

    def plan(teachers: str) -> Plan:
        given = [f"model.path={small}", "distillation.teacher=null", f"distillation.teachers={teachers}"]
        return planned(load(EXAMPLES / "qwen3_30b_a3b" / "distill_8b.yaml", given, TrainConfig), 16, memory_gb=141)

    one, twice, two = plan(f"{{a: {large}}}"), plan(f"{{a: {large}, b: {large}}}"), plan(f"{{a: {large}, b: {other}}}")
    assert [one.groups[1].name, two.groups[1].name] == ["teachers.a", "teachers.a+teachers.b"]
    assert one.groups[1].worst.total == twice.groups[1].worst.total < two.groups[1].worst.total
    assert one.times is not None and two.times is not None and two.times.score == pytest.approx(one.times.score)


def test_a_teachers_engines_take_gpus_memory_and_time(published: Path) -> None:
    """They score beside the policy; each of several teachers has as many; a server takes no GPU."""
    given = [f"model.path={published / 'Qwen3-8B'}", f"distillation.teacher={published / 'Qwen3-30B-A3B'}", "placement.teacher=null"]

    def plan(*changes: str, memory: int = 80) -> Plan:
        config = load(EXAMPLES / "qwen3_30b_a3b" / "distill_8b.yaml", [*given, "layout={ranks: 4, tp: 2}", *changes], TrainConfig)
        return planned(config, 16, memory_gb=memory)

    two = plan("placement.teacher_engines={replicas: 2, tp: 2}")
    assert [group.name for group in two.groups] == ["policy"] and two.faults == [] and two.teaching == 4
    assert list(two.teachers) == ["teacher"] and 30 * GB < two.teachers["teacher"].weights < 31 * GB
    four = plan("placement.teacher_engines={replicas: 4, tp: 2}")
    assert four.faults == ["layout: ranks and engines need 20 GPUs, but there are 16"]
    small = plan("placement.teacher_engines={tp: 1}", memory=60)
    assert small.faults[-1].startswith("distillation.teacher: on placement.teacher_engines.tp=1, weights 61.1 GB and buffers ")
    served = plan("distillation={server: {url: 'http://h/v1', model: m}}")
    assert (served.teaching, served.teachers) == (0, {}) and served.notes == [
        "distillation.server: a server scores beside the policy, in no more time"
    ]
    assert two.times is not None and four.times is not None and served.times is not None
    assert two.times.score >= four.times.score >= served.times.score
