"""The page of other systems' keys is the one that the hints make."""

from megarl.config.hints import ALIASES, NO_KEY
from tools.list_names import PAGE, START, table


def test_page_lists_every_name() -> None:
    assert PAGE.read_text().partition(START)[2] == table()
    assert all(f"`{name}`" in table() for name in (*ALIASES, *NO_KEY))
