"""The table of other systems' keys in `megarl/config/coming_from.md`, made from the hints that a refused key gets. `--write` writes it."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megarl.config.hints import ALIASES, NO_KEY
from tools.list_upstream import show_or_write

PAGE = Path(__file__).parents[1] / "megarl" / "config" / "coming_from.md"
START = "<!-- python -m tools.list_names --write -->\n"


def table() -> str:
    """The table in Markdown: a key, or what stands instead of one, and its names elsewhere."""
    names = defaultdict[str, list[str]](list)
    for name, keys in ALIASES.items():
        names[_cell(keys)].append(name)
    for name, reason in NO_KEY.items():
        names[f"none: {reason}"].append(name)
    rows = [f"| {key} | {', '.join(f'`{name}`' for name in others)} |" for key, others in names.items()]
    return "\n".join(["| here | elsewhere |", "|---|---|", *rows]) + "\n"


def _cell(aliases: Sequence[str]) -> str:
    keys, comments = zip(*((key, colon + comment) for key, colon, comment in (alias.partition(": ") for alias in aliases)), strict=True)
    return ", ".join(f"`{key}`" for key in keys) + "".join(dict.fromkeys(comments))


if __name__ == "__main__":
    show_or_write(__doc__, PAGE, START, table())
