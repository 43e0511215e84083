"""A reward for models that know nothing."""


def starts(response: str, answer: str) -> float:
    """A reward that random models get now and then."""
    return float(ord(response[0]) % 3 == ord(answer[0]) % 3) if response else 0.0
