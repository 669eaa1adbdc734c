"""The reference that benchmarks measure against computes what ours does, by other means: each checks the other."""

import pytest
import torch
from benchmarks.training_reference import REFERENCES, joined

from xret.heads.modules.similarity import SIMILARITIES


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", REFERENCES)
def test_values_and_gradients_are_ours(name, size):
    draw = torch.Generator().manual_seed(size)
    images, captions = (
        torch.randn(count, size, 6, generator=draw, dtype=torch.float64, requires_grad=True) for count in (3, 5)
    )
    weight = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    both = []
    for similarity in (SIMILARITIES[name](), REFERENCES[name](size)):
        values = similarity(images, captions)
        both.append((values, *torch.autograd.grad(values, (images, captions), weight)))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_joined_captions_are_padded_and_know_their_image():
    words = [[torch.tensor([3, 4, 5]), torch.tensor([6])], [torch.tensor([7, 8])]]
    samples = [(torch.full((2, 4), float(number)), captions) for number, captions in enumerate(words)]
    regions, token, length, image = joined(samples)
    assert regions.mean((1, 2)).tolist() == [0, 1]
    assert token.tolist() == [[3, 4, 5], [6, 0, 0], [7, 8, 0]]
    assert length.tolist() == [3, 1, 2]
    assert image.tolist() == [0, 0, 1]
