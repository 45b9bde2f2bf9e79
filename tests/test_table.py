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


def test_names_are_not_folded_where_they_are_to_be_kept_whole() -> None:
    name = "encoder." * 14
    lines = text_table(("name", "two words"), [(name, "1"), ("b", "22")], whole=("name",)).splitlines()
    assert [line.split() for line in lines[:2]] == [["name", "two"], ["words"]]
    assert lines[3].split() == [name, "1"]
    assert text_table(("name", "two words"), [("b", "22")], whole=("name",)).splitlines()[0] == "name  two words"


def test_a_name_wider_than_the_table_is_kept_whole_too() -> None:
    lines = text_table(("name", "size"), [("x" * 2 * WIDTH, "1234")], whole=("name",)).splitlines()
    assert lines[2] == "x" * 2 * WIDTH + "  1234"
