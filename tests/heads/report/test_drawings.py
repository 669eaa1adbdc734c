"""Numbers, tables and drawings as a page shows them."""

import re

import numpy as np
import pytest
from tick_labels import labels_apart

from xret.heads.report.figures import heat_map, number
from xret.heads.report.plots import curves


def test_numbers_as_the_tables_show_them():
    assert [number(value) for value in (None, 1234.567, -0.001, -2.5)] == ["–", "1,234.57", "0.00", "−2.50"]
    table = heat_map("c", "x", [[-0.5, 2.0]], digits=1, whole=(0.0, 4.0))
    assert table.rows == [["1", "−0.5", "2.0"]]
    assert table.heat == [[0.0, 0.5]]
    assert heat_map("c", "x", [[50.0, 69.1], [84.5, 90.0]]).heat == [[0.0, pytest.approx(0.4775)],
                                                                     [pytest.approx(0.8625), 1.0]]  # fmt: skip
    assert heat_map("c", "x", [[2.0, 2.0]]).heat == [[0.0, 0.0]]


def test_a_drawing_takes_the_colours_of_the_page():
    drawing = curves([("one", [1, 2], [1.0, 3.0]), ("a < b", [1, 2], [2.0, 200.0])], "epoch", "loss", log=True)
    assert not re.search("#[0-9a-fA-F]{6}", re.sub(r'href="#|url\(#', "", drawing))
    assert {"var(--ink)", "var(--series-1)", "var(--series-2)"} <= set(re.findall(r"var\(--[a-z0-9-]+\)", drawing))
    texts = re.findall("<text[^>]*>([^<]*)</text>", drawing)
    assert {"epoch", "loss", "one", "a &lt; b"} <= set(texts)
    assert drawing == curves([("one", [1, 2], [1.0, 3.0]), ("a < b", [1, 2], [2.0, 200.0])], "epoch", "loss", log=True)


@pytest.mark.parametrize("values", [[-1187.15, -1186.97], [-40.7485, -40.7468], [0.0, 0.0]])
def test_numbers_below_a_drawing_have_room(values):
    series = [("images", np.linspace(*values, 11).tolist(), list(range(11)))]
    labels, _ = labels_apart(lambda: curves(series, "uncertainty", "below (%)"))
    assert len(labels) > 1


@pytest.mark.filterwarnings("error")
def test_names_of_a_legend_are_shown_as_they_are():
    names = ["_first", "cost_$5$", "$\\foo$", "<script>"]
    drawing = curves([(name, [1, 2], [1.0, 3.0]) for name in names], "epoch", "loss")
    texts = [text.strip("\N{ZERO WIDTH SPACE}") for text in re.findall("<text[^>]*>([^<]*)</text>", drawing)]
    assert {"_first", "cost_$5$", "$\\foo$", "&lt;script&gt;"} <= set(texts)
    assert "<script>" not in drawing
