"""Agents of the end-to-end tests."""

import base64
import io
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


def look(task: dict[str, Any]) -> float:
    """Show one picture, then a second one in the same conversation; earn the share of letters in the first answer."""
    from PIL import Image

    client: Any = OpenAI(max_retries=0)

    def shown(size: int) -> dict[str, Any]:
        file = io.BytesIO()
        Image.new("RGB", (20 + task["seed"] % 30, size), (255, 0, size)).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "which?"}]}

    def ask(*messages: dict[str, Any]) -> str:
        return str(client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages).choices[0].message.content)

    first = ask(shown(24))
    ask(shown(24), {"role": "assistant", "content": first}, shown(40))
    return sum(map(str.isalpha, first)) / max(1, len(first))
