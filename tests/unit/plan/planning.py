"""Plans of the examples for large models."""

from megarl.config import OptimizerSettings, TrainConfig
from megarl.plan.devices import device_of
from megarl.plan.whole import Plan, build, models_of
from tests.unit.examples.test_configurations import EXAMPLES

GSPO = EXAMPLES / "qwen3_30b_a3b" / "gspo.yaml"
ADAM = OptimizerSettings()


def planned(config: TrainConfig, gpus: int | None = None, memory_gb: float | None = None) -> Plan:
    """The plan of a configuration, on GPUs of its own `gpu_memory_gb`, or of 80 GB."""
    memory = memory_gb or config.cluster.gpu_memory_gb or 80
    return build(config, models_of(config), device_of(memory, config.cluster.gpus_per_node), memory, gpus)
