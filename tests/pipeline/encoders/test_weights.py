"""Files of weights: what is read, what is refused, and hashes."""

import argparse
import hashlib
import io
import os
import pickle
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from damage import damaged
from safetensors.torch import save, save_file
from torch import nn
from torchvision.models import get_model

from xret.pipeline.encoders.weights import digest, load_strictly, read_weights
from xret.pipeline.errors import EncoderError

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


def test_every_usual_form_of_file_is_read(tmp_path):
    save_file(STATE, tmp_path / "s.safetensors")
    torch.save(STATE, tmp_path / "plain.pth")
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in STATE.items()}}, tmp_path / "n.pth")
    torch.save({"model": STATE, "best": 0.5}, tmp_path / "m.pth")
    for path in sorted(tmp_path.iterdir()):
        read = read_weights(path)
        assert set(read) == set(STATE), path.name
        assert all(torch.equal(read[name], STATE[name]) for name in STATE), path.name


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("extra", [argparse.Namespace(lr=1), Bomb(), nn.Linear(1, 1)])
def test_pickled_objects_are_refused_and_not_run(tmp_path, monkeypatch, extra, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": STATE, "opt": extra}, "x.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(EncoderError, match=r"x\.pth.*pickled objects.*safetensors"):
        read_weights(tmp_path / "x.pth")
    assert not (tmp_path / "exploded").exists()


def test_a_plain_pickle_is_refused(tmp_path):
    (tmp_path / "x.pt").write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(EncoderError, match="pickled objects"):
        read_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["x.pth", "x.pt", "x.safetensors"])
@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html>", b"\x00" * 64, b"PK\x03\x04 torn"])
def test_what_is_no_file_of_weights_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EncoderError, match=rf"{name}: this is not a file of weights"):
        read_weights(tmp_path / name)


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
def test_a_truncated_file_is_refused(tmp_path, name):
    path = tmp_path / name
    big = {"a": torch.ones(4000)}
    save_file(big, path) if path.suffix == ".safetensors" else torch.save(big, path)
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(EncoderError, match="damaged; get it again"):
        read_weights(path)


def own_self():
    content = {"a": torch.ones(2)}
    content["b"] = content
    return content


def doubled():
    content = {"a": torch.ones(2)}
    for _ in range(15):
        content = {f"part{k}": content for k in range(8)}
    return content


