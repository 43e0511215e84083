"""A reward of one's own: the share of letters that are right, in their places."""


def score(response: str, answer: str) -> float:
    """1 for the answer, 0 where no letter is right or the length is not."""
    return sum(ours == theirs for ours, theirs in zip(response, answer, strict=True)) / len(answer) if len(response) == len(answer) else 0.0
