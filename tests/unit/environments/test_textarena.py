"""TextArena's games for one player, on a stand-in with its interface: it is no dependency of megarl's.

The real one (0.7.4) was played in the sandbox on 2026-11-23: GuessTheNumber, TowerOfHanoi, FrozenLake, Blackjack, Sudoku.
"""

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.environments.adapters import load
from megarl.environments.protocol import begin, read_step


class Guess:
    """Find a number below ten; an observation is all that was ever said, and three guesses are all."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        if num_players != 1:
            raise AssertionError(f"The number of players has to be 1, received {num_players}")
        self.secret, self.said, self.left = random.Random(seed).randrange(10), "[GAME] Guess.", 3
        self.rewards: dict[int, float] | None = None

    def get_observation(self) -> tuple[int, str]:
        return 0, self.said

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.left -= 1
        self.said += f"\n[Player] {action}\n[GAME] {'higher' if int(action) < self.secret else 'lower'}"
        if int(action) == self.secret or not self.left:
            self.rewards = {0: float(int(action) == self.secret)}
        return self.rewards is not None, {}

    def close(self) -> tuple[dict[int, float] | None, dict[int, Any]]:
        return self.rewards, {0: {"role": "Player 0", "invalid_move": False}}


class Older(Guess):
    """In earlier versions a game gives its rewards alone."""

    def close(self) -> Any:
        return super().close()[0]


@pytest.mark.parametrize("kind", [Guess, Older])
def test_a_textarena_game_explains_itself_once_and_rewards_at_its_end(kind: type[Guess], monkeypatch: pytest.MonkeyPatch) -> None:
    games = {"Guess-v0": kind}
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda env_id: games[env_id]()))
    make, seed = load({"type": "textarena", "id": "Guess-v0"}), 3
    secret = random.Random(seed).randrange(10)
    assert 0 < secret < 9
    for guesses, reward in (([0, secret], 1.0), ([9, 0, 9], 0.0)):
        game = make()
        assert begin(game, seed, None).messages == [{"role": "user", "content": "[GAME] Guess."}]
        *before, last = [read_step(game.step(str(guess), [1], True)) for guess in guesses]
        hints = ["higher" if guess < secret else "lower" for guess in guesses[:-1]]
        said = [f"\n[Player] {guess}\n[GAME] {hint}" for guess, hint in zip(guesses, hints, strict=False)]
        assert [turn.messages for turn in before] == [[{"role": "user", "content": text}] for text in said], "what is new alone"
        assert all((turn.reward, turn.done) == (0.0, False) for turn in before)
        assert (last.messages, last.reward, last.done) == (None, reward, True)


def test_a_missing_game_is_an_error_of_its_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(env_id: str) -> Guess:
        raise ValueError(f"Environment {env_id} not found in registry.")

    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=make))
    with pytest.raises(ValueError, match="Nothing-v0 not found"):
        begin(load({"type": "textarena", "id": "Nothing-v0"})(), 1, None)
