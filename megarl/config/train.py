"""The configuration of reinforcement learning."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from megarl.algorithms import Algorithm
from megarl.config.data import DataSettings, EvalSet, check_sets
from megarl.config.environment import EnvironmentSettings
from megarl.config.model import CriticSettings, DistillationSettings, Layout, OptimizerSettings, Placement
from megarl.config.rewards import FunctionReward, HttpReward, RewardSettings, SumReward, alone, model_of
from megarl.config.rollout import SyncSettings, TrainRolloutSettings
from megarl.config.routing import RoutingSettings
from megarl.config.run import TrainingSettings
from megarl.config.section import Passes, Section, Steps
from megarl.errors import refuse_all


class StepSettings(Section):
    """One RL step, and how often evaluations take place."""

    steps: Steps
    """Steps of the policy; those of critic.pretrain_steps come before them."""
    prompts_per_step: PositiveInt
    """Prompts of one rollout."""
    mini_batches: PositiveInt = 1
    """Number of mini-batches into which a rollout is divided, with one optimizer step on each."""
    epochs: Passes = 1
    """Passes of the policy over a rollout's mini-batches (PPO's epochs), not over the data; `steps` sets how long training lasts."""
    old_logp: Literal["auto", "forward", "rollout"] = "auto"
    """Where the old log-probs come from. forward: a pass of the policy over the rollout before the updates. auto: the same, but the
    pass is skipped if only one update follows, whose own log-probs then serve, and nothing else needs it (a reference, a teacher, a
    correction, an algorithm that chooses tokens of a mini-batch, routing.replay=r2). rollout: the engine's (bypass mode), so that ratio
    and clip cover engine and trainer together."""
    logp_over: Literal["all", "kept"] = "all"
    """Of which distribution the policy's and the reference's log-probs and entropies are. all: that over the vocabulary. kept: that over
    the tokens which rollout.top_p, top_k and min_p keep of the policy's at the step's start, as the engines' are."""
    micro_batch_tokens: PositiveInt = 16384
    """Maximum number of tokens in one micro-batch on one context-parallel group."""
    dynamic_sampling_rounds: Passes | None = None
    """Set aside groups whose scores (without reward.overlong) are all equal, and draw prompts at most this many times to fill the step;
    if too few groups differ, the first of those set aside fill it. null: keep all groups."""
    drop_truncated: bool = False
    """Overlong filter: exclude responses cut off by the length limit from the loss."""
    truncated_in_baseline: bool = True
    """With drop_truncated: their rewards still count in their group's baseline, scale and signal, as in DAPO (arXiv:2503.14476, section
    3.4: the loss of truncated samples is masked) and TRL's mask_truncated_completions. false: they take no part, as if not sampled."""
    eval_every: NonNegativeInt = 0
    """Steps between two evaluations; 0: only before the first and after the last step."""
    eval_at_start: bool = True
    """Evaluate before the first step."""
    on_alarm: Literal["continue", "stop"] = "continue"
    """stop: end the run at the first alarm, with a checkpoint."""
    best: str | None = None
    """Keep the policy with the highest value of this evaluation metric, such as eval/heldout/avg@1; null: keep the last policy."""
    patience: NonNegativeInt = 0
    """End the run after this many evaluations in a row that do not raise `best`; 0: never."""


