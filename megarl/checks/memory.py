"""What a check refuses because no GPU of the run could hold it, and what it warns about."""

from megarl.config import ConfigError, RunSettings, TrainConfig
from megarl.plan.devices import NODE, device_of
from megarl.plan.facts import facts
from megarl.plan.host import payload
from megarl.plan.whole import build, models_of


def check_fits(config: RunSettings) -> None:
    """Raise ConfigError, with a line for each fault, if ranks or engines exceed `cluster.gpu_memory_gb`; without that setting, do nothing.

    The memory is a setting, not what this machine has, since a check also runs where there is no GPU or a different one.
    """
    memory = config.cluster.gpu_memory_gb
    if not config.cluster.gpus or memory is None:
        return
    plan = build(config, models_of(config), device_of(memory, config.cluster.gpus_per_node), memory)
    if plan.faults:
        raise ConfigError("\n".join(f"{fault} (`megarl plan` ranks layouts that fit)" for fault in plan.faults))


def warnings(config: RunSettings) -> list[str]:
    """Warnings about what a check lets pass although it makes the run slower."""
    if not isinstance(config, TrainConfig):
        return []
    warning = payload(config, facts(models_of(config)["model"]), config.cluster.gpus_per_node or NODE).warning
    return [] if warning is None else [warning]
