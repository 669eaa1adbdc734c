"""Tables of numbers as a terminal shows them."""

from xret.heads.evaluation.number_table import NumberTable


def test_two_digits_thousands_and_a_dash_for_what_is_not_known():
    table = NumberTable(
        "Percent", ["row", "value"], [["a", 1234.5], ["b", None], ["c", -0.001], ["d", -2.345], ["e", 7]]
    )
    assert [row[1] for row in table.cells] == ["1,234.50", "–", "0.00", "−2.35", "7"]
    assert [line.split() for line in str(table).splitlines()[1:3]] == [["row", "value"], ["a", "1,234.50"]]
