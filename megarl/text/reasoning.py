"""Responses without the reasoning before them."""

REASONING = {  # what begins a model's reasoning, and what ends it or begins the answer
    "<think>": "</think>",
    "[THINK]": "[/THINK]",  # Ministral 3
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",  # gpt-oss
}


def after_reasoning(response: str) -> str:
    """Return what a response says after its reasoning; nothing if that has not ended.

    The reasoning may have begun in the prompt. What it tries and rejects is no answer.
    """
    for opening, end in REASONING.items():
        _, ended, rest = response.rpartition(end)
        response = "" if not ended and rest.lstrip().startswith(opening) else rest
    return response
