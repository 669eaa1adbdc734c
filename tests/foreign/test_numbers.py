"""Recalls, losses and similarities beside those of other libraries."""

import numpy as np
import pytest
import torch
from foreign import needed, of_others
from torch.nn.functional import normalize

from xret.losses import InfoNCE, Sigmoid, Triplet
from xret.metrics import recalls
from xret.similarities import Chamfer

pytestmark = of_others
KS = (1, 5, 10)


def torchmetrics(scores, right):
    queries = torch.arange(len(scores))[:, None].expand(scores.shape)
    hit_rate = needed("torchmetrics.retrieval").RetrievalHitRate
    return [float(hit_rate(top_k=k)(scores, right, indexes=queries)) for k in KS]


def ir_measures(scores, right):
    measures = needed("ir_measures")
    asked = [measures.Success @ k for k in KS]
    truth, run = (
        {str(q): {str(d): kind(v) for d, v in enumerate(row)} for q, row in enumerate(table.tolist())}
        for table, kind in ((right, int), (scores, float))
    )
    found = measures.calc_aggregate(asked, truth, run)
    return [found[measure] for measure in asked]


def clip_benchmark(scores, right):
    recall_at_k = needed("clip_benchmark.metrics.zeroshot_retrieval").recall_at_k
    return [float((recall_at_k(scores, right, k) > 0).float().mean()) for k in KS]


@pytest.mark.parametrize("library", [torchmetrics, ir_measures, clip_benchmark])
def test_recalls(library):
    random = np.random.default_rng(3)
    owner = torch.from_numpy(np.sort(np.append(np.arange(40), random.integers(0, 40, 80))))
    right = owner == torch.arange(40)[:, None]
    scores = torch.from_numpy(random.normal(size=right.shape)) + 2.0 * right
    table = recalls(scores, owner)
    for found, some, truth in (
        (table.image_to_text, scores, right),
        (table.text_to_image, scores.T.contiguous(), right.T.contiguous()),
    ):
        ours = [found[f"R@{k}"] for k in KS]
        assert 5 < ours[0] < ours[1] < ours[2] < 100
        assert [100 * share for share in library(some, truth)] == pytest.approx(ours, abs=1e-4)


@pytest.fixture
def pairs():
    torch.manual_seed(0)
    images, captions = normalize(torch.randn(2, 12, 8), dim=-1)
    return images, captions, images @ captions.T, torch.eye(12, dtype=torch.bool)


def pytorch_metric_learning(images, captions, name, **how):
    """Call a loss of images among captions and of captions among images; return the mean of both."""
    losses, labels, same = needed("pytorch_metric_learning.losses"), *torch.arange(len(images)).repeat(2, 1)
    loss = getattr(losses, name)(**how)
    return (
        loss(images, labels, ref_emb=captions, ref_labels=same)
        + loss(captions, labels, ref_emb=images, ref_labels=same)
    ) / 2


def test_infonce(pairs):
    images, captions, similarity, positives = pairs
    loss = InfoNCE(scale=20.0)(similarity, positives)
    torch.testing.assert_close(pytorch_metric_learning(images, captions, "NTXentLoss", temperature=0.05), loss)
    torch.testing.assert_close(needed("open_clip.loss").ClipLoss()(images, captions, torch.tensor(20.0)), loss)


def test_sigmoid(pairs):
    images, captions, similarity, positives = pairs
    ours = Sigmoid(scale=10.0)
    theirs = needed("open_clip.loss").SigLipLoss()(images, captions, ours.factor(), ours.bias)
    torch.testing.assert_close(theirs, ours(similarity, positives))


def test_triplets(pairs):
    images, captions, similarity, positives = pairs
    needed("pytorch_metric_learning")
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.reducers import MeanReducer

    how = {"margin": 0.2, "distance": CosineSimilarity(), "reducer": MeanReducer(), "triplets_per_anchor": "all"}
    theirs = pytorch_metric_learning(images, captions, "TripletMarginLoss", **how)
    torch.testing.assert_close(2 * theirs, Triplet(margin=0.2, negatives="all")(similarity, positives))


def test_chamfer_is_the_mean_of_maxsim_both_ways():
    mean_maxsim = needed("sentence_transformers.util").mean_maxsim
    torch.manual_seed(1)
    images, captions = (normalize(torch.randn(count, size, 8), dim=-1) for count, size in ((5, 4), (7, 3)))
    both = (mean_maxsim(images, captions) + mean_maxsim(captions, images).T) / 2
    torch.testing.assert_close(both, Chamfer()(images, captions))
