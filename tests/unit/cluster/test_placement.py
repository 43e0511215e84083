"""Where ranks and engines go: blocks inside nodes, whole nodes as far as they go, a refusal with both numbers where there is no room."""

from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest

from megarl.cluster.placement import Node, NoRoom, ProcessKind, place
from megarl.cluster.process_kinds import engine_kind, rank_kind
from megarl.config import Layout, RolloutSettings

Shape = tuple[list[dict[str, int]], tuple[int, int], list[int]]
SHAPES: dict[str, Shape] = {
    # name: (groups of ranks, (engines, tp of each), GPUs of each node)
    "one rank, one engine": ([{}], (1, 1), [2]),
    "one node": ([{"ranks": 4, "tp": 2}], (2, 2), [8]),
    "one node, one large engine": ([{"ranks": 4, "ep": 4}], (1, 4), [8]),
    "one node, small engines": ([{"ranks": 4, "tp": 4}], (4, 1), [8]),
    "two nodes": ([{"ranks": 8, "tp": 2, "ep": 4}], (2, 4), [8, 8]),
    "two nodes, engines of all sizes of blocks": ([{"ranks": 8, "ep": 8}], (8, 1), [8, 8]),
    "an engine that fills a node": ([{"ranks": 8, "tp": 8}], (1, 8), [8, 8]),
    "four nodes": ([{"ranks": 16, "tp": 2, "ep": 8}], (4, 4), [8, 8, 8, 8]),
    "four nodes, large experts": ([{"ranks": 16, "tp": 4, "etp": 2, "ep": 4}], (8, 2), [8, 8, 8, 8]),
    "stages": ([{"ranks": 16, "tp": 2, "pp": 4, "ep": 2}], (4, 4), [8, 8, 8, 8]),
    "parts of sequences": ([{"ranks": 16, "tp": 2, "cp": 4}], (2, 8), [8, 8, 8, 8]),
    "experts over two nodes": ([{"ranks": 32, "tp": 2, "ep": 16}], (4, 8), [8] * 8),
    "experts over eight nodes": ([{"ranks": 64, "tp": 4, "pp": 1, "ep": 64}], (8, 8), [8] * 16),
    "parts of sequences over two nodes": ([{"ranks": 16, "tp": 4, "cp": 4}], (2, 8), [8] * 4),
    "a critic": ([{"ranks": 8, "ep": 8}, {"ranks": 8, "tp": 2}], (4, 4), [8, 8, 8, 8]),
    "a critic and a reference": ([{"ranks": 16, "ep": 8}, {"ranks": 8, "tp": 2}, {"ranks": 4, "tp": 4}], (1, 4), [8, 8, 8, 8]),
    "four groups": ([{"ranks": 8, "tp": 2}, {"ranks": 4, "tp": 2}, {"ranks": 2}, {"ranks": 2, "tp": 2}], (4, 4), [8] * 4),
    "sixteen nodes": ([{"ranks": 64, "tp": 4, "pp": 4, "ep": 4}], (16, 4), [8] * 16),
    "235B on sixteen nodes": ([{"ranks": 64, "tp": 4, "ep": 8, "pp": 4}], (8, 8), [8] * 16),
    "nodes of four": ([{"ranks": 8, "tp": 4}], (2, 4), [4, 4, 4, 4]),
    "nodes of four, experts over two": ([{"ranks": 8, "tp": 2, "ep": 8}], (2, 4), [4, 4, 4, 4]),
    "nodes of one": ([{"ranks": 2, "ep": 2}], (2, 1), [1, 1, 1, 1]),
    "nodes of two": ([{"ranks": 4, "tp": 2}], (2, 2), [2, 2, 2, 2]),
    "a node without GPUs": ([{"ranks": 4, "tp": 4}], (2, 2), [0, 4, 4]),
    "large and small nodes": ([{"ranks": 4, "tp": 2}], (1, 8), [4, 8]),
    "small and large nodes": ([{"ranks": 8, "ep": 8}], (2, 2), [4, 8]),
    "some are taken": ([{"ranks": 4, "tp": 4}], (2, 2), [6, 2]),
    "odd ends": ([{"ranks": 4, "tp": 2}], (3, 1), [3, 3, 1]),
    "odd ends of tp": ([{"ranks": 4, "tp": 2}], (2, 4), [7, 6]),
    "three in a block": ([{"ranks": 6, "tp": 3}], (2, 2), [4, 6]),
    "more nodes than needed": ([{"ranks": 2, "tp": 2}], (1, 2), [8, 8, 2, 2]),
    "an engine's GPUs come first": ([{"ranks": 2}], (2, 2), [2, 2, 2]),
}
REFUSED: dict[str, tuple[list[dict[str, int]], tuple[int, int], list[int], str]] = {
    "one GPU for two processes": ([{}], (1, 1), [1], "2 GPUs are asked for, .* (model 1x1, engines 1x1); there are 1 (1)"),
    "no GPU": ([{}], (1, 1), [0, 0], "2 GPUs are asked for, .*; there are 0 (0, 0)"),
    "one too few": ([{"ranks": 8, "ep": 8}], (2, 4), [8, 7], "16 GPUs .* (model 1x8, engines 2x4); there are 15 (8, 7)"),
    "an engine larger than a node": ([{"ranks": 8}], (1, 16), [8, 8, 8], "24 GPUs .* (model 8x1, engines 1x16); there are 24 (8, 8, 8)"),
    "ranks larger than a node": ([{"ranks": 8, "tp": 8}], (1, 4), [4, 4, 4], "12 GPUs .* (model 1x8, engines 1x4); there are 12 (4, 4, 4)"),
    "engines between nodes": ([{"ranks": 2, "tp": 2}], (4, 4), [6, 6, 6], "18 GPUs .*; there are 18 (6, 6, 6)"),
    "an engine beside experts": ([{"ranks": 4, "ep": 4}], (1, 4), [4, 2, 2], "8 GPUs .*; there are 8 (4, 2, 2)"),
    "odd ends": ([{"ranks": 4, "tp": 2}], (2, 4), [7, 5], "12 GPUs .* (model 2x2, engines 2x4); there are 12 (7, 5)"),
    "pieces": ([{"ranks": 4, "tp": 2}], (1, 2), [3, 1, 1, 1], "6 GPUs .*; there are 6 (3, 1, 1, 1)"),
}


