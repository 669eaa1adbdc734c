"""Files of weights: what is read, what is refused, and hashes."""

import argparse
import hashlib
import os
import pickle
import re

import pytest
import torch
from encoder_contract import refused
from safetensors.torch import save_file
from torch import nn
from torchvision.models import get_model

from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.encoders.weights import digest, load_strictly, read_weights

SPEC = EncoderSpec("resnet18", weights="FILE")
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
    refused(r"x\.pth.*pickled objects.*safetensors", read_weights, tmp_path / "x.pth")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html>", b"\x00" * 64, b"PK\x03\x04 torn", 9000])
def test_what_is_no_file_of_weights_is_refused(tmp_path, name, content):
    path = tmp_path / name
    if content == 9000:  # the beginning of a file
        state = {"a": torch.ones(4000)}
        save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
        content = path.read_bytes()[:content]
    path.write_bytes(content)
    refused(rf"{name} is (no file of weights|damaged)", read_weights, path)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {}, {"state_dict": {"epoch": 1}}])
def test_a_file_without_named_weights_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "x.pth")
    refused("no named weights", read_weights, tmp_path / "x.pth")
    for path in (tmp_path / "none.pth", tmp_path):
        refused("cannot be read", read_weights, path)


def test_weights_that_do_not_fit_are_named():
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = digest(network.state_dict())
    wrong = network.state_dict() | {f"head.{i}": torch.ones(1) for i in range(5)}
    wrong |= {"0.weight": torch.ones(2, 4), "0.bias": 1}
    del wrong["1.running_mean"], wrong["1.bias"]
    faults = (
        "2 missing (1.bias, 1.running_mean)",
        "5 unknown (head.0, head.1, head.2, …)",
        "2 of another shape (0.weight ([2, 4] in place of [2, 3]), 0.bias (None in place of [2]))",
    )
    sentence = re.escape(f"FILE: these weights do not fit 'resnet18': {'; '.join(faults)}")
    refused(sentence, load_strictly, network, wrong, SPEC)
    assert digest(network.state_dict()) == before


def test_counters_of_batches_may_be_absent():
    network = nn.BatchNorm1d(2)
    weights = {k: v + 1 for k, v in network.state_dict().items() if k != "num_batches_tracked"}
    load_strictly(network, weights, SPEC)
    assert torch.equal(network.running_mean, torch.ones(2))


def test_digest_is_that_of_names_dtypes_shapes_and_bytes():
    expected = hashlib.sha256()
    expected.update(b"a.bias torch.float32 [2]\n" + STATE["a.bias"].numpy().tobytes())
    expected.update(b"a.weight torch.float32 [2, 3]\n" + STATE["a.weight"].numpy().tobytes())
    assert digest(STATE) == digest(dict(reversed(STATE.items()))) == expected.hexdigest()
    weights = {"n": torch.tensor(3), "empty": torch.ones(0, 2), "view": torch.arange(6.0).reshape(2, 3).T}
    assert digest(weights) == digest({**weights, "view": weights["view"].contiguous()})


def test_old_names_of_the_densenets_are_understood():
    network, other = get_model("densenet121"), get_model("densenet121")
    state = network.state_dict()
    old = {k.replace(".norm1.", ".norm.1.").replace(".conv2.", ".conv.2."): v for k, v in state.items()}
    assert old.keys() != state.keys()
    load_strictly(other, old, SPEC)
    assert digest(other.state_dict()) == digest(state)


def test_auxiliary_heads_of_published_files_are_left_out():
    published = get_model("googlenet", aux_logits=True, init_weights=False).state_dict()
    assert any(name.startswith("aux") for name in published)
    load_strictly(get_model("googlenet", aux_logits=False, init_weights=False), published, SPEC)
    network = get_model("mnasnet0_5")  # asks for the version of its layout, which a plain dict lacks
    load_strictly(network, {**network.state_dict()}, SPEC)


def test_several_state_dicts_are_told_apart_by_their_names(tmp_path):
    torch.save({"base": STATE, "top": {"module.a": torch.ones(1)}}, tmp_path / "x.pth")
    read = read_weights(tmp_path / "x.pth")
    assert set(read) == {"base.a.weight", "base.a.bias", "top.a"}
    assert torch.equal(read["base.a.weight"], STATE["a.weight"])


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_trusted_pickle_may_hold_arrays_of_numpy(tmp_path, protocol):
    arrays = {name: value.numpy() for name, value in STATE.items()}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"model": arrays, "author": "someone"}, protocol))
    sentence = r"pickled objects.*give `trust` if you know where it comes from$"
    refused(sentence, read_weights, tmp_path / "x.pkl")
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
    refused(r"x\.pkl is no file of weights", read_weights, tmp_path / "x.pkl", trust=True)
