"""The table as a whole: names that exist, arguments that bind, one row each."""

import pytest

from gigagrad.graphs import Row, lookup, operators
from gigagrad.graphs.table import operators as with_rows
from gigagrad.graphs.table import register


@pytest.mark.parametrize("op", with_rows())
def test_every_row_belongs_to_an_operator_that_exists(op):
    assert callable(operators.function(op))
    assert operators.signature(op)
    assert isinstance(lookup(op), Row)


@pytest.mark.parametrize("op", with_rows())
def test_arguments_that_rows_name_exist(op):
    """A row registered for an operator whose schema calls the argument otherwise would fail with a KeyError."""
    names = {name for name, _, _ in operators.signature(op)}
    row = lookup(op)
    for attribute in ("_dims", "_keepdim"):
        assert getattr(row, attribute, None) in {None, *names}


def test_one_row_per_operator():
    with pytest.raises(AssertionError, match="two rows"):
        register(lookup("aten.cat.default"), ["aten.cat.default"])


def test_binding_fills_defaults_and_orders_by_schema():
    bound = operators.bind("aten.conv2d.default", ("x", "w"), {"groups": 3})
    assert list(bound) == ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    assert bound["groups"] == 3
    assert bound["bias"] is None
    assert bound["stride"] == [1, 1]
