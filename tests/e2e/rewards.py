"""A reward that random weights earn in every degree, so that a few steps have a signal."""


def share_of_letters(*, prompt: str, response: str, answer: str, meta: dict[str, object]) -> float:
    """The share of ASCII letters in the response."""
    return sum(character.isascii() and character.isalpha() for character in response) / max(1, len(response))
