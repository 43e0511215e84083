"""The typed configuration tree: every default lives in this folder (an algorithm's, in the algorithm's own file).

`stages` and `inference` define a tree for each verb; `load` builds it from a YAML file and overrides; `megarl config VERB` prints its keys.
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
    SftData,
    SftMixture,
    SftSource,
    SourceFormat,
    TaughtSource,
)
from megarl.config.environment import (
    AgentEnvironment,
    CommandContainers,
    ContainerSource,
    EnvironmentSettings,
    FunctionEnvironment,
    GymEnvironment,
    GymnasiumEnvironment,
    HttpEnvironment,
    LocalContainers,
    ModalContainers,
    SoftwareEnvironment,
    TextArenaEnvironment,
    ToolsEnvironment,
)
from megarl.config.inference import EvalConfig, PairsConfig, ServeConfig
from megarl.config.loading import dump, load
from megarl.config.model import (
    CriticSettings,
    DistillationSettings,
    Layout,
    LoraSettings,
    ModelSettings,
    Mtp,
    MuonSettings,
    OptimizerSettings,
    TeacherEngines,
    TeacherServer,
)
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
from megarl.config.rollout import RolloutSettings, SyncSettings, TrainRolloutSettings, Truncation
from megarl.config.routing import RoutingSettings
from megarl.config.run import CheckpointSettings, ClusterSettings, LogSettings, RunSettings, TrainingSettings
from megarl.config.sandbox import SandboxSettings
from megarl.config.section import Section
from megarl.config.supervised import DpoConfig, RmConfig, SftConfig, SupervisedConfig
from megarl.config.train import StepSettings, TrainConfig, ValueConfig
from megarl.errors import ConfigError
