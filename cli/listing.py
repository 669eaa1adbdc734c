"""``xret list``: what there is to choose from, and when to take it."""

import click

from .parsing import show

# Names, with when to take each. A test holds them against the registries; encoders stand for many more names.
LISTS: dict[str, dict[str, str]] = {
    "encoders": {
        "resnet152": "for papers' grids; or another torchvision classifier",
        "hf:ID": "for strong features: DINOv2, CLIP, SigLIP and others",
        "timm:NAME": "for a network that transformers does not have",
        "open_clip:ARCH/TAG": "for a CLIP of open_clip, or its weights in a file",
        "butd": "for papers' 36 regions of bottom-up attention",
        "butd-grid": "for a grid of that network, without time for boxes",
        "fasterrcnn_resnet50_fpn_v2": "for regions without the weights of butd",
        "bert": "pretrained states of tokens, for few training texts",
        "words": "ids of words for a GRU, for many training texts",
    },
    "recipes": {
        "linear": "to see whether a system is worth it: a linear layer a side",
        "mlp": "the baseline that a system has to beat: linear and a perceptron",
        "vsepp": "a first number, and the published system that trains fastest",
        "vse-infty": "one vector for any vector database; it learns how to pool",
        "setdiv": "for ambiguous pictures and captions: several answers are right",
        "setdiv-small": "setdiv for few training pictures: regularised as mlp is",
        "maxmatch": "the vectors of a set must stay apart",
        "pvse": "to compare with the first of the set embeddings",
        "pcmepp": "an uncertainty with each embedding",
        "pcme": "to compare with the first of the probabilistic ones",
        "gaussian-vsepp": "an uncertainty for a model of vectors",
        "gaussian-vsrn": "an uncertainty for regions that relate to each other",
        "vsrn": "for regions that relate to each other; its epochs take long",
        "scan": "to see which word looks where; by far the slowest to compare",
        "fusemix": "for pairs of strong global features, which it blends",
        "lit": "for very many pairs, where images keep their global features",
        "sail": "for very many pairs of strong global features",
    },
    "aggregators": {
        "global": "the global feature alone, of encoders trained for it as CLIP is",
        "average": "the mean of the rows: grids, and where in doubt",
        "max": "what stands out in one row alone",
        "k-max": "the mean of the k largest values: between mean and maximum",
        "gem": "a learned power between mean and maximum",
        "fspool": "sorted values with learned weights; samples with many rows",
        "cls": "the first row: a class token",
        "last": "the last row: the end of a sequence",
        "self-attention": "a learned weight for each row",
        "seq2seq": "a weight for each row by a recurrent network: frames of videos",
        "gpo": "learns how to pool: the best single vector of regions and frames",
        "pie-net": "a few attended vectors around the global one",
        "element-slots": "sets whose slots compete for rows: ambiguous pictures",
        "region-graph": "regions that stand in relation to each other",
        "gaussian": "mean and variance by twin branches of another aggregator",
        "pcme": "a Gaussian and samples of it",
        "pcmepp": "a Gaussian in closed form",
        "rows": "the rows themselves, for cross-attention",
    },
    "similarities": {
        "cosine": "vectors",
        "mil": "sets of which the best pair counts",
        "match-probability": "sets of which every pair counts by its distance",
        "chamfer": "sets of which each element finds its nearest",
        "smooth-chamfer": "chamfer with gradients for all pairs: sets do not collapse",
        "assignment": "sets that are matched one to one",
        "monte-carlo-match": "samples of Gaussians",
        "kl": "Gaussians, in one direction",
        "min-kl": "Gaussians, in the better direction",
        "wasserstein": "Gaussians, whose variances count like their means",
        "sampled-distance": "Gaussians, in closed form: the fastest with uncertainty",
        "cross-attention": "rows against words: slow, and it shows which word looks where",
    },
    "losses": {
        "triplet": "the usual one; it wants batches of 100 or more",
        "infonce": "large batches, and strong frozen encoders",
        "sigmoid": "very large batches: each pair is judged alone",
        "matching-bce": "Gaussians, as PCME++ has them",
        "soft-contrastive": "samples of Gaussians, as PCME has them",
        "information-bottleneck": "for Gaussians: variances neither vanish nor explode",
        "uniformity": "for vectors and sets: they spread over the sphere",
        "diversity": "beside triplet, for sets: elements differ",
        "mmd": "beside triplet: both modalities have one distribution",
        "global-discriminative": "for sets: elements keep away from the global feature",
        "intra-set-divergence": "for sets: elements keep away from each other",
        "caption-generation": "beside triplet, for words: images tell their captions",
    },
    "protocols": {
        "full": "all images and captions of a split: the default, and COCO 5K",
        "1k-folds": "5,000 images: the mean of five folds of 1,000, COCO 1K",
        "eccv": "COCO's test split: ECCV Caption, with right answers that COCO lacks",
        "cxc": "COCO's test split: Crisscrossed Captions, judged by people",
        "pmrp": "COCO's test split: matches that are plausible by their objects",
        "rpc2": "COCO's test split: R-Precision on Crisscrossed Captions",
    },
}


@click.command("list")
@click.argument("what", type=click.Choice(list(LISTS)), metavar="WHAT")
def list_(what: str) -> None:
    """List what there is to choose from, and when to take it.

    WHAT is encoders, recipes, aggregators, similarities, losses or protocols.

    \b
    xret list recipes
    xret list aggregators
    """
    entries = LISTS[what]
    width = max(map(len, entries))
    show(entries, [f"{name:{width}}  {when}" for name, when in entries.items()])
