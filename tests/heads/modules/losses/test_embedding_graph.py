"""The graph of a batch's embeddings against the public code's recorded losses and gradients."""

import pytest
import torch
from recorded import DTYPES, assert_recorded, leaf
from torch import nn

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.embedding import Sequence
from xret.heads.modules.losses.embedding_graph import EmbeddingGraph
from xret.heads.modules.losses.triplet import Triplet
from xret.heads.modules.similarity.shared import unit

LAYER = "w_gnn.layers.0."
NAMES = {  # ours, and those of the public code
    "layer.project.weight": LAYER + "self_attn.in_proj_weight",
    "layer.project.bias": LAYER + "self_attn.in_proj_bias",
    **{
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in {
            "layer.out": LAYER + "self_attn.out_proj",
            "layer.mlp.0": LAYER + "linear1",
            "layer.mlp.3": LAYER + "linear2",
            "layer.norms.0": LAYER + "norm1",
            "layer.norms.1": LAYER + "norm2",
            "text_to_image.0": "w_adj_model.adj_learning.mlp_t2i.0",
            "text_to_image.2": "w_adj_model.adj_learning.mlp_t2i.3",
            "image_to_text.0": "w_adj_model.adj_learning.mlp_i2t.0",
            "image_to_text.2": "w_adj_model.adj_learning.mlp_i2t.3",
        }.items()
        for kind in ("weight", "bias")
    },
}


