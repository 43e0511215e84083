"""What other systems compute, as settings of the algorithms here: `algorithm.as` adds them below the keys that the user gives.

Read from the sources of verl (1dda039b), TRL (1.16.0), slime (624b824a), OpenRLHF (3c3be623) and NeMo-RL (7ea279ab), of July and August
2026, with the defaults of their configurations. Only numerics are here: no coefficient of a KL or an entropy, no rate, no length.
"""

from collections.abc import Mapping
from typing import Any, Literal

Peer = Literal["verl", "trl", "slime", "openrlhf", "nemo_rl", "paper"]
Values = Mapping[str, Any]

TITLES: dict[str, str] = {"verl": "verl", "trl": "TRL", "slime": "slime", "openrlhf": "OpenRLHF", "nemo_rl": "NeMo-RL"}

_DUAL: Values = {"dual_clip": 3.0}
_TOKENS: Values = {"aggregation": "token-mean"}
_CLIP: Values = {"clip_low": 0.2, "clip_high": 0.2}
_ALL: Values = {"sequence_count": "all"}
_ROWS: Values = {"aggregation": "seq-mean-token-mean", "sequence_count": "all"}
_POPULATION: Values = {"whiten_variance": "population"}
_TRL: Values = {
    "scale_eps": 1e-4,
    "kl_clamp": None,
    "correction": {"type": "mis", "level": "sequence", "lo": 0.0, "hi": 3.0},
}
_TRL_TOKENS: Values = {**_TRL, "kl_importance_weighted": True}
_OTHERS: Values = {"baseline": "leave_one_out", "scale": "others"}

# By system and `algorithm.type`. `paper` is the defaults of every algorithm.
SETTINGS: dict[str, dict[str, Values]] = {
    "verl": {
        "ppo": {**_DUAL, **_TOKENS, "gae_lambda": 1.0, "value_clip": 0.5},
        "grpo": {**_DUAL, **_TOKENS},
        "dapo": {**_DUAL, "clip_high": 0.2},
        "dr_grpo": _DUAL,
        "gspo": {**_CLIP, **_ALL},
        "gmpo": {**_CLIP, **_ALL},
        "cispo": _CLIP,
        "sapo": _ALL,
        "dppo": {"delta_low": 0.2, "delta_high": 0.2, "ratio_cap": 3.0},
        "reinforce_pp": _DUAL,
        "reinforce_pp_baseline": _DUAL,
    },
    "trl": {
        "grpo": {**_TRL_TOKENS, **_ALL},
        "dapo": {**_TRL_TOKENS, "clip_high": 0.2},
        "dr_grpo": {**_TRL_TOKENS, "scale": "group"},
        "gspo": {**_TRL, **_CLIP, **_ALL},
        "cispo": _TRL_TOKENS,
        "sapo": {**_TRL_TOKENS, **_ALL},
        "luspo": {**_TRL, **_CLIP, **_ALL},
        "gdpo": {**_TRL_TOKENS, **_TOKENS},
        "deepseek_v32": {**_TRL, **_ALL},
        "rloo": {"ratio": "sequence", **_CLIP, **_ALL, "scale_eps": 1e-4},
    },
    "slime": {
        "ppo": {**_ROWS, "gae_lambda": 1.0, "whiten": False},
        "grpo": _ALL,
        "gspo": {**_CLIP, **_ALL},
        "cispo": {**_CLIP, **_ROWS},
        "reinforce_pp": _ROWS,
        "reinforce_pp_baseline": _ROWS,
    },
    "openrlhf": {
        "ppo": {**_TOKENS, **_POPULATION, "gae_lambda": 1.0, "value_clip": 0.5, "masked_steps": "zero"},
        "grpo": {**_TOKENS, "scale_eps": 1e-9},
        "dr_grpo": _TOKENS,
        "reinforce_pp": _POPULATION,
        "reinforce_pp_baseline": _POPULATION,
    },
    "nemo_rl": {
        "grpo": {**_OTHERS, **_TOKENS},
        "gspo": {**_OTHERS, **_CLIP},
        "cispo": {**_OTHERS, **_CLIP},
        "reinforce_pp": _POPULATION,
        "reinforce_pp_baseline": _POPULATION,
    },
}
# Where the KL is in the reward, and what the critic's section gets.
IN_REWARD: dict[str, dict[str, Values]] = {
    "verl": {"reinforce_pp_baseline": {"kl_at": "sequence"}},
    "slime": {"reinforce_pp_baseline": {"kl_at": "token"}},
    "nemo_rl": {"reinforce_pp": {"kl_at": "token"}, "reinforce_pp_baseline": {"kl_at": "token"}},
}
CRITIC: dict[str, dict[str, Values]] = {"slime": {"ppo": {"aggregation": "seq-mean-token-mean", "loss_coef": 1.0}}}


def expand(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's tree with the settings of the system that `algorithm.as` names; keys that are given stay as they are.

    Raises:
        ValueError: the system has no such algorithm, or none that these settings make equal.
    """
    given = tree.get("algorithm")
    peer, kind = (given.get("as"), given.get("type")) if isinstance(given, dict) else (None, None)
    if peer not in SETTINGS or not isinstance(given, dict):
        return tree
    if kind not in SETTINGS[peer]:
        raise ValueError(f"algorithm.as={peer}: no settings here make {kind} {TITLES[peer]}'s (they do for {', '.join(SETTINGS[peer])})")
    in_reward = given.get("kl_in", "reward" if kind == "reinforce_pp" else "loss") == "reward"
    values = {**SETTINGS[peer][kind], **(IN_REWARD.get(peer, {}).get(kind, {}) if in_reward else {})}
    fitting = {name: value for name, value in values.items() if not _idle(name, given)}
    expanded = {**tree, "algorithm": {**fitting, **given}}
    if isinstance(critic := tree.get("critic"), dict):
        expanded["critic"] = {**CRITIC.get(peer, {}).get(kind, {}), **critic}
    return expanded


def _idle(name: str, given: Values) -> bool:
    """Whether a key has no meaning beside what the user gives, and would be refused."""
    return {
        "sequence_count": given.get("aggregation") == "token-mean",
        "kl_importance_weighted": given.get("kl_in") == "reward" or given.get("kl_straight_through") is True,
        "whiten_variance": given.get("whiten") is False,
        "clip_low": given.get("ratio") == "token",
        "clip_high": given.get("ratio") == "token",
    }.get(name, False)


def shown(peer: str, algorithm: Mapping[str, Any]) -> str:
    """Say in one line what `algorithm.as` has set, and which of it the user has set otherwise.

    Args:
        peer: its value.
        algorithm: the section `algorithm` as plain values, with every key.
    """
    kind = algorithm["type"]
    if peer == "paper":
        return f"algorithm.as=paper: the defaults of {kind}"
    below = IN_REWARD.get(peer, {}).get(kind, {}) if algorithm["kl_in"] == "reward" else {}
    values = {**SETTINGS[peer][kind], **below}
    own = [name for name, value in values.items() if _differs(algorithm[name], value)]
    settings = ", ".join(f"{name}={_plain(value)}" for name, value in values.items() if name not in own) or "nothing but the defaults"
    yours = f"; set otherwise: {', '.join(f'{name}={_plain(algorithm[name])}' for name in own)}" if own else ""
    return f"algorithm.as={peer}: {settings}{yours}"


def _differs(given: Any, value: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(given, Mapping):
        return any(given.get(name) != inner for name, inner in value.items())
    return bool(given != value)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_plain(inner)}" for name, inner in value.items()) + "}"
    return (
        "null"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
