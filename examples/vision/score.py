"""The reward of the questions about pictures."""


def score(response: str, answer: str) -> float:
    """Return 1 if the response is the answer, else 0."""
    return float(response.strip() == answer)
