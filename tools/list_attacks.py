"""Write the tables of tests/attacks.md: which signals, bad inputs and hostile responses the tests try, and the required outcome of each.

    python -m tools.list_attacks

The lists are the tests' own data. In a line, … stands for any text.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.e2e.test_faults import FAULTS, chosen
from tests.unit.bad_input.test_table import CPU_S, MEMORY_MB
from tests.unit.bad_input.test_table import TABLE as INPUTS
from tests.unit.sandbox.test_hostile import EXPECTED, NOTHING, Beginnings

PAGE = Path(__file__).parents[1] / "tests" / "attacks.md"
BEGIN, END = "<!-- attacks: written by tools/list_attacks.py -->", "<!-- end of the attacks -->"
ANY_TEXT = re.compile(r"(?:\\[dwS]|\[\\w \]|\.)[*+]|\.\{\d+,\d+\}|\\d")


def readable(pattern: str) -> str:
    """Make a regular expression for a line readable."""
    text = ANY_TEXT.sub("…", re.sub(r"\(([^()|]*\.\*[^()|]*)\)\?", "…", pattern))
    text = re.sub(r"(?<!\\)[$^]|(?<=x)\{\d+\}", "", text)
    text = re.sub(r"(?<!\\)\(([^()]*?)(?<!\\)\)\??", r"\1", text)
    return re.sub("…+", "…", re.sub(r"\\(.)|\[\.\]", lambda match: match[1] or ".", text.replace("|", " or "))).strip()


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(re.sub(r'[|<*`]', lambda match: f'&#{ord(match[0])};', cell) for cell in row)} |"


def section(head: str, outcome: str, lines: Iterable[str]) -> Iterator[str]:
    yield from (f"## {head}", "", outcome, "", *lines, "")


def score(value: float | None, error: Beginnings) -> str:
    """Return the expected outcome of a hostile sample."""
    if (value, error) == NOTHING:
        return "0: it got nothing"
    if value is not None:
        return f"{value:g}"
    errors = error if isinstance(error, tuple) else (error,)
    return f"none: {' or '.join((one or '').strip(' :') for one in errors)}"


def attacks() -> str:
    """Return the sections of the page."""
    signals = ((fault.victim, fault.number.name, str(fault.status), readable(fault.line)) for fault in FAULTS)
    inputs = ((case.verb, case.name.removeprefix(f"{case.verb} "), readable(case.line)) for case in INPUTS)
    responses = ((name.replace("_", " "), score(*come_to)) for name, come_to in EXPECTED.items())
    return "\n".join(
        [
            *section(
                "Signals",
                f"{len(chosen())} signals, of {len(FAULTS)} kinds, in every phase: how the run ends, and goes on afterwards.",
                table(("process", "signal", "exit status", "last line"), signals),
            ),
            *section(
                "Bad inputs",
                f"{len(INPUTS)} bad inputs: exit status 2 and one line within {CPU_S:g} s and {MEMORY_MB} MB.",
                table(("megarl", "what is wrong", "the line"), inputs),
            ),
            *section(
                "Hostile responses",
                f"{len(EXPECTED)} hostile responses: what the sample scores; its neighbours score as ever.",
                table(("what runs", "score"), responses),
            ),
        ]
    ).rstrip("\n")


def page(text: str) -> str:
    """Return a page with its sections brought up to date."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{attacks()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
