"""An agent of the end-to-end tests."""

import os
from typing import Any

from openai import OpenAI


def play(task: dict[str, Any]) -> dict[str, float]:
    """Earn the share of letters in the first answer; of games whose seed 4 divides none ends well."""
    client: Any = OpenAI(max_retries=0)

    def ask(*said: str) -> str:
        messages = [{"role": "user" if turn % 2 == 0 else "assistant", "content": text} for turn, text in enumerate(said)]
        return str(client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages).choices[0].message.content)

    first = ask(f"begin {task['seed']}")
    ask(f"begin {task['seed']}", first, "go on")
    ask(f"begin {task['seed']}", first, "or so")
    ask("another")
    if task["seed"] % 4 == 0:
        raise ValueError("no end")
    share = sum(map(str.isalpha, first)) / max(1, len(first))
    return {"reward": share, "word": share}
