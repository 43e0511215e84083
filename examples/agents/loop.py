"""An agent as people have them: a loop over OpenAI's client, which knows nothing of megarl.

It looks at each answer as a careful caller does, without knowing the right one: what is not made of the word's own letters is asked for
again, in a conversation that begins anew.
"""

import os
from typing import Any

from openai import OpenAI

TRIES = 3


def solve(task: dict[str, Any]) -> dict[str, float]:
    """Ask the question of a row until the answer is plausible. Return whether it is right, and how often was asked."""
    client, model, question = OpenAI(max_retries=0), os.environ["OPENAI_MODEL"], str(task["prompt"])
    letters, tries = sorted(question.split()[-1]), 0
    while tries < TRIES:
        tries += 1
        asked = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}])
        [choice] = asked.choices
        answer = choice.message.content or ""
        if choice.finish_reason == "stop" and sorted(answer) == letters:
            break
    right = choice.finish_reason == "stop" and answer == task["answer"]
    return {"reward": float(right), "tries": float(tries)}
