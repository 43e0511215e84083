"""Signs that a run is going wrong: each is a named warning, given once."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megarl.config import RoutingSettings
from megarl.observe.dead_runs import SIGNS, STEPS, TEACHER, UNSCORED, Values, learned_nothing

# A collapse is a fall below this share of the first value. Only in reinforcement learning: supervised training lowers entropy by design.
COLLAPSE = {
    "entropy_collapse": ("actor/entropy", 0.01),
    "length_collapse": ("response_length/mean", 0.1),
}
BIAS = 0.1  # share of the returns' variance that the bias of the critic's values by position costs
PROFILE = "critic_by_position/"
FALL = 3.0  # standard errors by which the held-out score is below its best while the reward has risen
SMOOTHED = 3  # the reward is averaged over this many steps


@dataclass(frozen=True)
class Lasting:
    """A metric above its limit, which is an alarm once it has been so for some steps in a row."""

    metric: str
    limit: float
    message: str  # may name {steps}, {limit} and every value of `_with_derived`
    steps: int = 3
    needs: str = ""  # a metric without which the steps count, but the alarm waits


def lasting_signs(routing: RoutingSettings | None, ahead: bool) -> dict[str, Lasting]:
    """Return the signs to look for in a run, by event name.

    Neither of the critic's is present if it is merely new or fits badly: a constant, however far off, has a bias and an explained variance
    of 0 (up to noise).
    """
    signs = {
        "critic_position_bias": Lasting(
            "critic/position_bias",
            BIAS,
            "critic position bias: for {steps} steps the values' bias by position has cost more than {limit:.0%} of the returns' variance, "
            "now {critic/position_bias:.0%}; {widest}",
        ),
        "critic_worse_than_mean": Lasting(
            "unexplained",
            0.02,
            "critic worse than mean: it trains the policy, and for {steps} steps its explained variance has been below -{limit:g}, now "
            "{critic/explained_variance:.3g}: one constant value would do better",
            steps=10,
            needs="actor/grad_norm",
        ),
        "kl_beyond_target": Lasting(
            "kl_by_target",
            2.0,
            "KL beyond target: for {steps} steps more than {limit:g} times algorithm.kl_target={actor/kl_target:g}, now "
            "{actor/reference_kl:.3g} nats per response; raise algorithm.kl_coef or shorten algorithm.kl_horizon",
        ),
        "reward_outside_range": Lasting(
            "outside",
            0.25,
            "reward outside range: for {steps} steps the reward model has scored more than {limit:.0%} of the responses beyond all "
            "held-out pairs of its training, now {outside:.0%}; train it on samples of this policy (`megarl pairs`)",
        ),
    }
    for name, who, replays, remedy in (
        ("rollout", "the engine and the trainer", ("r3",), "r3"),
        ("policy", "the old and the new policy", ("r2", "r3"), "r2 or r3"),
    ):
        if routing is not None and routing.replay not in replays:
            signs[f"{name}_routing"] = Lasting(
                metric := f"routing/{name}_changed_frac",
                routing.alarm,
                f"{name} routing: for {{steps}} steps {who} chose different experts in more than routing.alarm={{limit:.0%}} of the choices"
                f", now {{{metric}:.0%}}; set routing.replay to {remedy}",
            )
    for side, advice in (("ranks", "give the engines more devices"), ("engines", "give the ranks more devices, or the engines fewer")):
        if ahead:
            signs[f"{side}_starved"] = Lasting(
                metric := f"perf/idle_{side}",
                0.5,
                f"{side} starved: for {{steps}} steps they have had nothing to do for more than {{limit:.0%}} of the time, now "
                f"{{{metric}:.0%}}, although the engines are ahead of the ranks; {advice}",
                steps=10,
            )
    return signs


def _with_derived(values: Values) -> dict[str, Any]:
    """Return a step's metrics with what the signs need besides."""
    row: dict[str, Any] = dict(values)
    if "critic/position_bias" in values:
        row["widest"] = _widest(values)
    if "critic/explained_variance" in values:
        row["unexplained"] = -values["critic/explained_variance"]
    if {"actor/reference_kl", "actor/kl_target"} <= values.keys():
        row["kl_by_target"] = values["actor/reference_kl"] / values["actor/kl_target"]
    if outside := [share for name, share in values.items() if name.startswith("reward/") and name.endswith("/outside/mean")]:
        row["outside"] = outside[0]
    return row


