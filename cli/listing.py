"""``xret list``: what there is to choose from, and when to take it."""

import json

import click

# Of each list the names of a registry, with when to take each; a test holds them against the registries.
LISTS: dict[str, dict[str, str]] = {
    "encoders": {
        "resnet152": "and any other classification network of torchvision: a grid; what the papers of grids have",
        "hf:ID": "a model of transformers: DINOv2 and the like; with --encoder both towers of CLIP or SigLIP",
        "timm:NAME": "a network that transformers does not have",
        "open_clip:ARCH/TAG": "a CLIP of open_clip, or of its weights in a file",
        "butd": "36 regions of bottom-up attention: what the papers of regions have",
        "butd-grid": "the same network's grid, without the time of the boxes",
        "fasterrcnn_resnet50_fpn_v2": "regions with classes, where the weights of bottom-up attention are not at hand",
        "bert": "captions: a frozen text encoder, best with few training captions",
        "words": "captions: words that the head learns, in no time to extract; best with many captions",
    },
    "recipes": {
        "linear": "a linear layer a side: whether a system is worth it",
        "mlp": "that plus a perceptron: the row to beat",
        "vsepp": "a first number, and the fastest training",
        "vse-infty": "one vector for any vector database; it learns how to pool",
        "setdiv": "pictures and captions are ambiguous, and several answers are right",
        "maxmatch": "the vectors of a set must stay apart",
        "pvse": "to compare with the first of the set embeddings",
        "pcmepp": "an uncertainty with each embedding",
        "pcme": "to compare with the first of the probabilistic ones",
        "gaussian-vsepp": "an uncertainty for a model of vectors",
        "gaussian-vsrn": "the same for regions that know each other",
        "vsrn": "regions, and time",
        "scan": "which word looks where; by far the slowest to compare",
        "fusemix": "global features of strong encoders; it blends pairs, so that fewer do",
        "lit": "global features whose images stay as they are: very many pairs",
        "sail": "global features of strong encoders: very many pairs, thousands at once",
    },
    "aggregators": {
        "global": "the global feature alone: encoders that were trained for it, as CLIP's",
        "average": "the mean of the rows: grids, and where in doubt",
        "max": "what stands out in one row alone",
        "k-max": "the mean of the k largest values: between mean and maximum",
        "gem": "a learned power between mean and maximum",
        "fspool": "sorted values with learned weights; samples with many rows",
        "cls": "the first row: a class token",
        "last": "the last row: the end of a sequence",
        "self-attention": "a learned weight for each row",
        "seq2seq": "a learned weight for each row by a recurrent network; frames of videos",
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
        "smooth-chamfer": "the same with gradients for all pairs: sets that must not collapse",
        "assignment": "sets that are matched one to one",
        "monte-carlo-match": "samples of Gaussians",
        "kl": "Gaussians, in one direction",
        "min-kl": "Gaussians, in the better direction",
        "wasserstein": "Gaussians, whose variances count like their means",
        "sampled-distance": "Gaussians, in closed form: the fastest with uncertainty",
        "cross-attention": "rows against words: slow, and it shows which word looks where",
    },
    "losses": {
        "triplet": "the usual one; its hardest negatives want batches of 100 or more",
        "infonce": "large batches, and strong frozen encoders",
        "sigmoid": "very large batches: each pair is judged alone",
        "matching-bce": "Gaussians, as PCME++ has them",
        "soft-contrastive": "samples of Gaussians, as PCME has them",
        "information-bottleneck": "beside these two: variances neither vanish nor explode",
        "uniformity": "beside them: embeddings spread over the sphere",
        "diversity": "beside triplet, for sets: elements differ",
        "mmd": "beside triplet: images and captions have one distribution",
        "global-discriminative": "for sets: elements keep away from the global feature",
        "intra-set-divergence": "for sets: elements keep away from each other",
        "caption-generation": "beside triplet, for words: the image has to tell its caption",
    },
    "protocols": {
        "full": "all images and captions of a split: the default, and COCO 5K",
        "1k-folds": "5,000 images: the mean of five folds of 1,000, COCO 1K",
        "eccv": "COCO's test split: ECCV Caption, which finds right answers that COCO does not name",
        "cxc": "COCO's test split: Crisscrossed Captions, judged by people",
        "pmrp": "COCO's test split: matches that are plausible by their objects",
        "rpc2": "COCO's test split: R-Precision on Crisscrossed Captions",
    },
}


@click.command("list")
@click.argument("what", type=click.Choice(list(LISTS)))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def list_(what: str, as_json: bool) -> None:
    """List what there is to choose from, a line each, with when to take it.

    \b
    xret list recipes
    xret list aggregators
    """
    entries = LISTS[what]
    if as_json:
        click.echo(json.dumps(entries))
        return
    width = max(map(len, entries))
    for name, when in entries.items():
        click.echo(f"{name:{width}}  {when}")
