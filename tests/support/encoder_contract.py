"""What every encoder promises, as test classes to inherit from."""

import json

import numpy as np


class EncoderContract:
    """Inherit and give a fixture `encoder`."""

    kinds = frozenset({"grid", "roi", "frames", "tokens", "words"})

    def test_says_what_it_is(self, encoder):
        assert encoder.kind in self.kinds
        assert encoder.identity["encoder"] == encoder.name
        assert set(encoder.identity) >= {"encoder", "weights", "preprocessing", "layer"}

    def test_identity_survives_json(self, encoder):
        assert json.loads(json.dumps(encoder.identity)) == encoder.identity
        assert all(isinstance(version, str) for version in encoder.versions.values())

    def test_identity_holds_nothing_of_this_machine(self, encoder):
        text = json.dumps(encoder.identity)
        for version in encoder.versions.values():
            assert version not in text
        for word in ("/", "cpu", "cuda", "version", "batch"):
            assert word not in text


class FeatureContract(EncoderContract):
    """Inherit and give fixtures `encoder` and `batch`, the inputs of several samples, of several lengths if they vary.

    A batch of one equals a batch of many up to `tolerance`: sums are taken in another order.
    """

    tolerance = 1e-5

    def lengths(self, encoder, batch):
        """Return how many local rows each sample has."""
        raise NotImplementedError

    def split(self, encoder, batch, local):
        """Return the local rows of each sample."""
        raise NotImplementedError

    def test_declared_shapes(self, encoder, batch):
        local, global_ = encoder.encode(batch)
        assert local.dtype == global_.dtype == np.float32
        assert local.shape[-1] == encoder.channels
        assert global_.shape == (len(batch), encoder.global_channels)
        assert np.isfinite(local).all() and np.isfinite(global_).all()
        rows = self.split(encoder, batch, local)
        assert [len(sample) for sample in rows] == self.lengths(encoder, batch)

    def test_samples_differ(self, encoder, batch):
        _, global_ = encoder.encode(batch)
        assert np.abs(global_[0] - global_[1]).max() > 1e-3

    def test_one_sample_equals_the_same_in_a_batch(self, encoder, batch):
        local, global_ = encoder.encode(batch)
        for number, rows in enumerate(self.split(encoder, batch, local)):
            alone, alone_global = encoder.encode(batch[number : number + 1])
            np.testing.assert_allclose(alone.reshape(rows.shape), rows, atol=self.tolerance, rtol=self.tolerance)
            np.testing.assert_allclose(alone_global[0], global_[number], atol=self.tolerance, rtol=self.tolerance)

    def test_same_bytes_twice(self, encoder, batch):
        first, second = encoder.encode(batch), encoder.encode(batch)
        assert first[0].tobytes() == second[0].tobytes()
        assert first[1].tobytes() == second[1].tobytes()
