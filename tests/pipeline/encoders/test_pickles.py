"""Pickles whose tuples hold one another too often are found before anything is read."""

import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xret.pipeline.encoders.pickles import require_modest
from xret.pipeline.encoders.weights import read_weights
from xret.pipeline.errors import EncoderError


def nested(depth):
    value = (1, 2)
    for _ in range(depth):
        value = (value, value)
    return value


def refused(raw):
    with pytest.raises(ValueError, match="too often"):
        require_modest(io.BytesIO(raw))


PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.tuples(inner, inner)
        | st.lists(inner, min_size=3).map(tuple)
        | inner.map(lambda one: (one, one, one, one))
    ),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_other_pickles_are_looked_through_to_their_end(value, protocol):
    file = io.BytesIO(pickle.dumps(value, protocol) + b"the next")
    require_modest(file)
    assert file.read() == b"the next"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nested_tuples(protocol):
    require_modest(io.BytesIO(pickle.dumps({nested(12): 1}, protocol)))
    refused(pickle.dumps([nested(40)], protocol))  # as a key it would be hashed, which is not to be tried
    wide = (0,)
    for _ in range(4):
        wide = (wide,) * 1000
    refused(pickle.dumps([wide], protocol))
    many = nested(18)
    refused(pickle.dumps([many] * 1000, protocol))


def test_what_a_call_makes_of_tuples_counts_as_they_do():
    refused(pickle.dumps([torch.Size, *[(torch.Size, nested(40))]]))
    size = b"ctorch\nSize\n"
    raw = b"\x80\x02" + size + b"K\x01\x85\x85R" + b"".join(b"q%c" % k + b"h%c\x86" % k for k in range(40)) + b"."
    refused(raw)


@pytest.mark.parametrize(
    "raw", [b"", b"\x80\x02", b"\x80\x020", b"\x80\x02t.", b"\x80\x02q\x00.", b"\x80\x02\x85.", b"hello"]
)
def test_what_is_no_pickle(raw):
    with pytest.raises(ValueError):
        require_modest(io.BytesIO(raw))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.timeout(60)
def test_weights_with_such_keys_are_refused_at_once(tmp_path, zipped):
    state = {"a.weight": torch.ones(2), "deep": [nested(60)]}
    torch.save(state, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(EncoderError, match="or it is damaged"):
        read_weights(tmp_path / "x.pth")
