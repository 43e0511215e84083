"""The devices that `megarl plan` knows, and how they are linked."""

from dataclasses import replace
from pathlib import Path

from megarl.config import TrainConfig, load
from megarl.plan.devices import DEVICES, device_named, device_of, in_nodes
from megarl.plan.host import NodeMemory
from megarl.plan.search import search
from megarl.plan.whole import Plan, models_of
from tests.unit.plan.planning import GSPO, planned


def test_devices_are_found_by_memory() -> None:
    assert [device_of(memory).name for memory in (40, 80, 96, 141, 180, 186, 268, 400)] == [
        *("H100", "H100", "H20", "H200", "B200", "GB200", "B300", "B300")
    ]
    assert replace(DEVICES["H100"], name="H200", memory_gb=141, bandwidth=4.8e12) == DEVICES["H200"]


def test_devices_are_found_by_cudas_names() -> None:
    names = ("NVIDIA H200", "NVIDIA H20", "NVIDIA GB200", "NVIDIA B200", "NVIDIA H100 80GB HBM3", "NVIDIA L4", None)
    devices = [device_named(name) for name in names]
    assert [one and one.name for one in devices] == ["H200", "H20", "GB200", "B200", "H100", None, None]


def test_nodes_of_four_gpus_hold_half_the_ranks_and_end_the_links_earlier(published: Path) -> None:
    path = f"model.path={published / 'Qwen3-30B-A3B'}"

    def plan(*changes: str) -> Plan:
        return planned(load(GSPO, [path, *changes], TrainConfig), 32)

    def node(one: Plan) -> NodeMemory:
        assert one.host is not None
        return one.host

    eight, four = plan(), plan("cluster.gpus_per_node=4")
    assert node(four).ranks == node(eight).ranks / 2 and node(four).routes == node(eight).routes / 2
    assert eight.times is not None and four.times is not None
    assert four.times.update > eight.times.update, "ep8 crosses nodes of four"
    config = load(GSPO, [path], TrainConfig)
    layouts = search(config, models_of(config), device_of(80, 4), 80, 32)
    assert layouts and all(one.layout.tp <= 4 and one.layout.cp <= 4 and one.engine_tp <= 4 for one in layouts)


def test_a_rack_of_gb200_is_linked_across_its_nodes() -> None:
    gb200 = DEVICES["GB200"]
    assert (gb200.node, gb200.linked) == (4, 72) and in_nodes(gb200, 2).linked == 72
    assert in_nodes(DEVICES["H100"], 4) == replace(DEVICES["H100"], node=4, linked=4) and in_nodes(gb200, None) is gb200
