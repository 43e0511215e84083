"""Signs that a run is going wrong: each is a named warning, given once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean

from megarl.config import RoutingSettings
from megarl.observe.dead_runs import SIGNS, STEPS, UNSCORED, learned_nothing

# A collapse is a fall below this share of the first value. Only in reinforcement learning: supervised training lowers entropy by design.
COLLAPSE = {
    "entropy_collapse": ("actor/entropy", 0.01),
    "length_collapse": ("response_length/mean", 0.1),
}
BIAS, BIASED_STEPS = 0.1, 3  # critic/position_bias above this share of the returns' variance, this many steps in a row
WORSE, WORSE_STEPS = -0.02, 10  # critic/explained_variance below this (0 up to noise), this many steps in a row
PROFILE = "critic_by_position/"
KL_EXCESS, KL_STEPS = 2.0, 3  # actor/reference_kl above this multiple of its target, this many steps in a row
OUTSIDE, OUTSIDE_STEPS = 0.25, 3  # reward/outside/mean above this, this many steps in a row
FALL = 3.0  # standard errors by which the held-out score is below its best while the reward has risen
SMOOTHED = 3  # the reward is averaged over this many steps
STARVED, STARVED_STEPS = 0.5, 10  # perf/idle_ranks or perf/idle_engines above this although engines run ahead, this many steps in a row
REROUTED_STEPS = 3  # share of changed expert choices above routing.alarm, this many steps in a row


class Alarms:
    """Watches the scalars of each step.

    Args:
        routing: the routing settings, for a run whose model may be a mixture of experts.
        ahead: whether engines and ranks work at the same time.
    """

    def __init__(self, routing: RoutingSettings | None = None, *, ahead: bool = False) -> None:
        self._routing, self._ahead = routing, ahead
        self._first: dict[str, float] = {}
        self._first_step: dict[str, float] = {}  # the first value of each metric
        # Policy steps: all, those with zero gradient, those whose rewards are all equal, those with most responses cut off and unscored.
        self._steps = self._still = self._equal = self._unscored = 0
        self._given: set[str] = set()
        self._lasted: dict[str, int] = {}  # for how many steps in a row each sign has been present
        self._rewards: deque[float] = deque(maxlen=SMOOTHED)  # mean rewards of the last steps
        # For each set: the best held-out score, the reward at that time, and the score's standard error.
        self._best: dict[str, tuple[float, float | None, float]] = {}

    def check(self, step: int, values: Mapping[str, float]) -> dict[str, str]:
        """Return the alarms that are new in this step: event name to a message with the numbers."""
        found = {f"non_finite/{name}": f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)}
        found |= self._collapses(values) | self._critic(values) | self._overoptimisation(values) | self._rerouted(values)
        found |= self._dead(values) | self._starved(values)
        new = {event: f"step {step}: {message}" for event, message in found.items() if event not in self._given}
        self._given |= new.keys()
        return new

    def _lasts(self, sign: str, there: bool) -> int:
        """Record whether the sign is present in this step; return for how many steps in a row it has been."""
        self._lasted[sign] = self._lasted.get(sign, 0) + 1 if there else 0
        return self._lasted[sign]

    def _dead(self, values: Mapping[str, float]) -> dict[str, str]:
        """Return the signs of a dead run that have lasted for several steps in a row, with advice."""
        if "reward/mean" not in values:  # no step of reinforcement learning
            return {}
        for name, value in values.items():
            self._first_step.setdefault(name, value)
        found = {}
        for event, sign in SIGNS.items():
            what = sign.seen(values, self._first_step)
            if what is not None and self._lasts(event, bool(what)) >= STEPS:
                found[event] = f"{event.replace('_', ' ')}: for {self._lasted[event]} steps {what}; {sign.advice}"
        if "actor/grad_norm" in values:
            self._steps += 1
            self._still += values["actor/grad_norm"] == 0
            self._equal += values.get("reward/min") == values.get("reward/max", math.nan)
            self._unscored += values.get("reward/unscored", 0.0) > UNSCORED
        return found

    def at_the_end(self) -> dict[str, str]:
        """Return the alarms that concern the run as a whole."""
        message = learned_nothing(self._steps, self._still, self._equal, self._unscored)
        return {} if message is None else {"learned_nothing": message}

    def _collapses(self, values: Mapping[str, float]) -> dict[str, str]:
        found = {}
        for event, (name, share) in COLLAPSE.items():
            value = values.get(name)
            if value is not None and "reward/mean" in values:
                first = self._first.setdefault(name, value)
                if value < share * first:
                    found[event] = f"{event.replace('_', ' ')}: {name} is {value:.3g}, down from {first:.3g} at first"
        return found

    def _critic(self, values: Mapping[str, float]) -> dict[str, str]:
        """Detect a critic whose values depend on position more than the returns do, or one that guides the policy but is worse than none.

        Neither fires for a critic that is merely new or fits badly: a constant, however far off, has a bias and an explained variance of 0.
        """
        found = {}
        bias, explained = values.get("critic/position_bias"), values.get("critic/explained_variance")
        if bias is not None:
            steps = self._lasts("biased", bias > BIAS)
            if steps >= BIASED_STEPS:
                found["critic_position_bias"] = (
                    f"critic position bias: for {steps} steps the values' bias by position has cost more than {BIAS:.0%} of the "
                    f"returns' variance, now {bias:.0%}; {_widest(values)}"
                )
        if explained is not None:
            steps = self._lasts("worse", explained < WORSE)
            if steps >= WORSE_STEPS and "actor/grad_norm" in values:
                found["critic_worse_than_mean"] = (
                    f"critic worse than mean: it trains the policy, and for {steps} steps its explained variance has been below "
                    f"{WORSE:g}, now {explained:.3g}: one constant value would do better"
                )
        return found

    def _starved(self, values: Mapping[str, float]) -> dict[str, str]:
        """Detect ranks that wait for engines, or engines for ranks, although both may work at the same time."""
        found = {}
        for side, advice in (("ranks", "give the engines more devices"), ("engines", "give the ranks more devices, or the engines fewer")):
            share = values.get(f"perf/idle_{side}")
            if share is None or not self._ahead:
                continue
            steps = self._lasts(f"{side} starved", share > STARVED)
            if steps >= STARVED_STEPS:
                found[f"{side}_starved"] = (
                    f"{side} starved: for {steps} steps they have had nothing to do for more than {STARVED:.0%} of the time, "
                    f"now {share:.0%}, although the engines are ahead of the ranks; {advice}"
                )
        return found

    def _rerouted(self, values: Mapping[str, float]) -> dict[str, str]:
        """Detect tokens that an update routes to other experts than those behind their log-probs, unless routing replay prevents it."""
        found = {}
        settings = self._routing
        for name, who, remedied, remedy in (
            ("rollout", "the engine and the trainer", ("r3",), "r3"),
            ("policy", "the old and the new policy", ("r2", "r3"), "r2 or r3"),
        ):
            share = values.get(f"routing/{name}_changed_frac")
            if settings is None or share is None or settings.replay in remedied:
                continue
            steps = self._lasts(f"{name} rerouted", share > settings.alarm)
            if steps >= REROUTED_STEPS:
                found[f"{name}_routing"] = (
                    f"{name} routing: for {steps} steps {who} chose different experts in more than routing.alarm={settings.alarm:.0%} "
                    f"of the choices, now {share:.0%}; set routing.replay to {remedy}"
                )
        return found

    def _overoptimisation(self, values: Mapping[str, float]) -> dict[str, str]:
        """Detect signs that the policy exploits the reward instead of doing what was meant (arXiv:2210.10760)."""
        found = {}
        kl, target = values.get("actor/reference_kl"), values.get("actor/kl_target")
        if kl is not None and target is not None:
            steps = self._lasts("far", kl > KL_EXCESS * target)
            if steps >= KL_STEPS:
                found["kl_beyond_target"] = (
                    f"KL beyond target: for {steps} steps more than {KL_EXCESS:g} times algorithm.kl_target={target:g}, now {kl:.3g} "
                    "nats per response; raise algorithm.kl_coef or shorten algorithm.kl_horizon"
                )
        outside = next((share for name, share in values.items() if name.startswith("reward/") and name.endswith("/outside/mean")), None)
        if outside is not None:
            steps = self._lasts("outside", outside > OUTSIDE)
            if steps >= OUTSIDE_STEPS:
                found["reward_outside_range"] = (
                    f"reward outside range: for {steps} steps the reward model has scored more than {OUTSIDE:.0%} of the responses "
                    f"beyond all held-out pairs of its training, now {outside:.0%}; train it on samples of this policy (`megarl pairs`)"
                )
        for name, rate in values.items():
            place, _, kind = name.rpartition("/")
            if name.startswith("eval/") and kind.startswith("avg@") and not place.endswith("_base"):
                error = values.get(f"{place}/stderr")
                found |= {} if error is None or found.get("over_optimisation") else self._held_out(place, rate, error)
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
            for place, (best, then, error) in self._best.items():
                if then is None:
                    self._best[place] = (best, self._rewards[-1], error)
        return found

    def _held_out(self, place: str, rate: float, error: float) -> dict[str, str]:
        """Detect a held-out score that falls while the reward rises.

        Args:
            place: eval/<set>.
            rate: the score.
            error: the score's standard error.
        """
        reward = fmean(self._rewards) if self._rewards else None
        if place not in self._best or rate > self._best[place][0]:
            self._best[place] = (rate, reward, error)
            return {}
        best, then, best_error = self._best[place]
        fall = FALL * math.hypot(best_error, error)
        if then is None or reward is None or reward <= then or rate >= best - fall:
            return {}
        return {
            "over_optimisation": f"over-optimisation: the held-out score of {place.removeprefix('eval/')} is {rate:.3g}, down from "
            f"{best:.3g}, while the reward has risen from {then:.3g} to {reward:.3g}; stop at the best evaluation, raise algorithm.kl_coef "
            "(lower kl_target) or fix the reward"
        }


def _widest(values: Mapping[str, float]) -> str:
    """Describe the positions at which mean value and mean return are furthest apart."""
    places = [int(name.rpartition("_")[2]) for name in values if name.startswith(f"{PROFILE}value_from_")]
    pairs = {place: (values[f"{PROFILE}value_from_{place}"], values[f"{PROFILE}return_from_{place}"]) for place in places}
    place, (value, goal) = max(pairs.items(), key=lambda pair: abs(pair[1][0] - pair[1][1]))
    return f"tokens {place} to {2 * place - 1}: mean value {value:.3g}, mean return {goal:.3g}"
