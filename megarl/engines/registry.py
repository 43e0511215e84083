"""The available rollout engines. An engine's module is imported when it is first used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from megarl.config import ConfigError, RolloutSettings
from megarl.imports import find

if TYPE_CHECKING:
    from megarl.engines.engine import Engine
    from megarl.models.description import ModelDescription

ENGINES = {"vllm": "megarl.engines.vllm.engine:VllmEngine"}
"""`rollout.engine.type` -> "module:Class" of a megarl.engines.engine.Engine."""


def check_engine(model: ModelDescription, dtype: str, settings: RolloutSettings, *, gpu: bool) -> None:
    """Call `Engine.check` of the chosen engine, before any process starts. Raises ConfigError, too, if it has no members and needs some."""
    engine = engine_type(settings)
    if settings.dp > 1 and engine.member is None:
        raise ConfigError(f"rollout.dp={settings.dp}: engine {settings.engine.type} has one data-parallel rank only")
    engine.check(model, dtype, settings, gpu=gpu)


def missing_methods(settings: RolloutSettings, names: Iterable[str]) -> list[str]:
    """Return those of `Engine`'s methods, by their names, that the chosen engine leaves as they are there."""
    from megarl.engines.engine import Engine

    engine = engine_type(settings)
    return [name for name in names if getattr(engine, name) is getattr(Engine, name)]


def engine_type(settings: RolloutSettings) -> type[Engine]:
    """Return the class of the chosen engine."""
    return cast("type[Engine]", find(ENGINES[settings.engine.type]))
