"""Values of a recipe: what YAML's text becomes by the kind that a key wants, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xret.heads.recipes.recipe import load_recipe
from xret.heads.recipes.schema import convert


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0, max_value=1e6))
def test_a_number_arrives_as_it_was_written(number):
    assert load_recipe("vsepp", [f"optimizer.lr={number!r}"]).optimizer.lr == number


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("1e-3", float, 0.001),
        (3, float, 3.0),
        ("3", int, 3),
        ("false", bool, False),
        (True, bool, True),
        ("null", int | None, None),
        ("None", float | None, None),
        ("7", int | None, 7),
        ("7", str, "7"),
        ("x", int | str, "x"),
        ("7", int | str, 7),
    ],
)
def test_converted_values(value, kind, expected):
    converted = convert(value, kind)
    assert (converted, type(converted)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *[(True, int), (1.5, int), ("1.5", int), (None, int), ({}, int | None)],
        *[(True, float), ("nan", float), ("inf", float), ([1], float)],
        *[(1, bool), ("yes", bool), (3, str)],
    ],
)
def test_refused_values(value, kind):
    with pytest.raises(ValueError, match=r"must be .*, not "):
        convert(value, kind)