def made(data, dtype, **parameters):
    """Return the loss with the recorded weights and values."""
    strongest, heads = data["cfg_strongest_heads"].tolist()
    scale, divergence, threshold = data["cfg_scale_divergence_threshold"].tolist()
    dim = data["in_img"].shape[1]
    values = {"strongest": strongest, "scale": scale, "divergence": divergence, "threshold": threshold, "dropout": 0.0}
    loss = EmbeddingGraph(dim, head_dim=dim // heads, **{**values, **parameters})
    loss.load_state_dict({ours: torch.tensor(data[theirs]) for ours, theirs in NAMES.items()})
    return loss.to(dtype)


def sides(data, dtype, image=None, text=None, more=0):
    """Return both sides as aggregators give them, with `more` padding than is recorded."""
    rows = [torch.tensor(data[f"in_{name}"]).to(dtype) for name in ("regions", "words")]
    lengths = torch.full((len(rows[0]),), rows[0].shape[1]), torch.tensor(data["in_word_lengths"])
    padded = [nn.functional.pad(one, (0, 0, 0, more), value=torch.nan if more else 0.0) for one in rows]
    vectors = [
        leaf(data, key, dtype) if given is None else given for key, given in (("in_img", image), ("in_txt", text))
    ]
    return [
        Aggregated(vector, local=Sequence(one, length))
        for vector, one, length in zip(vectors, padded, lengths, strict=True)
    ]


def of(loss, images, captions, positives):
    return loss(torch.zeros(positives.shape).to(images.embedding), positives, images, captions)


def belonging(data, case):
    ids = torch.tensor(data["in_ids"]) if case == "trip" else torch.arange(len(data["in_ids"]))
    return ids[:, None] == ids


@pytest.fixture
def noise(golden, monkeypatch):
    """Let what is drawn be the recorded noise, call by call."""
    drawn = iter(golden("embedding_graph")["in_noise"])
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self: self.copy_(torch.tensor(next(drawn))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "negatives"), [("vse", "hardest"), ("trip", "distance-weighted")])
def test_recorded_losses_and_gradients(golden, noise, case, negatives, dtype):
    data = golden("embedding_graph")
    loss, (images, captions) = made(data, dtype, negatives=negatives), sides(data, dtype)
    value = of(loss, images, captions, belonging(data, case))
    weights = {NAMES[name]: weight for name, weight in loss.named_parameters()}
    leaves = {"img": images.embedding, "txt": captions.embedding, **weights}
    assert len(weights) == len([key for key in data if key.startswith("w_")])
    tolerance = 1e-9 if dtype is torch.float64 else 1e-4  # the root of a small distance loses digits
    assert_recorded(data, "graph", value, leaves, dtype, f"{case}/", tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_distance_weighted_negatives(golden, noise, dtype):
    data = golden("embedding_graph")
    leaves = {key: leaf(data, f"in_{key}", dtype) for key in ("img", "txt")}
    loss = Triplet(negatives="distance-weighted", reduction="sum")
    value = loss(unit(leaves["img"]) @ unit(leaves["txt"]).T, belonging(data, "trip"))
    assert_recorded(data, "triplet", value, leaves, dtype, "trip/")


def test_more_padding_and_fewer_images_than_captions(golden):
    """What lies beyond the lengths is not read, and of an image twice in a batch the first is as good."""
    data = golden("embedding_graph")
    loss = made(data, torch.float64)
    (images, captions), positives = sides(data, torch.float64), belonging(data, "vse")
    expected = of(loss, images, captions, positives)
    images, captions = sides(data, torch.float64, more=4)
    assert of(loss, images, captions, positives).item() == pytest.approx(expected.item(), rel=1e-12)
    few = images._replace(embedding=images.embedding[:3], local=Sequence(*(one[:3] for one in images.local)))
    of(loss, few, captions, torch.arange(3)[:, None] == torch.arange(8) % 3).backward()
    assert images.embedding.grad[:3].isfinite().all()
    assert captions.embedding.grad.any(1).all()


def test_samples_without_rows_are_finite(golden):
    data = golden("embedding_graph")
    images, captions = sides(data, torch.float64)
    images, captions = (
        side._replace(local=Sequence(side.local.rows, torch.arange(8) % 3)) for side in (images, captions)
    )
    of(made(data, torch.float64), images, captions, belonging(data, "vse")).backward()
    assert images.embedding.grad.isfinite().all()


def test_pairs_that_take_no_part_are_no_negatives(golden):
    """A caption that nothing is compared with moves by what the graph makes of it alone."""
    data = golden("embedding_graph")
    loss, (images, captions) = made(data, torch.float64), sides(data, torch.float64)
    positives = belonging(data, "vse")
    similarity = torch.zeros(8, 8).double().masked_fill(~positives, -torch.inf)
    assert loss(similarity, positives, images, captions).item() < of(loss, images, captions, positives).item() / 10


def test_it_begins_after_the_warm_up(golden):
    data = golden("embedding_graph")
    loss, (images, captions) = made(data, torch.float64, warmup_epochs=1.5), sides(data, torch.float64)
    positives = belonging(data, "vse")
    assert not loss.begin(1.4)
    waiting = of(loss, images, captions, positives)
    waiting.backward()
    assert waiting.item() == 0
    assert not images.embedding.grad.any()
    assert loss.begin(1.5)
    assert of(loss, images, captions, positives).item() > 1


def test_steps_learn(golden):
    data = golden("embedding_graph")
    torch.manual_seed(0)
    loss, (images, captions) = made(data, torch.float64, dropout=0.1), sides(data, torch.float64)
    positives = belonging(data, "vse")
    optimizer = torch.optim.Adam([images.embedding, captions.embedding, *loss.parameters()], 0.03)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(of(loss, images, captions, positives))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 4
    plain = unit(images.embedding) @ unit(captions.embedding).T
    assert torch.equal(plain.argmax(1), torch.arange(8)), "the embeddings themselves, without the layer"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local": None}, "needs local rows, which the text side does not give"),
        ({"embedding": torch.ones(8, 13)}, "needs vectors of width 12, which the text side does not give"),
        ({"embedding": torch.ones(8, 2, 12)}, "needs vectors of width 12"),
    ],
)
def test_what_a_side_does_not_give_is_named(golden, changes, message):
    data = golden("embedding_graph")
    images, captions = sides(data, torch.float32)
    with pytest.raises(ValueError, match=message):
        of(made(data, torch.float32), images, captions._replace(**changes), belonging(data, "vse"))
