"""The checks of routing replay, and of the experts that an engine reports."""

from megarl.config import ConfigError, CriticSettings, ModelSettings, RolloutSettings, RoutingSettings
from megarl.engines.registry import engine_type
from megarl.models.description import ModelDescription


def check_routing(model: ModelDescription, settings: ModelSettings, routing: RoutingSettings, critic: CriticSettings | None) -> None:
    """Check that routing replay, and the comparison of experts, could do what they are meant to.

    Args:
        model: the policy.
        settings: the section `model`.
        routing: the section `routing`.
        critic: the section `critic`, if there is one.

    Raises:
        ConfigError: a model whose experts are to be replayed has none, or replay or comparison has no access to the router's choices.
    """
    critic, megatron = critic if routing.critic else None, settings.megatron
    sinkhorn = "sinkhorn" in str(megatron.get("moe_router_load_balancing_type", ""))
    if routing.replay == "off" and not routing.critic:
        if routing.sample and (sinkhorn or megatron.get("moe_router_fusion")) and model.fields.get("num_moe_experts"):
            name = "moe_router_load_balancing_type" if sinkhorn else "moe_router_fusion"
            raise ConfigError(
                f"routing.sample={routing.sample:g}: model.megatron.{name}={megatron[name]!r}: no experts can be compared; give 0"
            )
        return
    replayed = [] if routing.replay == "off" else [(f"routing.replay={routing.replay}", "model.path", settings.path, model)]
    if critic is not None:
        origin = ("model.path", settings.path) if critic.path is None else ("critic.path", critic.path)
        replayed.append(("routing.critic=true", *origin, ModelDescription.read(origin[1], drop_images=settings.drop_images)))
    for key, where, path, replaying in replayed:
        if not replaying.fields.get("num_moe_experts"):
            raise ConfigError(f"{key}: {where}={path} is a {replaying.config['model_type']}, which has no experts")
    key = replayed[0][0]
    for name in ("moe_router_fusion", "moe_expert_capacity_factor"):
        if megatron.get(name):
            raise ConfigError(
                f"{key}: model.megatron.{name}={megatron[name]!r}: experts are then chosen, or dropped, where replay has no control"
            )
    if sinkhorn:
        raise ConfigError(f"{key}: model.megatron.moe_router_load_balancing_type=sinkhorn chooses experts for the batch as a whole")


def check_reported_experts(model: ModelDescription, rollout: RolloutSettings, routing: RoutingSettings) -> None:
    """Check that the engine can report which experts of a mixture it has chosen, if it has to.

    Args:
        model: the policy.
        rollout: the section `rollout`.
        routing: the section `routing`.

    Raises:
        ConfigError: it cannot; the message names the settings under which it need not.
    """
    if routing.reported and model.fields.get("num_moe_experts") and not engine_type(rollout).reports_experts:
        key = "replay=r3" if routing.replay == "r3" else f"sample={routing.sample:g}"
        remedy = "routing.replay=r2 or off with routing.sample=0" if routing.replay == "r3" else "routing.sample=0"
        raise ConfigError(f"routing.{key}: the engine {rollout.engine.type} does not report the experts that it chooses; give {remedy}")
