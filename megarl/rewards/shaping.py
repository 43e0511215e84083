"""Reward shaping after the verifier: punishment of answers that run into the length limit."""


def overlong_punishment(length: int, limit: int, buffer: int) -> float:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), to be added to the reward.

    Args:
        length: the number of tokens in the response.
        limit: the longest response.
        buffer: how many tokens before the limit the punishment begins.

    Returns:
        0 up to limit - buffer tokens; then linear, -1 at `limit`; -1 beyond.

    Raises:
        ValueError: unless 0 < buffer <= limit.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"overlong buffer of {buffer} tokens must be between 1 and the limit of {limit}")
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))
