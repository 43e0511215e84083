"""A stock agent: `Agent` and `Runner` of openai-agents as they are, and what any user of that package writes around them.

As loop.py it looks at each answer without knowing the right one, and asks again if that is not made of the question's own letters.
"""

import os
from typing import Any

from agents import Agent, Runner
from agents.exceptions import AgentsException

TRIES = 3


def solve(task: dict[str, Any]) -> dict[str, float]:
    """Ask the question of a row until the answer is plausible. Return whether it is right, and how often was asked."""
    question, answer, tries = str(task["prompt"]), "", 0
    speller = Agent[Any]("speller", model=os.environ["OPENAI_MODEL"])
    while tries < TRIES:
        tries += 1
        try:
            answer = str(Runner.run_sync(speller, question).final_output)
        except AgentsException:  # an answer that was longer than allowed
            answer = ""
        if sorted(answer) == sorted(question.split()[-1]):
            break
    return {"reward": float(answer == task["answer"]), "tries": float(tries)}
