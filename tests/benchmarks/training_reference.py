"""A straightforward head in the style of the published code, against which ours is measured.

It shares encoders and losses with ours and differs in three places only:

- Element slots normalise the local features and project keys and values of them anew in every round, and queries and
  what was gathered head by head.
- Smooth-Chamfer pools the matrix of all pairs of elements `[I K, C K]` by pooling layers, with an exponential for each
  direction.
- Assignment lays the masks of all K! permutations over that matrix, pools, and keeps the mask of the largest sum
  (MaxMatch, listings 1-3).
"""

from itertools import permutations

import torch
from torch import Tensor, nn
from torch.nn import functional

from xret.heads.model import Model
from xret.heads.modules.padding import valid_rows, zero_padding
from xret.heads.modules.positions import circle_positions
from xret.heads.recipes.recipe import Recipe
from xret.nn import Aggregated, ElementSlots


class RecomputedSlots(nn.Module):
    """Element slots that recompute keys and values in every round.

    Args:
        ours: whose weights it has; with learned slots, and no positions of cells.
    """

    embedding, uses_local, uses_place = "set", True, False

    def __init__(self, ours: ElementSlots) -> None:
        super().__init__()
        if (
            ours.initial != "learned"
            or ours.positions == "grid"
            or ours.block.normalized_over != "slots"
            or ours.block.gru
        ):
            raise ValueError("the reference has the learned slots of a recipe, and positions 'none' or 'circle' alone")
        self.ours = ours

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Aggregate `local [B, N, C]`, of which the first `length[b]` rows count, and `global_ [B, D]`."""
        ours, block, padding, attention = self.ours, self.ours.block, ~valid_rows(local, length), []
        local, slots = zero_padding(local, length), ours.initial_slots.expand(len(local), -1, -1)
        places = circle_positions(local, length) if ours.positions == "circle" else 0
        for _ in range(ours.iterations):
            rows = ours.norm_local(local)
            queries, keys, values = (
                projected.unflatten(2, (ours.heads, -1)).transpose(1, 2)
                for projected in (block.query(block.norm(slots)), ours.key(rows + places), ours.value(rows))
            )
            weights = (queries @ keys.transpose(2, 3) / keys.shape[3] ** 0.5).softmax(2)
            weights = weights.masked_fill(padding[:, None, None], 0)
            shares = weights / (weights.sum(3, keepdim=True) + 1e-7)
            slots = slots + block.dropout(block.out((shares.to(values.dtype) @ values).transpose(1, 2).flatten(2)))
            slots = slots + block.mlp(slots)
            attention.append(weights)
        slots = ours.norm_slots(slots)
        fused = slots if ours.norm_global is None else slots + ours.norm_global(global_)[:, None]
        return Aggregated(fused, slots, torch.stack(attention))


def pair_matrix(images: Tensor, captions: Tensor) -> Tensor:
    """Return the cosines of all elements of `images [I, K, D]` and `captions [C, K, D]`, `[I K, C K]`."""
    dtype = torch.promote_types(images.dtype, torch.float32)
    rows, columns = (functional.normalize(sets.to(dtype), dim=-1).flatten(0, 1) for sets in (images, captions))
    return rows @ columns.T


class PooledSmoothChamfer(nn.Module):
    """Smooth-Chamfer by pooling layers.

    Args:
        size: elements of a set.
        alpha: scale of the cosines.
    """

    embedding = "set"

    def __init__(self, size: int = 4, alpha: float = 16.0) -> None:
        super().__init__()
        self.alpha, self.size = alpha, size
        # A pooling layer that sums: the norm of order 1.
        self.sum_over_captions, self.sum_over_images = nn.LPPool2d(1, (1, size)), nn.LPPool2d(1, (size, 1))

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K, D]` with `captions [C, K, D]`: `[I, C]`."""
        pairs = pair_matrix(images, captions)[None]
        left = self.sum_over_images(self.sum_over_captions((self.alpha * pairs).exp()).log())
        right = self.sum_over_captions(self.sum_over_images((self.alpha * pairs).exp()).log())
        return (left + right)[0] / (2 * self.alpha * self.size)


class MaskedAssignment(nn.Module):
    """Maximal pair assignment by the masks of all permutations.

    Args:
        size: elements of a set.
    """

    embedding = "set"
    masks: Tensor

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.size = size
        orders = torch.tensor(list(permutations(range(size))))
        self.register_buffer("masks", torch.eye(size)[orders])  # [K!, K, K]

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Compare `images [I, K, D]` with `captions [C, K, D]`: `[I, C]`."""
        pairs = pair_matrix(images, captions)
        chosen = self._chosen(pairs.detach(), len(images), len(captions))
        return functional.avg_pool2d(((chosen * pairs).exp() - 1)[None], self.size)[0] * self.size

    def _chosen(self, pairs: Tensor, images: int, captions: int) -> Tensor:
        """Return the mask of the best permutation in every block of the matrix."""
        masks = self.masks.to(pairs.dtype).repeat(1, images, captions)  # [K!, I K, C K]
        best = functional.avg_pool2d(masks * pairs, self.size).argmax(0)
        every = best.repeat_interleave(self.size, 0).repeat_interleave(self.size, 1)
        return masks.gather(0, every[None])[0]


REFERENCES = {"smooth-chamfer": PooledSmoothChamfer, "assignment": MaskedAssignment}  # of a recipe's similarities


def make_reference(model: Model, recipe: Recipe) -> None:
    """Give a model the parts of the reference in the place of ours; its weights stay.

    Raises:
        ValueError: the reference lacks one of them.
    """
    name = recipe.similarity["name"]
    if name not in REFERENCES:
        raise ValueError(f"the reference has no {name}: {', '.join(REFERENCES)}")
    scale = {key: value for key, value in recipe.similarity.items() if key == "alpha"}
    model.compare = REFERENCES[name](recipe.aggregator["image"]["slots"], **scale)
    for branch in (model.image, model.text):
        if isinstance(branch.aggregator, ElementSlots):
            branch.aggregator = RecomputedSlots(branch.aggregator)
