"""Make text from others (a model, a server, a client) fit for a terminal and for a one-line error."""

MAX_CHARS = 1500  # characters of a line, unless the caller wants fewer


def printable(text: str) -> str:
    """Replace characters that move a terminal's cursor, or change its colours or the direction of writing."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def one_line(text: str, most: int = MAX_CHARS) -> str:
    """Make text printable on one line, cut to `most` characters with an ellipsis."""
    line = printable(" ".join(text[: 4 * most].split()))  # what is far beyond the cut is not looked at
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def escaped(text: str) -> str:
    """Escape what a terminal would obey or hide, as `\\x1b` and the like; newlines and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode() for letter in text)
