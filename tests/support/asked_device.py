"""A device that can be asked nothing: torch's `meta`, whose tensors have shapes and no values.

What would wait for a GPU is an error in here: a value or a shape that depends on values, a copy to the host, and a copy
from it that is not pinned. Mixed precision, which `meta` does not have, is left out, and a recurrent network is one
operation, as in cuDNN.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
aten = torch.ops.aten
# Which run nothing on a device.
_NOTHING = {aten._unsafe_view.default, aten.new_empty.default, aten.new_empty_strided.default, aten.empty_like.default}
_COPIES = {aten._to_copy.default, aten.copy_.default}


class Asked(TorchDispatchMode):
    """Counts the operations of the device that are no views, and refuses what would make the host wait.

    Attributes:
        operations: how often each was launched.
        copies: how many of them read the host's memory: a graph that is replayed would read what stands there then.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.copies = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given, made = _tensors((args, kwargs)), func(*args, **(kwargs or {}))
        out = given if made is None else _tensors(made)  # None: in place
        if any(one.is_meta for one in out):
            if any(one.ndim and not one.is_meta for one in given):
                assert func in _COPIES and (kwargs or {}).get("non_blocking"), f"{func} waits for values of the host"
            self.copies += func in _COPIES and any(not one.is_meta for one in given)
            if not func.is_view and func not in _NOTHING:
                self.operations[str(func)] += 1
        else:
            assert not any(one.is_meta for one in given), f"{func} asks the device"
        return made


def _tensors(values):
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


class OneOperation(torch.autograd.Function):
    """Stand for `torch._VF.gru`: states of the right shapes, and gradients of them."""

    @staticmethod
    def forward(ctx, data, start, directions, *weights):
        ctx.shapes = [data.shape, start.shape, *(weight.shape for weight in weights)]
        return data.new_empty(*data.shape[:-1], directions * start.shape[2]), torch.empty_like(start)

    @staticmethod
    def backward(ctx, states, last):
        data, start, *weights = (states.new_empty(shape) for shape in ctx.shapes)
        return data, start, None, *weights


def one_operation(data, *rest):
    """Run a recurrent network as one operation, forward and backward, as cuDNN does."""
    packed = rest[0].dtype == torch.int64
    start, weights = (rest[1], rest[2]) if packed else (rest[0], rest[1])
    return OneOperation.apply(data, start, len(start), *weights)


def one_dropout(values, rate, training, inplace=False):
    """Drop values as `functional.dropout` does on a GPU, by one operation."""
    return torch.native_dropout(values, rate, training)[0] if rate else values
