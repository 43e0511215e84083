"""An agent as people have them: a loop over OpenAI's client that plays the game of examples/agent/guess.py. It knows nothing of megarl."""

from __future__ import annotations

import os
from typing import Any

from openai import OpenAI

from examples.agent.guess import Guess


def play(task: dict[str, Any]) -> float:
    """Play the game of `task["seed"]`, and return whether the number was found."""
    client, model = OpenAI(max_retries=0), os.environ["OPENAI_MODEL"]
    game, over, reward = Guess(), False, 0.0
    messages: list[Any] = [{"role": "user", "content": game.reset(task["seed"])}]
    while not over:
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
        guess = answer.choices[0].message.content or ""
        said, reward, over = game.step(guess, [], answer.choices[0].finish_reason == "stop")
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": said}]
    return reward
