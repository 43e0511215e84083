"""The page of upstream mends is the one that the code makes."""

from tools.list_upstream import PAGE, START, mends, table


def test_page_lists_every_mend() -> None:
    assert PAGE.read_text().partition(START)[2] == table()


def test_every_mend_says_what_it_mends() -> None:
    assert len(mends()) > 20
    assert [mend for mend in mends() if not mend.summary] == []