def kinds_of(groups: Sequence[dict[str, int]], engines: tuple[int, int]) -> list[ProcessKind]:
    replicas, tp = engines
    layouts = [rank_kind("model", Layout(**group), gpus=True) for group in groups]
    return [*layouts, engine_kind(RolloutSettings(replicas=replicas, tp=tp), gpus=True)]


def nodes_of(gpus: Sequence[int], cpus: int = 64) -> list[Node]:
    return [Node(f"node {index}", cpus, count) for index, count in enumerate(gpus)]


@pytest.mark.parametrize("name", SHAPES)
def test_placement_keeps_blocks_on_one_node_and_kinds_on_few(name: str) -> None:
    groups, engines, gpus = SHAPES[name]
    kinds, nodes = kinds_of(groups, engines), nodes_of(gpus)
    places = place(kinds, nodes)
    assert [len(found) for found in places] == [kind.processes for kind in kinds]
    used = Counter[str]()
    for kind, found in zip(kinds, places, strict=True):
        used.update(found * kind.gpus)
        nodes_in_turn = 1 + sum(before != after for before, after in zip(found, found[1:], strict=False))
        assert nodes_in_turn == len(set(found)), "consecutive ranks are together"
        if len(set(gpus)) == 1:
            assert len(set(found)) == -(-kind.processes * kind.gpus // gpus[0]), kind.name
    assert all(used[node.name] <= node.gpus for node in nodes)
    for group, found in zip(groups, places, strict=False):
        layout = Layout(**group)
        for size in (layout.tp, layout.etp * layout.ep):  # Megatron counts ranks tp fastest, and those of the experts etp, then ep
            if size == layout.tp or size % layout.tp == 0 and size <= max(gpus):
                assert all(len(set(found[first : first + size])) == 1 for first in range(0, layout.ranks, size)), size


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_both_numbers(name: str) -> None:
    groups, engines, gpus, message = REFUSED[name]
    pattern = "^" + message.replace("(", r"\(").replace(")", r"\)") + "$"
    with pytest.raises(NoRoom, match=pattern):
        place(kinds_of(groups, engines), nodes_of(gpus))
    assert not possible(groups, engines, gpus)


@pytest.mark.parametrize(
    ("tp", "dp", "gpus", "engines"),
    [
        (2, 4, [8, 8], [["node 0"] * 4, ["node 1"] * 4]),  # an engine to a node
        (4, 4, [8] * 4, [["node 0"] * 2 + ["node 1"] * 2, ["node 2"] * 2 + ["node 3"] * 2]),  # two ranks to a node
        (8, 3, [8] * 6, [["node 0", "node 1", "node 2"], ["node 3", "node 4", "node 5"]]),
        (1, 6, [4] * 3, [["node 0"] * 3 + ["node 1"] * 3, ["node 2"] * 3 + ["node 0"] * 3]),
    ],
)
def test_an_engine_has_as_many_data_parallel_ranks_on_a_node_as_fit(tp: int, dp: int, gpus: list[int], engines: list[list[str]]) -> None:
    kind = engine_kind(RolloutSettings(replicas=2, tp=tp, dp=dp), gpus=True)
    assert (kind.processes, kind.gpus) == (2 * dp, tp)
    if (tp, dp) == (1, 6):  # blocks of 3 leave a GPU of each node free
        with pytest.raises(NoRoom, match=r"^12 GPUs .* \(engines 4x3\); there are 12 \(4, 4, 4\)$"):
            place([kind], nodes_of(gpus))
        gpus = [*gpus, 4]
        engines = [["node 0"] * 3 + ["node 1"] * 3, ["node 2"] * 3 + ["node 3"] * 3]
    [places] = place([kind], nodes_of(gpus))
    assert [places[:dp], places[dp:]] == engines


def test_placement_counts_cpus() -> None:
    kinds = [ProcessKind("model", 4, 1, (4,)), ProcessKind("engines", 2, 2)]
    assert [set(found) for found in place(kinds, nodes_of([8, 8], cpus=4))] == [{"node 0"}, {"node 1"}]
    with pytest.raises(NoRoom, match=r"^8 GPUs .*; there are 16 \(8, 8\); and 6 CPUs, of 4$"):
        place(kinds, nodes_of([8, 8], cpus=2))
    on_cpus = [ProcessKind("model", 4, 0, (4, 2)), ProcessKind("engines", 2)]
    assert place(on_cpus, nodes_of([0, 0], cpus=3)) == [["node 0"] * 2 + ["node 1"] * 2, ["node 0", "node 1"]]


@pytest.mark.parametrize("gpus", [(8, 4), (4, 4, 2), (6, 3, 3), (5, 5, 2), (1, 2, 4, 1)])
def test_placement_is_exact_for_sizes_that_divide_each_other(gpus: tuple[int, ...]) -> None:
    found = Counter[bool]()
    for tp in (1, 2, 4):
        for replicas in range(1, 5):
            for own_tp, ranks in ((1, 1), (1, 3), (2, 2), (2, 4), (4, 4)):
                groups, engines = [{"ranks": ranks, "tp": own_tp}], (replicas, tp)
                try:
                    place(kinds_of(groups, engines), nodes_of(gpus))
                    fits = True
                except NoRoom:
                    fits = False
                assert fits == possible(groups, engines, gpus), (gpus, groups, engines)
                found[fits] += 1
    assert min(found[True], found[False]) > 5


def possible(groups: Sequence[dict[str, int]], engines: tuple[int, int], gpus: Sequence[int]) -> bool:
    """Whether tensor-parallel groups and engines fit into the nodes at all, by trying every way."""
    experts = [group.get("ep", 1) for group in groups]
    sizes = [max(group.get("tp", 1), ep if ep <= max(gpus) else 1) for group, ep in zip(groups, experts, strict=True)]
    items = [size for group, size in zip(groups, sizes, strict=True) for _ in range(group.get("ranks", 1) // size)]

    @cache
    def fits(items: tuple[int, ...], free: tuple[int, ...]) -> bool:
        if not items:
            return True
        size, *rest = items
        left = {tuple(sorted((*free[:n], room - size, *free[n + 1 :]))) for n, room in enumerate(free) if room >= size}
        return any(fits(tuple(rest), after) for after in left)

    return fits(tuple(sorted(items + [engines[1]] * engines[0], reverse=True)), tuple(sorted(gpus)))