class TrainConfig(TrainingSettings):
    """`megarl train`: reinforcement learning."""

    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizer of the policy."""
    algorithm: Algorithm
    """The algorithm of the update, by its `type`, and its settings."""
    critic: CriticSettings | None = None
    """The value model: required by algorithms that use one, refused by the others."""
    distillation: DistillationSettings | None = None
    """A teacher whose log-probs reward the tokens of the policy; null: there is none."""
    placement: Placement = Placement()
    """Models with their own ranks, and whether engines share the policy's GPUs."""
    data: DataSettings
    """Prompts."""
    eval: list[EvalSet] = []
    """More sets of prompts to evaluate on."""
    environment: EnvironmentSettings | None = None
    """What answers the policy's turns; null: each prompt has one response."""
    reward: RewardSettings
    """How responses are scored."""
    rollout: TrainRolloutSettings = TrainRolloutSettings()
    """Engines and sampling."""
    sync: SyncSettings = SyncSettings()
    """How new weights reach the engines."""
    routing: RoutingSettings = RoutingSettings()
    """Experts of an MoE model: replay and metrics."""
    train: StepSettings
    """One step, and how often evaluations take place."""

    @property
    def total_steps(self) -> int:
        return self.train.steps + (0 if self.critic is None else self.critic.pretrain_steps)

    @property
    def steps_key(self) -> str | None:
        return "train.steps"

    @property
    def optimizers(self) -> dict[str, OptimizerSettings]:
        return {"optimizer": self.optimizer} | ({} if self.critic is None else {"critic.optimizer": self.critic.optimizer})

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        """Run every check between sections, and report all contradictions at once."""
        refuse_all(
            lambda: check_sets(self.data, self.eval),
            self._check_batch,
            self._check_parts,
            self._check_truncated,
            self._check_delta,
            self._check_overlap,
            self._check_critic,
            self._check_best,
            self._check_distillation,
            self._check_placement,
            self._check_routing,
            self._check_shared,
            self._check_old_logp,
            self._check_cut,
            self._check_kept,
            self._check_mode,
            self._check_under_way,
            self._check_lengths,
            self._check_critic_tokens,
        )
        return self

    def _check_batch(self) -> None:
        """Raise ValueError if the mini-batches do not suit the ranks, or the groups do not suit the algorithm."""
        sequences, mini_batch = self._sequences
        if sequences % self.train.mini_batches:
            raise ValueError(
                f"train.mini_batches={self.train.mini_batches} does not divide "
                f"prompts_per_step*samples_per_prompt={self.train.prompts_per_step}*{self.rollout.samples_per_prompt}={sequences}"
            )
        if mini_batch < self.layout.dp:
            raise ValueError(
                f"train.mini_batches={self.train.mini_batches} leaves {mini_batch} sequences "
                f"a mini-batch for {self.layout.dp} data-parallel ranks"
            )
        if self.rollout.samples_per_prompt < self.algorithm.min_group:
            raise ValueError(
                f"rollout.samples_per_prompt={self.rollout.samples_per_prompt}: algorithm.type={self.algorithm.type} compares the answers "
                f"to one prompt and needs at least {self.algorithm.min_group}"
            )

    def _check_parts(self) -> None:
        """Raise ValueError if the algorithm needs the parts of a reward that has none, or has them on another scale."""
        if not self.algorithm.needs_parts:
            return
        if not isinstance(self.reward.source, SumReward):
            raise ValueError(
                f"reward.source.type={self.reward.source.type}: algorithm.type={self.algorithm.type} normalises the parts of a reward "
                "one by one; give a sum"
            )
        if self.reward.normalise is not None:
            raise ValueError(f"reward.normalise: algorithm.type={self.algorithm.type} normalises the parts of the reward itself")
        if self.reward.overlong is not None and "overlong" in {part.name for part in self.reward.source.parts}:
            raise ValueError("reward.source.parts: a part is named overlong, as the punishment of reward.overlong is; give it another name")

    def _check_truncated(self) -> None:
        """Raise ValueError if truncated responses are left out of the baseline and not of the loss."""
        if not self.train.truncated_in_baseline and not self.train.drop_truncated:
            raise ValueError("train.truncated_in_baseline=false: train.drop_truncated=false has the loss read them; set it to true")

    @property
    def _sequences(self) -> tuple[int, int]:
        """The number of sequences in a step, and in a mini-batch."""
        sequences = self.train.prompts_per_step * self.rollout.samples_per_prompt
        return sequences, sequences // self.train.mini_batches

    def _check_critic(self) -> None:
        """Raise ValueError if the algorithm needs a critic and the configuration has none, or vice versa."""
        if self.algorithm.needs_critic and self.critic is None:
            raise ValueError(f"critic: algorithm.type={self.algorithm.type} needs a critic; give this section")
        if self.critic is not None and not self.algorithm.needs_critic:
            raise ValueError(f"critic: algorithm.type={self.algorithm.type} has no critic; leave this section out")

    def _check_lengths(self) -> None:
        """Raise ValueError if the overlong buffer exceeds a response, or the longest prompt and response exceed a micro-batch."""
        if self.reward.overlong is not None and self.reward.overlong.buffer_tokens > self.rollout.max_response_tokens:
            raise ValueError(
                f"reward.overlong.buffer_tokens={self.reward.overlong.buffer_tokens} is more than "
                f"rollout.max_response_tokens={self.rollout.max_response_tokens}"
            )
        if self._longest > self.train.micro_batch_tokens:
            raise ValueError(
                f"train.micro_batch_tokens={self.train.micro_batch_tokens} is below "
                f"rollout.max_prompt_tokens+max_response_tokens={self._longest}"
            )

    @property
    def _longest(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_response_tokens

    def _check_best(self) -> None:
        """Raise ValueError if no evaluation during training reports the metric that `best` and `patience` need."""
        train = self.train
        known = ["eval/heldout/avg@1", "eval/heldout/greedy"] if self.data.eval is not None else []
        for one in self.eval:
            known += [f"eval/{one.name}/avg@{one.n}"] + ([f"eval/{one.name}/greedy"] if one.greedy else [])
        if train.best is not None and train.best not in known:
            raise ValueError(f"train.best={train.best}: not an evaluation metric here ({', '.join(known)})")
        if train.patience and train.best is None:
            raise ValueError(f"train.patience={train.patience}: train.best must name the metric to watch")
        if train.best is not None and not train.eval_every:
            raise ValueError(f"train.best={train.best}: train.eval_every=0 runs no evaluations during training")

    def _check_distillation(self) -> None:
        """Raise ValueError if the algorithm's loss does not read the advantages that distillation makes."""
        if self.distillation is None:
            return
        if not self.algorithm.reads_advantages:
            raise ValueError(
                f"distillation: gives each token an advantage of its own, but the loss of algorithm.type={self.algorithm.type} reads none "
                "(reinforce, grpo and others do)"
            )
        if self.algorithm.joins_tokens and self.distillation.top_k is None:
            raise ValueError(
                f"distillation: gives each token an advantage of its own, but the loss of algorithm.type={self.algorithm.type} has one "
                "ratio for a whole response (reinforce, grpo and others do not; nor does it matter with distillation.top_k)"
            )
        if self.distillation.prompt is not None and self.environment is not None:
            raise ValueError(
                "distillation.prompt: of one prompt and its response; an environment's episodes are conversations, with no such"
            )
        if self.distillation.shows("solution") and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"distillation.prompt: {{solution}} is another response to the prompt, but rollout.samples_per_prompt="
                f"{self.rollout.samples_per_prompt}"
            )
        source, speaking = self.reward.source, FunctionReward | HttpReward
        if self.distillation.shows("feedback") and not any(isinstance(one, speaking) for one in alone(source).values()):
            raise ValueError(
                f"distillation.prompt: {{feedback}} is what the verifier says about a response, and reward.source.type={source.type} "
                "says nothing; a function or a server (http) returns it beside the score"
            )

    def _check_placement(self) -> None:
        """Raise ValueError if ranks are given to a model that the run does not have, or more data-parallel ranks than sequences."""
        _, sequences = self._sequences
        presence = {
            "critic": (self.critic is not None, f"algorithm.type={self.algorithm.type} has no critic"),
            "reference": (self.algorithm.needs_reference, f"algorithm.kl_coef={self.algorithm.kl_coef:g} keeps no reference"),
            "teacher": (self.distillation is not None, "there is no section distillation"),
            "reward": (model_of(self.reward.source) is not None, f"reward.source.type={self.reward.source.type} is not a reward model"),
        }
        for role, (present, why) in presence.items():
            layout: Layout | None = getattr(self.placement, role)
            if layout is not None and not present:
                raise ValueError(f"placement.{role}: {why}; leave this out")
            if layout is not None and sequences < layout.dp:
                raise ValueError(
                    f"placement.{role}.ranks={layout.ranks}: {layout.dp} data-parallel ranks for {sequences} sequences a mini-batch"
                )
        self._check_teacher_place()

    def _check_teacher_place(self) -> None:
        """Raise ValueError if the teacher is in two places or at none of its own, or a server would score another distribution."""
        teaching, engines = self.distillation, self.placement.teacher_engines
        if teaching is not None and teaching.by_itself and self.placement.teacher is not None:
            raise ValueError("placement.teacher: the policy is its own teacher (distillation.prompt); leave this out")
        if engines is not None and teaching is not None and teaching.prompt is not None:
            raise ValueError("placement.teacher_engines: score after the policy's own prompt; with distillation.prompt leave this out")
        if engines is not None and (teaching is None or not teaching.models):
            why = "there is no section distillation" if teaching is None else "distillation names a server instead of a directory"
            raise ValueError(f"placement.teacher_engines: {why}; leave this out")
        if self.placement.teacher is not None and self.taught_apart:
            why = "placement.teacher_engines has engines for it" if engines is not None else "distillation names a server for it"
            raise ValueError(f"placement.teacher: {why}; leave this out")
        if teaching is not None and not teaching.models and not teaching.by_itself and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature={self.rollout.temperature:g}: policy and teacher are compared at this temperature, but a server's "
                f"prompt_logprobs (distillation.{next(iter(teaching.scorers))}) are those of temperature 1"
            )

    @property
    def taught_apart(self) -> bool:
        """Whether engines or servers, and no model ranks, score for the teachers."""
        teaching = self.distillation
        return teaching is not None and not teaching.by_itself and (self.placement.teacher_engines is not None or not teaching.models)

    def _check_delta(self) -> None:
        """Raise ValueError if sending only what changed would not send less."""
        delta, transport, dtype = self.sync.delta, self.sync.transport, self.rollout.dtype or self.model.dtype
        if delta is None:
            return
        if transport not in ("gloo", "nccl"):
            raise ValueError(f"sync.delta={delta}: sends less over a network, but sync.transport={transport} shares memory")
        if dtype == "float32" and self.rollout.quantization is None:
            raise ValueError(f"sync.delta={delta}: an update changes every weight of engines in {dtype} (few with rollout.dtype=bfloat16)")

    def _check_overlap(self) -> None:
        """Raise ValueError if engines would receive weights beside work that they do not have."""
        if not self.sync.overlap:
            return
        if self.rollout.mode != "free":
            raise ValueError(f"sync.overlap=true: with rollout.mode={self.rollout.mode} no engine generates during a sync (free does)")
        if self.sync.transport not in ("gloo", "nccl"):
            raise ValueError(f"sync.overlap=true: receives over a network (gloo, nccl), not with sync.transport={self.sync.transport}")

    def _check_shared(self) -> None:
        """Raise ValueError if the engines cannot share the devices of the policy's ranks as configured."""
        rollout, ranks = self.rollout, self.layout.ranks
        engines = rollout.replicas * rollout.devices
        if self.placement.engines == "apart":
            return
        if engines > ranks:
            raise ValueError(
                "placement.engines=shared: rollout.replicas*rollout.dp*rollout.tp="
                f"{rollout.replicas}*{rollout.dp}*{rollout.tp}={engines} is more than layout.ranks={ranks}"
            )
        if self.cluster.gpus and self.sync.transport != "cuda_ipc":
            raise ValueError(
                f"sync.transport={self.sync.transport} with placement.engines=shared: on one GPU only cuda_ipc reaches the other process"
            )

    def _check_routing(self) -> None:
        """Raise ValueError if experts are to be replayed in a model that the run does not have, or if nothing reports them."""
        if self.routing.reference and self.routing.replay != "r3":
            raise ValueError(f"routing.reference=true with routing.replay={self.routing.replay}: only r3 has experts for the reference")
        if self.routing.reference and not self.algorithm.needs_reference:
            raise ValueError(f"routing.reference=true: algorithm.kl_coef={self.algorithm.kl_coef:g} keeps no reference")
        if self.routing.critic and self.critic is None:
            raise ValueError(f"routing.critic=true: algorithm.type={self.algorithm.type} has no critic")

    def _check_old_logp(self) -> None:
        """Raise ValueError if using the engine's log-probs as the old ones contradicts another setting."""
        if self.train.old_logp == "rollout" and self.algorithm.correction is not None:
            raise ValueError(
                f"train.old_logp=rollout: algorithm.correction.type={self.algorithm.correction.type} weights old by rollout log-probs, "
                "which are then the same; remove one of the two"
            )
        if self.train.old_logp == "rollout" and self.routing.replay == "r2":
            raise ValueError("train.old_logp=rollout: routing.replay=r2 replays the forward pass that this skips; use r3")

    def _check_cut(self) -> None:
        """Raise ValueError if responses are sampled from a truncated distribution and nothing corrects for it."""
        if self.rollout.cut is not None and self.train.logp_over == "all" and self.algorithm.correction is None:
            raise ValueError(
                f"{self.rollout.cut}: responses then come from a truncated policy distribution, but the loss would take it for the whole "
                "one; set train.logp_over=kept, which trains on the truncated one, or algorithm.correction (such as {type: tis}), which "
                "weights each token by policy over engine"
            )

    def _check_kept(self) -> None:
        """Raise ValueError if log-probs are to be over kept tokens and another setting needs those over the vocabulary, or keeps all."""
        if self.train.logp_over == "all":
            return
        kept = "train.logp_over=kept"
        if self.rollout.cut is None:
            raise ValueError(f"{kept}: rollout.top_p=1, top_k=0 and min_p=0 keep every token; set one of them, or leave this out")
        if self.train.old_logp == "rollout":
            raise ValueError(f"{kept}: the pass that train.old_logp=rollout skips finds the kept tokens; use auto")
        if self.distillation is not None:
            raise ValueError(f"{kept}: distillation compares policy and teacher over the whole vocabulary; remove one of the two")
        if self.placement.reference is not None:
            raise ValueError(f"{kept}: the kept tokens stay on the policy's ranks, where placement.reference must be too; leave it out")

    def _check_mode(self) -> None:
        """Raise ValueError if the engines cannot run ahead of the ranks as configured, or nothing corrects for their older weights."""
        rollout, mode = self.rollout, f"rollout.mode={self.rollout.mode}"
        for key, needs in (("budget_tokens", "budget"), ("max_lag", "free")):
            value = getattr(rollout, key)
            if (rollout.mode == needs) != (value is not None):
                raise ValueError(f"rollout.{key}={value} with {mode}: {needs} needs it, and no other mode takes it")
        if rollout.mode == "sync":
            return
        if self.placement.engines == "shared":
            raise ValueError(f"{mode}: engines generate while ranks learn, but placement.engines=shared lets only one side work at a time")
        if self.algorithm.correction is None and self.train.old_logp != "rollout":
            raise ValueError(
                f"{mode}: responses then come from older weights than those in training, and nothing corrects for it: set "
                "algorithm.correction (such as {type: tis}), which weights each token by policy over engine, or train.old_logp=rollout, "
                "which takes the engine's log-probs as the old ones"
            )

    def _check_under_way(self) -> None:
        """Raise ValueError if responses may span several steps and a setting does not allow it."""
        mode, algorithm = self.rollout.mode, self.algorithm
        cut = mode == "budget"
        cannot = {
            "environment": cut and self.environment is not None,
            "rollout.stop": cut and bool(self.rollout.stop),
            "train.dynamic_sampling_rounds": self.train.dynamic_sampling_rounds is not None,
            f"algorithm.type={algorithm.type}": algorithm.needs_greedy,
        }
        for key in (key for key, present in cannot.items() if present and mode in ("budget", "free")):
            raise ValueError(f"{key}: does not go with rollout.mode={mode}, whose responses span several steps")

    @property
    def senders(self) -> int:
        """The number of ranks that send new weights to the engines."""
        sharing = self.rollout.replicas * self.rollout.devices if self.placement.engines == "shared" else 0
        return self.sync.senders(self.layout, sharing)

    @property
    def old_logp(self) -> Literal["forward", "update", "rollout"]:
        """Where the old log-probs of a step come from: a forward pass of their own, the update's own pass, or the engine."""
        sampled = self.distillation is not None and self.distillation.top_k is None  # the teacher is compared with the old log-probs
        compared = self.algorithm.needs_reference or sampled
        alone = self.algorithm.correction is None and not compared and not self.algorithm.selects and self.routing.replay != "r2"
        if self.train.old_logp == "auto":
            return "update" if alone and self.train.mini_batches == self.train.epochs == 1 else "forward"
        return self.train.old_logp

    def _check_critic_tokens(self) -> None:
        """Raise ValueError if the critic's micro-batches are smaller than a response, or (on shared ranks) than the policy's."""
        given, longest = None if self.critic is None else self.critic.micro_batch_tokens, self._longest
        if given is None:
            return
        if self.placement.critic is not None and given < longest:
            raise ValueError(f"critic.micro_batch_tokens={given} is below rollout.max_prompt_tokens+max_response_tokens={longest}")
        if self.placement.critic is None and given < self.train.micro_batch_tokens:
            raise ValueError(
                f"critic.micro_batch_tokens={given} is below train.micro_batch_tokens={self.train.micro_batch_tokens}, "
                "and critic and policy share ranks"
            )


class ValueConfig(TrainConfig):
    """`megarl value`: only the critic of an RL run is trained. train.steps is ignored."""

    @property
    def total_steps(self) -> int:
        return 0 if self.critic is None else self.critic.pretrain_steps

    @property
    def steps_key(self) -> str | None:
        return None
