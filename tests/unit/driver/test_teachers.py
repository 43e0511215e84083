"""The driver deals a step's samples to the processes of their teachers."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from megarl.cluster.actor_group import ActorGroup, WorkerDied
from megarl.driver.teachers import Teachers
from megarl.engines.engine import EngineDead

# Responses 0 to 4 of 1, 2, 1, 1 and 1 contexts; the samples of response 1 are in two micro-batches.
ENTRIES = [[9], [30, 4], [5], [7], [6]]
SAMPLES = [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0)]
SPLIT = [[[[0, 1]], [[2, 3]]], [[[4], []], [[5], []]]]


class Process(SimpleNamespace):
    """A teacher's actor that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(asked=[], score=SimpleNamespace(remote=lambda *given: self.asked.append(given)))


def dealt(scorers: int, replicas: int, teacher_N: np.ndarray | None) -> list[dict[tuple[int, int], str]]:
    """What each process is asked to score: (response, context) by sample and micro-batch."""
    teachers = cast(Any, object.__new__(Teachers))
    teachers.group = ActorGroup("teacher", [Process() for _ in range(scorers * replicas)])
    teachers._teaching = SimpleNamespace(scorers=dict.fromkeys(map(str, range(scorers))))
    plan = SimpleNamespace(split=SPLIT, sample_S=SAMPLES, teacher_N=teacher_N, payload_N=[*"abcde"])
    groups = [SimpleNamespace(responses=[SimpleNamespace(entries=entries) for entries in ENTRIES])]
    teachers.start(plan, groups)
    found = []
    for process in teachers.group.actors:
        assert len(process.asked) <= 1
        own = dict[tuple[int, int], str]()
        for units, payloads in process.asked:
            micro_batches = [micro_batch for part in SPLIT for shard in part for micro_batch in shard]
            assert len(set(payloads)) == len(payloads)
            for unit in units:
                assert any({sample for sample, _, _ in unit} <= set(one) for one in micro_batches), "one rank needs all of a unit"
                for sample, number, context in unit:
                    assert (sample, context) not in own and SAMPLES[sample] == ("abcde".index(payloads[number]), context)
                    own[sample, context] = payloads[number]
        found.append(own)
    return found


@pytest.mark.parametrize(("scorers", "replicas"), [(1, 1), (1, 2), (1, 9), (2, 1), (2, 2)])
def test_each_sample_is_scored_once_by_its_teacher(scorers: int, replicas: int) -> None:
    teacher_N = None if scorers == 1 else np.array([1, 0, 0, 1, 0])
    found = dealt(scorers, replicas, teacher_N)
    samples = [sample for own in found for sample, _ in own]
    assert sorted(samples) == [*range(6)]
    for process, own in enumerate(found):
        for sample, _ in own:
            assert teacher_N is None or teacher_N[SAMPLES[sample][0]] == process // replicas
    if (scorers, replicas) == (1, 2):
        assert {sum(ENTRIES[SAMPLES[s][0]][SAMPLES[s][1]] for s, _ in own) for own in found} == {30, 31}


def test_an_engine_that_is_gone_is_started_again_as_ranks_are() -> None:
    teachers = cast(Any, object.__new__(Teachers))
    teachers._config = SimpleNamespace(cluster=SimpleNamespace(phase_timeout_s=1.0))

    def gone(*_: Any) -> None:
        raise EngineDead("teacher 0: its process has ended")

    teachers.group = SimpleNamespace(wait=gone)
    with pytest.raises(WorkerDied, match="^teachers: teacher 0: its process has ended$"):
        teachers.wait([])