class Alarms:
    """Watches the scalars of each step.

    Args:
        routing: the routing settings, for a run whose model may be a mixture of experts.
        ahead: whether engines and ranks work at the same time.
    """

    def __init__(self, routing: RoutingSettings | None = None, *, ahead: bool = False) -> None:
        self._table = lasting_signs(routing, ahead)
        self._first: dict[str, float] = {}
        self._first_step: dict[str, float] = {}  # the first value of each metric
        # Policy steps: all, those with zero gradient, those whose rewards are all equal, those with most responses cut off and unscored.
        self._steps = self._still = self._equal = self._unscored = 0
        self._given: set[str] = set()
        self._lasted: dict[str, int] = {}  # for how many steps in a row each sign has been present
        self._rewards: deque[float] = deque(maxlen=SMOOTHED)  # mean rewards of the last steps
        # For each set: the best held-out score, the reward at that time, and the score's standard error.
        self._best: dict[str, tuple[float, float | None, float]] = {}

    def check(self, step: int, values: Values) -> dict[str, str]:
        """Return the alarms that are new in this step: event name to a message with the numbers."""
        messages = {f"non_finite/{name}": f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)}
        messages |= self._collapses(values) | self._lasting(values) | self._overoptimisation(values) | self._dead(values)
        new = {event: f"step {step}: {message}" for event, message in messages.items() if event not in self._given}
        self._given |= new.keys()
        return new

    def _streak(self, sign: str, present: bool) -> int:
        """Record whether the sign is present in this step; return for how many steps in a row it has been."""
        self._lasted[sign] = self._lasted.get(sign, 0) + 1 if present else 0
        return self._lasted[sign]

    def _lasting(self, values: Values) -> dict[str, str]:
        """Return the signs that have lasted for their number of steps."""
        messages, row = dict[str, str](), _with_derived(values)
        for event, sign in self._table.items():
            enough = sign.metric in row and self._streak(event, row[sign.metric] > sign.limit) >= sign.steps
            if enough and (sign.needs or sign.metric) in row:
                messages[event] = sign.message.format_map(row | {"steps": self._lasted[event], "limit": sign.limit})
        return messages

    def _dead(self, values: Values) -> dict[str, str]:
        """Return the signs of a dead run that have lasted for several steps in a row, with advice."""
        if "reward/mean" not in values:  # no step of reinforcement learning
            return {}
        for name, value in values.items():
            self._first_step.setdefault(name, value)
        messages = {}
        for event, sign in SIGNS.items():
            what = sign.seen(values, self._first_step)
            if what is not None and self._streak(event, bool(what)) >= STEPS:
                messages[event] = f"{event.replace('_', ' ')}: for {self._lasted[event]} steps {what}; {sign.advice}"
        if "actor/grad_norm" in values:
            self._steps += 1
            self._still += values["actor/grad_norm"] == 0
            self._equal += TEACHER not in values and values.get("reward/min") == values.get("reward/max", math.nan)
            self._unscored += values.get("reward/unscored", 0.0) > UNSCORED
        return messages

    def at_the_end(self) -> dict[str, str]:
        """Return the alarms that concern the run as a whole."""
        message = learned_nothing(self._steps, self._still, self._equal, self._unscored)
        return {} if message is None else {"learned_nothing": message}

    def _collapses(self, values: Values) -> dict[str, str]:
        messages = {}
        for event, (name, share) in COLLAPSE.items():
            value = values.get(name)
            if value is not None and "reward/mean" in values:
                first = self._first.setdefault(name, value)
                if value < share * first:
                    messages[event] = f"{event.replace('_', ' ')}: {name} is {value:.3g}, down from {first:.3g} at first"
        return messages

    def _overoptimisation(self, values: Values) -> dict[str, str]:
        """Detect a policy that exploits the reward instead of doing what was meant (arXiv:2210.10760)."""
        messages = dict[str, str]()
        for name, rate in values.items():
            place, _, kind = name.rpartition("/")
            if name.startswith("eval/") and kind.startswith("avg@") and not place.endswith("_base"):
                error = values.get(f"{place}/stderr")
                messages |= {} if error is None or messages.get("over_optimisation") else self._held_out(place, rate, error)
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
            for place, (best, then, error) in self._best.items():
                if then is None:
                    self._best[place] = (best, self._rewards[-1], error)
        return messages

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


def _widest(values: Values) -> str:
    """Describe the positions at which mean value and mean return are furthest apart."""
    places = [int(name.rpartition("_")[2]) for name in values if name.startswith(f"{PROFILE}value_from_")]
    pairs = {place: (values[f"{PROFILE}value_from_{place}"], values[f"{PROFILE}return_from_{place}"]) for place in places}
    if not pairs:
        return ""
    place, (value, goal) = max(pairs.items(), key=lambda pair: abs(pair[1][0] - pair[1][1]))
    return f"tokens {place} to {2 * place - 1}: mean value {value:.3g}, mean return {goal:.3g}"
