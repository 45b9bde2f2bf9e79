"""The plain text table."""

from gradscale._table import WIDTH, text_table


def test_a_table_is_as_wide_as_its_cells_and_has_no_colours() -> None:
    assert text_table(("name", "size"), [("[red]a", "1"), ("bb", "22")]) == (
        "name    size\n────────────\n[red]a  1\nbb      22\n"
    )


def test_a_cell_that_is_too_long_is_folded_and_loses_nothing() -> None:
    lines = text_table(("name", "size"), [("x" * 2 * WIDTH, "1")]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "".join(lines).count("x") == 2 * WIDTH
