"""Comparing with recorded values: leaves of a precision, and how near results must come."""

import torch

DTYPES = [torch.float64, torch.float32]


def leaf(data, key, dtype):
    return torch.tensor(data[key]).to(dtype).requires_grad_()


def bits(dtype):
    return "64" if dtype is torch.float64 else "32"


def near(dtype):
    return 1e-9 if dtype is torch.float64 else 1e-5


def assert_near(actual, expected, tolerance, absolute=0.0):
    """Differences are measured against the largest expected magnitude; axes of length one do not matter."""
    expected = torch.as_tensor(expected).squeeze()
    actual = actual.detach().to(expected).squeeze()
    assert actual.shape == expected.shape
    limit = tolerance * expected.abs().max().item() + absolute
    difference = (actual - expected).abs().max().item()
    assert difference <= limit, f"differs by {difference:.2e}, allowed is {limit:.2e}"


def assert_recorded(data, key, value, leaves, dtype, case="", tolerance=None, weights=1.0):
    """Compare a value with the recorded one of `key`, and its weighted sum's gradients with those of the leaves."""
    assert_near(value, data[f"{case}out{bits(dtype)}_{key}"], tolerance or near(dtype))
    assert_gradients(data, key, value, leaves, dtype, case, tolerance, weights)


def assert_gradients(data, key, value, leaves, dtype, case="", tolerance=None, weights=1.0):
    (value * torch.as_tensor(weights)).sum().backward()
    for name, tensor in leaves.items():
        expected = data[f"{case}grad{bits(dtype)}_{key}_{name}"]
        assert_near(tensor.grad.view(expected.shape), expected, tolerance or near(dtype))


def own(images, captions_per_image):
    """Captions of an image stand together, image by image."""
    return torch.eye(images, dtype=torch.bool).repeat_interleave(captions_per_image, 1)
