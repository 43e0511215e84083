"""Text of others (a model, a server, a client) made fit for a console and for one line of an error."""

from __future__ import annotations

LONGEST = 1500  # characters of a line, unless its reader wants fewer


def printable(text: str) -> str:
    """Without what moves a terminal's cursor, changes its colours or the direction of writing."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def one_line(text: str, most: int = LONGEST) -> str:
    """Printable, on one line, cut to `most` characters with an ellipsis."""
    line = printable(" ".join(text[: 4 * most].split()))  # what is far beyond the cut is not looked at
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def escaped(text: str) -> str:
    """With `\\x1b` and the like for what a terminal would obey or hide; newlines and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode() for letter in text)
