"""Nodes whose links hang are named. The test of the links itself is a table of those that do."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster import reach
from megarl.cluster.actor_group import WorkerLate
from megarl.cluster.membership import TooFewNodes
from megarl.cluster.server import ProcessStalled
from megarl.parallel.links import LinkTimes, edges

HANGS = "measure: no answer within 120 s from pre-flight 0, pre-flight 1"


class Links:
    """Times of nodes that reach each other; those that are to hang do: links, or one of a node's two GPUs, of which pairs use the other."""

    def __init__(self, *hang: str) -> None:
        self.hang, self.tests = [set(link) for link in hang], list[str]()

    def __call__(self, nodes: Sequence[str], per_node: int, gpus: bool, timeout_s: float) -> Any:
        self.tests.append("".join(nodes))
        links = [{nodes[a], nodes[b]} for pairs in edges(len(nodes)) for a, b in pairs]
        if any(link in self.hang for link in links) or (per_node > 1 and any({name} in self.hang for name in nodes)):
            raise WorkerLate(HANGS)
        return list(nodes)


def outcome(monkeypatch: pytest.MonkeyPatch, names: str, needed: int, *hang: str) -> Any:
    links = Links(*hang)
    monkeypatch.setattr(reach, "_measured", links)
    return reach.reach(list(names), {name: name for name in names}, needed, 2, False, 300.0), links.tests


def test_working_links_are_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(monkeypatch, "abcd", 4) == ((list("abcd"), {}), ["abcd"])


def test_a_node_whose_links_hang_is_left_out_if_others_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    (times, alone), tests = outcome(monkeypatch, "abcde", 4, "bc", "cd")
    assert times == list("abde") and alone == {"c": "does not reach b, d"}
    assert tests[0] == "abcde" and sorted(tests[1:6]) == list("abcde") and tests[-1] == "abde"
    assert sorted(tests[6:-1]) == ["ab", "bc", "cd", "de", "ea"]


def test_a_node_with_one_sick_gpu_is_left_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (times, alone), tests = outcome(monkeypatch, "abcde", 4, "c")
    assert times == list("abde") and alone == {"c": f"fails alone: WorkerLate: {HANGS}"} and len(tests) == 1 + 5 + 1
    with pytest.raises(TooFewNodes) as refused:
        outcome(monkeypatch, "ab", 2, "b")
    assert refused.value.bad.keys() == {"b"}
    with pytest.raises(WorkerLate, match=HANGS):  # what every node fails with is no node's fault
        outcome(monkeypatch, "ab", 1, "a", "b")


@pytest.mark.parametrize(
    ("hang", "bad"),
    [
        (("bc", "bd"), {"b": "does not reach c, d"}),
        (("bc", "ac"), {"c": "does not reach a, b"}),
        (("bc",), {"c": "does not reach b"}),  # the link alone: either will do
        (("ae",), {"e": "does not reach a"}),  # the head stays
    ],
)
def test_of_two_nodes_that_do_not_connect_the_less_connected_is_left_out(
    monkeypatch: pytest.MonkeyPatch, hang: tuple[str, ...], bad: dict[str, str]
) -> None:
    (times, alone), tests = outcome(monkeypatch, "abcde", 4, *hang)
    assert alone == bad and times == [name for name in "abcde" if name not in bad]
    assert len(tests) == 1 + 5 + 5 + 2 + 1


def test_unreachable_nodes_that_are_left_out_do_not_count_against_others(monkeypatch: pytest.MonkeyPatch) -> None:
    (times, alone), _ = outcome(monkeypatch, "abcd", 2, "bc", "ac", "da")
    assert alone == {"c": "does not reach a, b", "d": "does not reach a"} and times == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "needed", "hang", "bad"),
    [
        ("abcd", 4, ("bc", "cd"), {"c": "does not reach b, d"}),
        ("abcd", 2, ("ab", "da"), {"a": "does not reach b, d"}),  # the head
        ("abcd", 4, ("bc",), {"c": "does not reach b"}),
        ("abcd", 2, ("ab", "ac"), {"a": "does not reach b, c"}),
        ("ab", 1, ("ab",), {"a": "does not reach b", "b": "does not reach a"}),  # nobody can tell
    ],
)
def test_nodes_that_are_needed_and_do_not_reach_each_other_are_named(
    monkeypatch: pytest.MonkeyPatch, names: str, needed: int, hang: tuple[str, ...], bad: dict[str, str]
) -> None:
    with pytest.raises(TooFewNodes) as refused:
        outcome(monkeypatch, names, needed, *hang)
    assert refused.value.bad == bad and f"not all nodes reach each other (WorkerLate: {HANGS}): " in str(refused.value)


def test_a_link_failure_of_all_nodes_but_no_pair_is_reported_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(nodes: Sequence[str], per_node: int, gpus: bool, timeout_s: float) -> Any:
        if len(nodes) > 2:
            raise WorkerLate(HANGS)
        return []

    monkeypatch.setattr(reach, "_measured", measured)
    with pytest.raises(WorkerLate, match=HANGS):
        reach.reach(list("abc"), {name: name for name in "abc"}, 2, 1, False, 300.0)


@pytest.mark.parametrize("answered", [0, 1, 2, 3])  # tests: of both nodes together, of each alone, of the two as neighbours
def test_a_lost_session_is_reported_as_such_and_blames_no_node(monkeypatch: pytest.MonkeyPatch, answered: int) -> None:
    tests = list[str]()

    def measured(nodes: Sequence[str], per_node: int, gpus: bool, timeout_s: float) -> Any:
        tests.append("".join(nodes))
        if len(tests) > answered:
            raise ProcessStalled("ending processes: Ray's server has not answered for 13 s", session=True)
        raise WorkerLate(HANGS)

    monkeypatch.setattr(reach, "_measured", measured)
    with pytest.raises(ProcessStalled, match="has not answered for 13 s"):
        reach.reach(list("ab"), {name: name for name in "ab"}, 2, 1, False, 300.0)


def test_tcp_speed_despite_infiniband_is_reported(tmp_path: Path) -> None:
    def told(seconds: float, nodes: int, fabric: Path) -> str | None:
        times = [LinkTimes(256, 1.0, 1.0, seconds if nodes > 1 else 0.0)] * (8 * nodes)
        return reach.without_fabric([*times[1:], replace(times[0], best_edge=2 * seconds)], nodes, fabric)

    assert told(0.2, 4, tmp_path) is None and told(0.2, 4, tmp_path / "missing") is None, "there is none"
    (tmp_path / "mlx5_0").mkdir()
    assert told(0.2, 1, tmp_path) is None and told(0.1, 4, tmp_path) is None, "8 x 256 MB in 0.1 s are 20.5 GB/s"
    assert str(told(0.2, 4, tmp_path)).startswith("no node sends more than 10.2 GB/s to the next one")
