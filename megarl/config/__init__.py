"""The one typed configuration tree: every default lives in this folder (an algorithm's in its file).

A tree for each verb is in `stages` and `inference`; `load` makes it from a YAML file and overrides; `megarl config VERB` prints its keys.
"""

from megarl.config.data import (
    ConversationSource,
    DataSettings,
    EpisodeSource,
    EvalData,
    EvalSet,
    FileSource,
    MixtureSource,
    PairSource,
    PreferenceData,
    PreferenceMixture,
    PreferenceSource,
    PromptFormat,
    PromptSource,
    ReasoningGymSource,
    SftMixture,
    SftSource,
    SourceFormat,
)
from megarl.config.environment import (
    EnvironmentSettings,
    FunctionEnvironment,
    GymEnvironment,
    GymnasiumEnvironment,
    HttpEnvironment,
    TextArenaEnvironment,
    ToolsEnvironment,
)
from megarl.config.inference import EvalConfig, PairsConfig, ServeConfig
from megarl.config.loading import dump, load
from megarl.config.model import CriticSettings, Layout, ModelSettings, OptimizerSettings
from megarl.config.rewards import (
    EnvironmentReward,
    FunctionReward,
    HttpReward,
    MathReward,
    ModelReward,
    ReasoningGymReward,
    RewardSettings,
    SumReward,
    alone,
    model_of,
)
from megarl.config.rollout import RolloutSettings, SyncSettings, TrainRolloutSettings
from megarl.config.routing import RoutingSettings
from megarl.config.run import CheckpointSettings, ClusterSettings, LogSettings, RunSettings, TrainingSettings
from megarl.config.sandbox import SandboxSettings
from megarl.config.section import Section
from megarl.config.stages import DpoConfig, LearnConfig, RmConfig, SftConfig, StepSettings, TrainConfig, optimizers
from megarl.errors import ConfigError

__all__ = [
    "CheckpointSettings",
    "ClusterSettings",
    "ConfigError",
    "ConversationSource",
    "CriticSettings",
    "DataSettings",
    "DpoConfig",
    "EnvironmentReward",
    "EnvironmentSettings",
    "EpisodeSource",
    "EvalConfig",
    "EvalData",
    "EvalSet",
    "FileSource",
    "FunctionEnvironment",
    "FunctionReward",
    "GymEnvironment",
    "GymnasiumEnvironment",
    "HttpEnvironment",
    "HttpReward",
    "Layout",
    "LearnConfig",
    "LogSettings",
    "MathReward",
    "MixtureSource",
    "ModelReward",
    "ModelSettings",
    "OptimizerSettings",
    "PairsConfig",
    "PairSource",
    "PreferenceData",
    "PreferenceMixture",
    "PreferenceSource",
    "PromptFormat",
    "PromptSource",
    "ReasoningGymReward",
    "ReasoningGymSource",
    "RewardSettings",
    "RmConfig",
    "RolloutSettings",
    "RoutingSettings",
    "RunSettings",
    "SandboxSettings",
    "Section",
    "ServeConfig",
    "SftConfig",
    "SftMixture",
    "SftSource",
    "SourceFormat",
    "StepSettings",
    "SumReward",
    "SyncSettings",
    "TextArenaEnvironment",
    "ToolsEnvironment",
    "TrainConfig",
    "TrainRolloutSettings",
    "TrainingSettings",
    "alone",
    "dump",
    "load",
    "model_of",
    "optimizers",
]
