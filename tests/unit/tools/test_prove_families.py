"""The table of the proven families: rows of some families replace theirs alone."""

from tools.prove_families import BEGIN, COLUMNS, END, lines, written

CELLS = [str(number) for number in range(len(COLUMNS) - 1)]


def test_the_rows_of_a_page_are_read_as_they_were_written() -> None:
    proven = {"qwen3": CELLS, "llama": ["2e-06", "**FAILED**", *CELLS[2:]]}
    page = "\n".join(["before", BEGIN, "A heading.", "", *lines(proven), END, "| `mistral` | elsewhere |"])
    assert written(page) == proven


def test_families_are_listed_in_the_order_of_the_tool_that_makes_them() -> None:
    table = lines({"glm4_moe": CELLS, "qwen3_moe": CELLS})
    assert [line.split("`")[1] for line in table[2:]] == ["qwen3_moe", "glm4_moe"]


def test_a_page_without_a_table_has_no_rows() -> None:
    assert written("no table here") == {}
