"""Factories of environments, for the sources that run in the sandbox. Imported only there."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from megarl.imports import gc_paused

WHERE = "looked for in the current folder and on PYTHONPATH; it runs in a sandbox, to which environment.sandbox gives files and variables"


def load(source: dict[str, Any]) -> Callable[[], Any]:
    """Return a factory of environments for an `environment.source` section. Raises ValueError, starting with the key within it."""
    kind = source["type"]
    if kind == "reasoning_gym":
        return _reasoning_gym(source)
    if kind == "textarena":
        return _textarena(source["id"])
    factory, params = named(source["path"]), source["params"]
    if kind == "gymnasium":
        return lambda: Gymnasium(factory(**params))
    missing = [name for name in ("reset", "step") if not callable(getattr(factory, name, None))]
    if missing:
        raise ValueError(f"path: {source['path']} has no method {' and no '.join(missing)}")
    try:
        factory(**params)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"params: {source['path']} refuses {params}: {type(error).__name__}: {error}") from None
    return lambda: factory(**params)


def named(path: str) -> Any:
    """Import and return the callable at module:name. Raises ValueError, starting with "path: ", if there is none."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"path: cannot import module {module_name!r}: {type(error).__name__}: {error} ({WHERE})") from None
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ValueError(f"path: module {module_name!r} has no {'class or function' if factory is not None else 'attribute'} {name!r}")
    return factory


class Gymnasium:
    """Adapts a gymnasium environment whose observations and actions are texts.

    Its interface: reset(seed=) -> (observation, info); step(action) -> (observation, reward, terminated, truncated, info).
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def reset(self, seed: int) -> Any:
        """Return the first observation."""
        observation, _ = self._inner.reset(seed=seed)
        return observation

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> Any:
        """Pass the text to the environment as the action."""
        observation, reward, terminated, truncated, info = self._inner.step(text)
        return observation, float(reward), bool(terminated or truncated), info

    def close(self) -> None:
        """Close the inner environment, if it has a `close`."""
        getattr(self._inner, "close", lambda: None)()


def _reasoning_gym(source: dict[str, Any]) -> Callable[[], Any]:
    from megarl.rewards.verifiers import EVALUATING

    if source["dataset"] in EVALUATING:
        raise ValueError(f"dataset: {source['dataset']}: reasoning-gym's scorer evaluates the response as Python")
    name, params, threshold = source["dataset"], source["params"], source["threshold"]
    for key in ("seed", "size"):
        if key in params:
            raise ValueError(f"params.{key}: each episode has its own seed, and is one question")
    with gc_paused():
        from reasoning_gym import factory as gym
    if name not in gym.DATASETS:
        raise ValueError(f"dataset: reasoning-gym has no dataset {name!r}")

    class Question:
        """An episode of one question."""

        def reset(self, seed: int) -> str:
            """Draw the question and return its text."""
            self._data = gym.create_dataset(name, seed=seed, size=1, **params)
            self._entry = self._data[0]
            return self._entry["question"]

        def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[None, float, bool, dict[str, float]]:
            """Score the answer; one cut off by the length limit has a raw score of 0."""
            raw = float(self._data.score_answer(text.strip(), self._entry)) if finished else 0.0
            return None, float(raw >= threshold), True, {"raw": raw}

    return Question


def _textarena(name: str) -> Callable[[], Any]:
    try:
        textarena: Any = importlib.import_module("textarena")  # installed without its dependencies, so it cannot be an extra of megarl
    except Exception as error:
        raise ValueError(f"type: textarena cannot be imported: {type(error).__name__}: {error} (pip install --no-deps textarena)") from None

    class Game:
        """A single-player game."""

        def reset(self, seed: int) -> str:
            """Return the first observation."""
            self._game = textarena.make(env_id=name)
            self._game.reset(num_players=1, seed=seed)
            self._seen = self._game.get_observation()[1]
            return self._seen

        def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str | None, float, bool]:
            """Pass the text to the game as the action. The reward comes at the end of the game."""
            done, _ = self._game.step(action=text)
            if done:
                rewards = self._game.close()
                rewards = rewards[0] if isinstance(rewards, tuple) else rewards
                return None, float(rewards[0]), True
            before, self._seen = self._seen, self._game.get_observation()[1]
            return self._seen.removeprefix(before), 0.0, False  # an observation repeats all earlier ones, which the policy has read

    return Game
