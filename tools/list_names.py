"""The table of other systems' keys in `megarl/config/README.md`, made from the hints that a refused key gets. `--write` writes it."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megarl.config.hints import ALIASES, NO_KEY

PAGE = Path(__file__).parents[1] / "megarl" / "config" / "README.md"
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


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into the page")
    if parser.parse_args().write:
        PAGE.write_text(PAGE.read_text().partition(START)[0] + START + table())
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
