"""The parts' bodies on the CPU, and on a GPU that is pretended."""

from __future__ import annotations

from pathlib import Path

from tests.gpu import training


def test_the_gpus_path_mixes_no_devices_and_trains_as_the_cpu_does(tmp_path: Path) -> None:
    """The path of a GPU without Transformer Engine, on Megatron's own sources."""
    [figures] = training.check("pretend", tmp_path).values()
    assert figures["layers"] == "GPU: the layers of float32 are Megatron's local ones with torch's attention"
