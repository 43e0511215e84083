"""Agents as people have them: loops over OpenAI's client, which know nothing of megarl."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

MODEL = "tiny-agent"


def ask(client: Any, messages: list[dict[str, Any]], **more: Any) -> str:
    """One answer, added to the conversation as most loops do."""
    answer = client.chat.completions.create(model=MODEL, messages=messages, **more).choices[0].message
    messages.append({"role": "assistant", "content": answer.content})
    return str(answer.content)


def branching(task: dict[str, Any]) -> dict[str, float]:
    """Two turns; a fork of the first; a conversation that forgets its beginning; two sub-agents at once."""
    client = OpenAI()
    messages = [{"role": "user", "content": f"begin {task['seed']}"}]
    ask(client, messages)
    forked = [*messages]
    ask(client, [*messages, {"role": "user", "content": "go on"}])
    ask(client, [*forked, {"role": "user", "content": "or so"}], temperature=0.0, seed=1)
    compacted = [{"role": "user", "content": "in short"}]
    ask(client, compacted)
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda name: ask(OpenAI(), [{"role": "user", "content": name}]), ("left", "right")))
    ask(client, [*compacted, {"role": "user", "content": "end"}])
    return {"reward": task["seed"] / 100, "said": float(sum(map(len, said)))}
