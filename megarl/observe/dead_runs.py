"""Signs that a run learns nothing or diverges, and what to try."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Values = Mapping[str, float]
Seen = Callable[[Values, Values], str | None]
"""Takes the metrics of a step and of the first step; returns the sign with its numbers, "" if it is absent, None if that is unknown."""

STEPS = 3  # a sign present for this many steps in a row is not chance
TRUNCATED = 0.99  # share of the responses that counts as all of them
UNSCORED = 0.5  # share of responses that are cut off and score 0 for it, above which they are the majority
MISSING = 0.25  # share of responses without a score, above which the reward or the environment has a fault
EXPLODED, NATS = 3.0, 1.0  # entropy: more than this multiple of the first value, and above it by more than this
TOKEN_KL = 0.5  # nats per token from the reference
STEP_KL = 0.2  # nats per token from the policy before the step's updates
ENGINE_KL = 0.1  # nats per token between engine and trainer, whether they compute differently or the policy was updated in between
TEACHER = "distillation/reverse_kl"  # the metric of a run with a teacher, which learns without rewards
LONGER, CUT = 2.0, 0.5  # length: above this multiple of the first; more than this share cut off, from less than half of it at first


@dataclass(frozen=True)
class Sign:
    """A sign, and what to do if it lasts."""

    seen: Seen
    advice: str


def _truncated(now: Values, first: Values) -> str | None:
    share = now.get("response_length/clip_ratio")
    if share is None:
        return None
    return f"{share:.0%} of the responses are cut by the length limit" if share >= TRUNCATED else ""


def _unscored(now: Values, first: Values) -> str | None:
    share = now.get("reward/unscored")
    if share is None or TEACHER in now:
        return None
    return f"{share:.0%} of the responses are cut by the length limit and score 0 unread" if share > UNSCORED else ""


def _missing(now: Values, first: Values) -> str | None:
    share = now.get("reward/missing")
    if share is None:
        return None
    return f"{share:.0%} of the responses have no score, and take no part" if share > MISSING else ""


def _rewards_equal(now: Values, first: Values) -> str | None:
    lowest, highest = now.get("reward/min"), now.get("reward/max")
    if lowest is None or highest is None or TEACHER in now:
        return None
    return f"all responses score {highest:g}" if lowest == highest else ""


def _groups_equal(now: Values, first: Values) -> str | None:
    share = now.get("frac_reward_zero_std")
    if share is None or "critic/vf_loss" in now or TEACHER in now:  # a critic learns from rewards that differ between prompts alone
        return None
    return "the responses to each prompt all score the same" if share >= 1 and not _rewards_equal(now, first) else ""


def _no_gradient(now: Values, first: Values) -> str | None:
    norm = now.get("actor/grad_norm")
    if norm is None:
        return None
    return "the policy's gradient is 0" if norm == 0 else ""


def _entropy(now: Values, first: Values) -> str | None:
    entropy, before = now.get("actor/entropy"), first.get("actor/entropy")
    if entropy is None or before is None or "reward/mean" not in now:
        return None
    return f"actor/entropy is {entropy:.3g}, up from {before:.3g} at first" if entropy > max(EXPLODED * before, before + NATS) else ""


def _reference(now: Values, first: Values) -> str | None:
    kl, length = now.get("actor/reference_kl"), now.get("response_length/mean")
    if kl is None or not length:
        return None
    return f"the KL to the reference is {kl / length:.3g} nats per token" if kl > TOKEN_KL * length else ""


def _step(now: Values, first: Values) -> str | None:
    kl = now.get("actor/ppo_kl")
    if kl is None:
        return None
    return f"a step moves the policy by {kl:.3g} nats per token (actor/ppo_kl)" if kl > STEP_KL else ""


def _engine(now: Values, first: Values) -> str | None:
    kl = now.get("rollout_corr/kl")
    if kl is None:
        return None
    return f"engine and trainer differ by {kl:.3g} nats per token (rollout_corr/kl)" if kl > ENGINE_KL and not _lag(now) else ""


def _stale(now: Values, first: Values) -> str | None:
    kl = now.get("rollout_corr/kl")
    if kl is None:
        return None
    moved = (
        f"the policy has moved by {kl:.3g} nats per token (rollout_corr/kl) in the {_lag(now):.2g} updates since its responses were sampled"
    )
    return moved if kl > ENGINE_KL and _lag(now) else ""


def _lag(now: Values) -> float:
    return now.get("rollout/lag_mean", 0.0)


def _length(now: Values, first: Values) -> str | None:
    cut, before = now.get("response_length/clip_ratio"), first.get("response_length/clip_ratio")
    mean, start = now.get("response_length/mean"), first.get("response_length/mean")
    if cut is None or before is None or mean is None or start is None:
        return None
    runaway = mean > LONGER * start and cut > CUT > 2 * before
    return f"responses have {mean:.0f} tokens, up from {start:.0f} at first; {cut:.0%} are cut off, up from {before:.0%}" if runaway else ""


READ = "read some: megarl samples RUN"
SIGNS = {
    "all_truncated": Sign(
        _truncated,
        "raise rollout.max_response_tokens, ask for shorter answers in the prompt, or find out why the model does not stop by itself (chat "
        f"template, eos_token); {READ} --truncated",
    ),
    "responses_unscored": Sign(
        _unscored,
        "reward.require_finished=true causes this: raise rollout.max_response_tokens, ask for shorter answers, or set "
        f"reward.require_finished=false, which has the reward read them; {READ} --truncated",
    ),
    "rewards_missing": Sign(
        _missing, f"events/reward/<kind> counts the reasons: mend the reward or the environment, or give them more time; {READ}"
    ),
    "rewards_equal": Sign(
        _rewards_equal,
        "nothing can be learned from this: if they score 0, the task is too hard or the reward does not find the answer (its "
        f"format, reward.require_finished); if they get the highest reward, it is too easy; {READ} --best",
    ),
    "groups_equal": Sign(
        _groups_equal,
        "group advantages are then 0: use prompts that the policy sometimes solves, more rollout.samples_per_prompt, a higher "
        "rollout.temperature, or train.dynamic_sampling_rounds",
    ),
    "no_gradient": Sign(
        _no_gradient, f"the weights do not change: all rewards are equal, or no response is used (train.drop_truncated); {READ}"
    ),
    "entropy_explosion": Sign(
        _entropy, "lower optimizer.lr, raise algorithm.kl_coef, or lower an entropy bonus; the policy is turning into noise"
    ),
    "kl_runs_away": Sign(_reference, "raise algorithm.kl_coef, set algorithm.kl_target, or lower optimizer.lr"),
    "steps_too_large": Sign(_step, "lower optimizer.lr, train.epochs or train.mini_batches, or clip more tightly"),
    "engine_differs": Sign(
        _engine,
        "the responses come from a different distribution than the policy's: set algorithm.correction, the same rollout.dtype and "
        "model.dtype, fp32_head on both sides, and for an MoE routing.replay=r3",
    ),
    "responses_too_old": Sign(_stale, "lower optimizer.lr, rollout.max_lag, or raise rollout.budget_tokens"),
    "length_runs_away": Sign(
        _length, f"set reward.overlong or train.drop_truncated, or raise rollout.max_response_tokens; {READ} --truncated"
    ),
}


def learned_nothing(steps: int, still: int, equal: int, unscored: int) -> str | None:
    """Return the message with which a run ends if it cannot have learned anything, else None.

    Args:
        steps: steps of the policy.
        still: steps whose gradient was 0.
        equal: steps whose responses all scored the same.
        unscored: steps in which most responses scored 0 because they were cut off.
    """
    why = f"; in {unscored} of them most responses were cut off and scored 0 unread (reward.require_finished)" if unscored else ""
    if steps and still == steps:
        return f"learned nothing: the gradient was 0 in all {steps} steps of the policy{why}"
    if steps and equal == steps:
        return f"learned nothing from the reward: all responses scored the same in each of {steps} steps of the policy{why}"
    return None
