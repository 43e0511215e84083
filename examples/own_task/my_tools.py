"""A tool of one's own, which the model may call: any function with types and a docstring."""


def upper(word: str) -> str:
    """Writes a word in capitals.

    Args:
        word: the word.
    """
    return word.upper()
