"""Values of a recipe: what YAML's text becomes by the kind that a key wants, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xret.heads.recipes.recipe import load_recipe
from xret.heads.recipes.schema import convert
from xret.heads.recipes.settings import normalised, settings_of, value_of


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0, max_value=1e6))
def test_a_number_arrives_as_it_was_written(number):
    for settings in (
        {"optimizer.lr": number},
        settings_of([f"optimizer.lr={number!r}"]),
        {"optimizer": {"lr": number}},
    ):
        assert load_recipe("vsepp", settings).optimizer.lr == number


def test_equal_settings_are_equal_however_they_are_written():
    written = [
        "optimizer.lr=1e-3",
        "aggregator.image=gpo",
        "model.dim=8",
        "optimizer.ema=null",
    ]
    other = ["optimizer.lr=0.001", "aggregator.image.name=gpo", "model.dim=08", "optimizer.ema=Null"]
    assert settings_of(written) == settings_of(other)
    assert normalised({"optimizer.lr": "1e-3"}) == normalised({"optimizer": {"lr": 0.001}}) == {"optimizer.lr": 0.001}
    assert value_of("grid,roi") == "grid,roi" and value_of("none") == "none" and value_of(None) is None


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
        *[(1, bool), ("yes", bool), ([3], str)],
    ],
)
def test_refused_values(value, kind):
    with pytest.raises(ValueError, match=r"must be .*, not "):
        convert(value, kind)
