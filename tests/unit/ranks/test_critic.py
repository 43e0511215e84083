"""What the driver knows of the critic: explained variance that merges, the end of value pretraining, health by position."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algorithms.value import explained_variance_sums
from megarl.batch import Batch, Sample, pack
from megarl.config import CriticSettings
from megarl.engines.episodes import chained
from megarl.observe.alarms import BIAS, Alarms, lasting_signs
from megarl.observe.metrics import Explained, Mean, Metric, merge, scalars
from megarl.ranks.critic import critic_metrics
from megarl.step.pretraining import PATIENCE, ValuePretraining

STEPS = {event: sign.steps for event, sign in lasting_signs(None, ahead=False).items()}
BIASED_STEPS, WORSE_STEPS = STEPS["critic_position_bias"], STEPS["critic_worse_than_mean"]


def explained(value_T: Tensor, return_T: Tensor) -> Explained:
    return Explained(*explained_variance_sums(value_T, return_T, torch.ones(len(value_T), dtype=torch.bool)).tolist())


def test_explained_variance_is_the_same_from_any_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    goal, guess = torch.randn(50, generator=generator), torch.randn(50, generator=generator)
    parts = [explained(guess[s], goal[s]) for s in (slice(0, 7), slice(7, 50))]
    expected = 1 - float((goal - guess).double().var() / goal.double().var())
    assert scalars(merge([{"x": part} for part in parts]))["x"] == pytest.approx(expected, rel=1e-6)
    assert scalars({"x": explained(goal, goal)}) == {"x": 1.0}
    assert scalars({"x": explained(guess, torch.full((50,), 0.1))}) == {}, "a goal that does not vary has nothing to explain"


LENGTHS = [1, 2, 3, 5, 9, 17, 30, 64, 64]


def critic_batch(value: Callable[[Tensor, Tensor], Tensor]) -> Batch:
    """Responses of LENGTHS, the shorter ones the better; `value` of (position from 1, return) at each token."""
    prompt = 4
    batch = pack([Sample(np.arange(prompt + length, dtype=np.int32), prompt, np.zeros(length, np.float32), "stop") for length in LENGTHS])
    return_T = batch.spread(torch.linspace(1, 0, len(LENGTHS)))
    value_T = value((batch.position_T - prompt + 2).clamp(min=1).float(), return_T)
    return batch.with_extra(**{"value": value_T, "return": return_T, "outcome": return_T, "advantage": return_T - value_T})


def test_means_by_position_are_those_of_the_tokens() -> None:
    batch = critic_batch(lambda position_T, return_T: position_T)
    shown = scalars(critic_metrics(batch))
    returns = torch.linspace(1, 0, len(LENGTHS)).tolist()
    for start in (1, 2, 4, 8, 16, 32, 64):
        here = [(p, goal) for length, goal in zip(LENGTHS, returns, strict=True) for p in range(start, 2 * start) if p <= length]
        means = [sum(row[k] for row in here) / len(here) for k in (0, 1)]
        assert shown[f"critic_by_position/value_from_{start}"] == pytest.approx(means[0])
        assert shown[f"critic_by_position/return_from_{start}"] == pytest.approx(means[1], abs=1e-6)
        assert shown[f"critic_by_position/advantage_from_{start}"] == pytest.approx(means[1] - means[0], abs=1e-5)
    assert "critic_by_position/value_from_128" not in shown


def test_the_metrics_of_the_critic_are_the_same_from_any_split() -> None:
    batch = critic_batch(lambda position_T, return_T: return_T + position_T.sqrt() / 8)
    whole = scalars(critic_metrics(batch))
    split = scalars(merge(critic_metrics(batch.take(part)) for part in torch.randperm(len(batch)).split(50)))
    assert split == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_a_tools_tokens_count_as_places_of_the_response_and_explain_nothing() -> None:
    mask = np.array([True, True, False, False, True, True])
    zeros = np.zeros(6, np.float32)
    batch = pack([Sample(np.arange(9, dtype=np.int32), 3, zeros, "stop", loss_mask=mask)] * 2)
    place_T = (batch.position_T - 1).float()  # from 1
    value_T = torch.where(batch.mask_T, place_T, torch.inf)
    shown = scalars(critic_metrics(batch.with_extra(value=value_T, outcome=place_T, advantage=place_T, **{"return": place_T})))
    assert shown["critic_by_position/value_from_1"] == 1.0 and shown["critic_by_position/value_from_2"] == 2.0
    assert shown["critic_by_position/value_from_4"] == 5.5 and "critic/explained_variance_middle" not in shown


def test_a_token_of_a_rewritten_context_has_its_place_there() -> None:
    """The second context reads 6 tokens, of which 3 are the opening, then samples 6: once each, at the places from 4 on."""
    zeros = np.zeros(6, np.float32)
    first = Sample(np.arange(5, dtype=np.int32), 3, zeros[:2], "stop")
    batch = pack([chained([first, Sample(np.arange(12, dtype=np.int32), 6, zeros, "stop")])])
    assert batch.begin_T is not None and int(batch.mask_T.sum()) == 8
    place_T = (batch.position_T - batch.begin_T - 1).float()  # from 1
    value_T = torch.where(batch.mask_T, place_T, torch.inf)
    metrics = critic_metrics(batch.with_extra(value=value_T, outcome=place_T, advantage=place_T, **{"return": place_T}))
    means = {name.rpartition("_")[2]: one for name, one in metrics.items() if name.startswith("critic_by_position/value")}
    assert means == {"1": Mean(1.0, 1.0), "2": Mean(2.0, 1.0), "4": Mean(22.0, 4.0), "8": Mean(17.0, 2.0)}
    counts = {name: metrics[f"critic/explained_variance_{name}"] for name in ("early", "middle", "late")}
    assert counts == {name: explained(torch.tensor(own), torch.tensor(own)) for name, own in THIRDS.items()}


THIRDS = {"early": [1.0], "middle": [2.0, 4.0, 5.0, 6.0], "late": [7.0, 8.0, 9.0]}  # of 2 and of 9 tokens after the opening


def noisy(value: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda position_T, return_T: value(position_T, return_T) + 0.05 * torch.randn(len(return_T), generator=generator)


HEALTHY = {
    "perfect": lambda position_T, return_T: return_T,
    "far off": lambda position_T, return_T: torch.full_like(return_T, -7.0),
    "fresh": noisy(lambda position_T, return_T: torch.zeros_like(return_T)),
    "weak": noisy(lambda position_T, return_T: 0.1 * return_T),
}
BROKEN = {
    "rising": lambda position_T, return_T: position_T / 32,
    "rising on top of what is right": lambda position_T, return_T: return_T + position_T.log(),
    "wrong at the first tokens": lambda position_T, return_T: torch.where(position_T < 4, 3.0, 0.5),
}


@pytest.mark.parametrize("name", [*HEALTHY, *BROKEN])
def test_bias_by_position_tells_a_broken_critic_from_one_that_is_new_or_fits_badly(name: str) -> None:
    shown = scalars(critic_metrics(critic_batch((HEALTHY | BROKEN)[name])))
    assert (shown["critic/position_bias"] > BIAS) == (name in BROKEN)
    alarms = Alarms()
    given = [set(alarms.check(step, shown)) for step in range(1, BIASED_STEPS + 2)]
    expected = {"critic_position_bias"} if name in BROKEN else set()
    assert given == [*[set()] * (BIASED_STEPS - 1), expected, set()], "after some steps on end, and once"


def test_bias_by_position_is_what_lies_between_positions_of_the_explained_variance() -> None:
    """Values that are the same for all tokens of an octave: what they explain lies between positions alone."""
    batch = critic_batch(lambda position_T, return_T: position_T.log2().floor() / 4)
    shown = scalars(critic_metrics(batch))
    assert shown["critic/position_bias"] == pytest.approx(-shown["critic/explained_variance"], rel=1e-4)


def test_targets_that_follow_the_critic_do_not_hide_its_bias() -> None:
    """Lambda 0: the target of a token is the value of the next one."""
    batch = critic_batch(lambda position_T, return_T: return_T + position_T / 32)
    shown = scalars(critic_metrics(batch.with_extra(**{"return": batch.extra_T["value"] + 1 / 32})))
    assert shown["critic/explained_variance"] == pytest.approx(1.0) and shown["critic/position_bias"] > BIAS


def test_the_alarm_of_a_biased_critic_says_where() -> None:
    shown = scalars(critic_metrics(critic_batch(BROKEN["wrong at the first tokens"])))
    alarms = Alarms()
    [message] = [text for step in range(1, BIASED_STEPS + 1) for text in alarms.check(step, shown).values()]
    assert "tokens 2 to 3: mean value 3, mean return 0.408" in message and f"step {BIASED_STEPS}: critic position bias" in message


@pytest.mark.parametrize(("explained", "frozen", "alarm"), [(-0.1, False, True), (-0.1, True, False), (-0.01, False, False)])
def test_a_critic_that_is_worse_than_a_constant_is_named_once_it_leads_the_policy(explained: float, frozen: bool, alarm: bool) -> None:
    alarms, found = Alarms(), dict[str, str]()
    for step in range(1, WORSE_STEPS + 1):
        last = {} if frozen or step < WORSE_STEPS else {"actor/grad_norm": 1.0}
        found |= alarms.check(step, {"critic/explained_variance": explained, **last})
    assert set(found) == ({"critic_worse_than_mean"} if alarm else set())


def losses(value: float) -> dict[str, Metric]:
    return {"critic/vf_loss": Mean(value, 1.0)}


def test_value_pretraining_ends_at_its_limit_or_when_the_loss_falls_no_more() -> None:
    assert not ValuePretraining(None).active
    limited = ValuePretraining(CriticSettings(pretrain_steps=3))
    for _ in range(3):
        assert limited.active
        limited.observe(losses(1.0))
    assert not limited.active
    falling, flat = (ValuePretraining(CriticSettings(pretrain_steps=100, pretrain_tolerance=0.01)) for _ in range(2))
    for step in range(2 * PATIENCE):
        assert falling.active and flat.active
        falling.observe(losses(0.98**step))
        flat.observe(losses(1.0))
    assert falling.active and not flat.active