HOSTILE = {
    "a mapping in itself": own_self,
    "a tree of eight to the fifteenth": doubled,
    "a tensor of one number, seen many times": lambda: {"a": torch.ones(1).expand(1 << 40)},
    "a tensor without memory": lambda: {"a": torch.ones(4, device="meta")},
    "a sparse tensor": lambda: {"a": torch.eye(4).to_sparse()},
    "a quantised tensor": lambda: {"a": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", HOSTILE)
@pytest.mark.parametrize("zipped", [True, False])
def test_what_would_grow_or_never_end_is_refused(tmp_path, fault, zipped):
    try:
        torch.save(HOSTILE[fault](), tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    except (RuntimeError, TypeError, AttributeError, AssertionError):
        pytest.skip("this torch writes no such file")
    with pytest.raises(EncoderError, match=r"x\.pth: "):
        read_weights(tmp_path / "x.pth")


def test_an_old_file_makes_no_room_for_what_it_only_announces(tmp_path):
    torch.save(STATE, tmp_path / "x.pth", _use_new_zipfile_serialization=False)
    raw = (tmp_path / "x.pth").read_bytes()
    at = raw.index(b"X\x08\x00\x00\x00a.weight")  # a text and its length
    (tmp_path / "x.pth").write_bytes(raw[: at + 1] + b"\xff\xff\xff\x7f" + raw[at + 5 :])
    tracemalloc.start()
    with pytest.raises(EncoderError, match=r"x\.pth: "):
        read_weights(tmp_path / "x.pth")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


def test_an_archive_that_is_packed_is_refused(tmp_path):
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "x.pth")
    with (
        zipfile.ZipFile(tmp_path / "x.pth") as old,
        zipfile.ZipFile(tmp_path / "y.pth", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(EncoderError, match="damaged; get it again"):
        read_weights(tmp_path / "y.pth")


def test_names_that_are_no_texts_are_left_out(tmp_path):
    torch.save({**STATE, (1, (2, 3)): torch.ones(1), 2**70: torch.ones(1)}, tmp_path / "x.pth")
    assert set(read_weights(tmp_path / "x.pth")) == set(STATE)


def test_arrays_that_are_no_numbers_are_no_weights(tmp_path):
    content = {"a.weight": np.ones(3, np.float32), "names": np.array(["x", None], dtype=object)}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(content))
    assert not isinstance(read_weights(tmp_path / "x.pkl", trust=True)["names"], torch.Tensor)


def saved(form):
    """Return the bytes of a file of weights, and whether it is read with trust."""
    buffer, state = io.BytesIO(), {f"layer{k}.weight": torch.randn(8, 9) for k in range(6)}
    if form == "safetensors":
        return save(state), False
    if form == "detectron":
        arrays = {name: value.numpy() for name, value in state.items()}
        return pickle.dumps({"model": arrays, "__author__": "x"}, protocol=2), True
    torch.save({"state_dict": state, "epoch": 3}, buffer, _use_new_zipfile_serialization=form == "zip")
    return buffer.getvalue(), False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns of what it then refuses
@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors", "detectron"])
def test_no_damage_gives_more_than_a_sentence(tmp_path, form):
    raw, trust = saved(form)
    path, rng, refused = tmp_path / f"x.{form if form == 'safetensors' else 'pth'}", np.random.default_rng(3), 0
    for number in range(1000):
        path.write_bytes(damaged(raw, rng))
        tracemalloc.start()
        began = time.monotonic()
        try:
            assert any(isinstance(value, torch.Tensor) for value in read_weights(path, trust).values())
        except EncoderError as error:
            assert "\n" not in str(error)
            refused += 1
        except BaseException:
            print(f"file {number} of {form}")
            raise
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert time.monotonic() - began < 60
        assert peak < 50e6 or trust, f"{peak:,.0f} bytes were allocated"
    assert refused > 300


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {}, {"state_dict": {"epoch": 1}}])
def test_a_file_without_named_weights_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(EncoderError, match="no named weights"):
        read_weights(tmp_path / "x.pth")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(EncoderError, match="cannot be read"):
        read_weights(tmp_path / "none.pth")
    with pytest.raises(EncoderError, match="cannot be read"):
        read_weights(tmp_path)


def test_weights_that_do_not_fit_are_told_by_name():
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = digest(network.state_dict())
    weights = network.state_dict()
    del weights["1.running_mean"], weights["1.bias"]
    weights |= {f"head.{i}": torch.ones(1) for i in range(5)}
    weights["0.weight"] = torch.ones(2, 4)
    weights["0.bias"] = 1
    with pytest.raises(EncoderError) as caught:
        load_strictly(network, weights, "FILE")
    message = str(caught.value)
    assert message.startswith("FILE: ")
    assert "2 missing (1.bias, 1.running_mean)" in message
    assert "5 unknown (head.0, head.1, head.2, …)" in message
    assert "2 of another shape (0.weight ([2, 4] in place of [2, 3]), 0.bias (None in place of [2]))" in message
    assert digest(network.state_dict()) == before


def test_counters_of_batches_may_be_absent():
    network = nn.BatchNorm1d(2)
    weights = {k: v + 1 for k, v in network.state_dict().items() if k != "num_batches_tracked"}
    load_strictly(network, weights, "FILE")
    assert torch.equal(network.running_mean, torch.ones(2))


def test_digest_is_that_of_names_dtypes_shapes_and_bytes():
    expected = hashlib.sha256()
    expected.update(b"a.bias torch.float32 [2]\n" + STATE["a.bias"].numpy().tobytes())
    expected.update(b"a.weight torch.float32 [2, 3]\n" + STATE["a.weight"].numpy().tobytes())
    assert digest(STATE) == expected.hexdigest()
    assert digest(dict(reversed(STATE.items()))) == digest(STATE)


@pytest.mark.parametrize(
    "changed",
    [
        {**STATE, "a.bias": torch.tensor([1.0, 1.0000001])},
        {**STATE, "a.bias": torch.ones(2, dtype=torch.float64)},
        {**STATE, "a.bias": torch.ones(2, 1)},
        {"a.weight": STATE["a.weight"], "b.bias": STATE["a.bias"]},
    ],
)
def test_any_change_changes_the_digest(changed):
    assert digest(changed) != digest(STATE)


def test_digest_takes_scalars_empty_tensors_and_views():
    base = torch.arange(6.0).reshape(2, 3)
    weights = {"n": torch.tensor(3), "empty": torch.ones(0, 2), "view": base.T}
    assert digest(weights) == digest({**weights, "view": base.T.contiguous()})


def test_old_names_of_the_densenets_are_understood():
    network, other = get_model("densenet121"), get_model("densenet121")
    state = network.state_dict()
    old = {k.replace(".norm1.", ".norm.1.").replace(".conv2.", ".conv.2."): v for k, v in state.items()}
    assert old.keys() != state.keys()
    load_strictly(other, old, "FILE")
    assert digest(other.state_dict()) == digest(state)


def test_auxiliary_heads_of_published_files_are_left_out():
    published = get_model("googlenet", aux_logits=True, init_weights=False).state_dict()
    assert any(name.startswith("aux") for name in published)
    load_strictly(get_model("googlenet", aux_logits=False, init_weights=False), published, "FILE")


def test_networks_that_ask_for_a_version_take_weights_without():
    network = get_model("mnasnet0_5")
    load_strictly(network, {**network.state_dict()}, "FILE")


def test_several_state_dicts_are_told_apart_by_their_names(tmp_path):
    torch.save({"base": STATE, "top": {"module.a": torch.ones(1)}}, tmp_path / "x.pth")
    read = read_weights(tmp_path / "x.pth")
    assert set(read) == {"base.a.weight", "base.a.bias", "top.a"}
    assert torch.equal(read["base.a.weight"], STATE["a.weight"])


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_trusted_pickle_may_hold_arrays_of_numpy(tmp_path, protocol):
    arrays = {name: value.numpy() for name, value in STATE.items()}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"model": arrays, "author": "someone"}, protocol))
    with pytest.raises(
        EncoderError, match=r"pickled objects.*every command reads, or give --trust to one that takes it$"
    ):
        read_weights(tmp_path / "x.pkl")
    read = read_weights(tmp_path / "x.pkl", trust=True)
    assert set(read) == set(STATE)
    assert all(torch.equal(read[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_trusted_file_of_torch_may_hold_anything(tmp_path, zipped):
    content = {"model": STATE, "opt": argparse.Namespace(lr=1)}
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    read = read_weights(tmp_path / "x.pth", trust=True)
    assert all(torch.equal(read[name], STATE[name]) for name in STATE)


def test_trust_does_not_mend_a_damaged_pickle(tmp_path):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"model": {"a": Bomb()}})[:20])
    with pytest.raises(EncoderError, match=r"x\.pkl: this is not a file of weights"):
        read_weights(tmp_path / "x.pkl", trust=True)
