"""The configuration of each supervised verb."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megarl.algorithms import Dpo, PreferenceLoss
from megarl.algorithms.ops import Averaging
from megarl.algorithms.sft import StoredDistillation
from megarl.config.data import PreferenceData, SftData, TaughtSource
from megarl.config.model import OptimizerSettings, RewardModelOptimizer
from megarl.config.run import TrainingSettings
from megarl.config.section import BatchSize, Section, StepsOrNone


class SupervisedSettings(Section):
    """The steps of a supervised stage, and how often it is evaluated on its held-out data."""

    steps: StepsOrNone
    """Steps of the stage; 0: only evaluate model.path on the held-out data."""
    batch_size: BatchSize = 64
    """Responses, or pairs of responses, in one step."""
    micro_batch_tokens: PositiveInt = 16384
    """Maximum number of tokens in one micro-batch on one context-parallel group."""
    max_tokens: PositiveInt = 2048
    """Maximum length of prompt + response, in tokens."""
    eval_every: NonNegativeInt = 0
    """Steps between two evaluations; 0: only before the first and after the last step."""
    patience: NonNegativeInt = 0
    """End the stage after this many evaluations in a row without an improvement, with the model of the best one; 0: take all steps."""


class SupervisedConfig(TrainingSettings):
    """The settings that the supervised stages have in common."""

    section: ClassVar[str]  # the key of the verb's SupervisedSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizer of the model."""

    @property
    def supervised(self) -> SupervisedSettings:
        """The verb's own section."""
        return getattr(self, self.section)

    @property
    def total_steps(self) -> int:
        return self.supervised.steps

    @property
    def steps_key(self) -> str | None:
        return f"{self.section}.steps"

    @property
    def optimizers(self) -> dict[str, OptimizerSettings]:
        return {"optimizer": self.optimizer}

    @model_validator(mode="after")
    def _patience_has_evaluations(self) -> SupervisedConfig:
        if self.supervised.patience and not self.supervised.eval_every:
            raise ValueError(
                f"{self.section}.patience={self.supervised.patience}: {self.section}.eval_every=0 runs no evaluations during training"
            )
        return self


class SftSettings(SupervisedSettings):
    """The steps of supervised training."""

    aggregation: Averaging = "token-mean"
    distillation: StoredDistillation | None = None
    """Learn the teacher's log-probs that the data have (`type: taught`), by these settings; {} for the defaults."""


OF_TEXTS = ("template", "system", "template_args", "control_tokens", "train_on")  # what of `data` says how texts become tokens


class SftConfig(SupervisedConfig):
    """`megarl sft`: supervised training on response tokens."""

    section: ClassVar[str] = "sft"
    data: SftData
    """Demonstrations."""
    sft: SftSettings
    """The stage's steps."""

    @model_validator(mode="after")
    def _patience_has_data(self) -> SftConfig:
        if self.sft.patience and self.data.eval is None:
            raise ValueError(f"sft.patience={self.sft.patience}: there is no data.eval to measure on")
        return self

    @model_validator(mode="after")
    def _data_have_a_teacher(self) -> SftConfig:
        for name, source in (("data.train", self.data.train), ("data.eval", self.data.eval)):
            if source is None or isinstance(source, TaughtSource) == (self.sft.distillation is not None):
                continue
            if self.sft.distillation is not None:
                raise ValueError(f"sft.distillation: {name}.type={source.type} has no log-probs of a teacher; give type=taught")
            raise ValueError(
                f"{name}.type=taught: sft.distillation is null, so that nothing reads the teacher's log-probs; give it, or {{}}"
            )
        changed = [name for name in OF_TEXTS if getattr(self.data, name) != SftData.model_fields[name].default]
        if changed and self.sft.distillation is not None:
            raise ValueError(f"data.{changed[0]}: is for texts, and rows of data.train.type=taught are tokens; leave it out")
        return self


class RmSettings(SupervisedSettings):
    """The steps of a reward model."""

    centre: Annotated[float, Field(ge=0)] = 0.0
    """Weight of (score of the better response + score of the other)^2, which centres the scores around 0 (arXiv:2312.09244: 0.01)."""


class RmConfig(SupervisedConfig):
    """`megarl rm`: a reward model trained on pairs, starting from a language model (with a fresh head) or from a reward model."""

    section: ClassVar[str] = "rm"
    optimizer: RewardModelOptimizer = RewardModelOptimizer()
    """Optimizer of the model."""
    data: PreferenceData
    """Pairs."""
    rm: RmSettings
    """The stage's steps."""


class DpoConfig(SupervisedConfig):
    """`megarl dpo`: a policy trained on pairs, with the initial policy (`model.path`) as the reference."""

    section: ClassVar[str] = "dpo"
    algorithm: PreferenceLoss = Dpo()
    """The preference loss, by its `type` (default: dpo), and its settings."""
    data: PreferenceData
    """Pairs."""
    dpo: SupervisedSettings
    """The stage's steps."""
