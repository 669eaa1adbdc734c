"""The numbers of the runs: what the protocols measure, how training went, what each similarity would find."""

from collections.abc import Sequence as Several
from functools import partial
from typing import Any

import torch

from ...evaluation.evaluation import Evaluation, Result
from ...evaluation.metrics import Recalls, Ties, ranks, recall_table
from ...modules.similarity import SIMILARITIES, in_blocks
from ..figures import Plot, Table, number
from ..plots import bars, curves
from ..views import Direction, View

WAYS: dict[Direction, str] = {"image_to_text": "image to text", "text_to_image": "text to image"}
RECALLS = [f"{short} R@{k}" for short in ("i→t", "t→i") for k in (1, 5, 10)]
SETS = ("mil", "chamfer", "smooth-chamfer", "assignment")  # similarities of sets that have nothing to learn
SOME = 1000  # images on which they are compared


def evaluation_tables(names: Several[str], results: Several[Evaluation]) -> list[Table]:
    """Return a table a protocol, with a row a run; `results` has the evaluation of each.

    Runs that see other numbers of images or captions, as where samples failed, have a table of their own.
    """
    alike: dict[tuple[str, int, int, int], list[tuple[str, Result]]] = {}
    for name, result in zip(names, results, strict=True):
        for table in result.results:
            alike.setdefault(_measured_on(table), []).append((name, table))
    order = list(dict.fromkeys(protocol for protocol, *_ in alike))
    return [_protocol(*alike[key]) for key in sorted(alike, key=lambda key: order.index(key[0]))]


def _measured_on(result: Result) -> tuple[str, int, int, int]:
    return result.protocol, result.images, result.captions, result.skipped


def _recalls(found: Result | Recalls) -> list[float]:
    """Return the six recalls."""
    return [getattr(found, way)[f"R@{k}"] for way in WAYS for k in (1, 5, 10)]


def _protocol(*found: tuple[str, Result]) -> Table:
    first = found[0][1]
    measures = list(first.image_to_text)
    header = ["run", *(f"{short} {measure}" for short in ("i→t", "t→i") for measure in measures)]
    recalls = first.rsum is not None
    paper = any(result.paper_rsum is not None for _, result in found)
    header += ["RSUM", "mean recall"] * recalls + ["paper's RSUM", "difference"] * paper
    rows, shaded = [], []
    for name, one in found:
        values = [(measure, getattr(one, way)[measure]) for way in WAYS for measure in measures]
        cells = [number(value, 1 if measure == "medr" else 2) for measure, value in values]
        if recalls:
            cells += [number(one.rsum), number(one.mean_recall)]
        if paper:
            cells += [number(one.paper_rsum), number(one.difference)]
        rows.append([name, *cells])
        recalled = [None if measure == "medr" else value for measure, value in values]
        shaded.append(recalled + [None] * (len(cells) - len(recalled)))
    unit = "recall in percent, medr: median rank from 1" if recalls else "in percent"
    caption = (
        f"Protocol {first.protocol}, split {first.split}: {first.images:,} images, {first.captions:,} captions "
        f"({first.captions_per_image:.2f} an image), {first.skipped:,} skipped, ties "
        f"{first.ties}. i→t is image to text, t→i text to image; {unit}."
    )
    return Table(caption, header, rows, shaded)


def rsum_plot(names: Several[str], results: Several[Evaluation]) -> Plot | None:
    """Draw the recalls of all runs by the first protocol that all have on as many samples; None without one."""
    for first in results[0].results:
        same = [[one for one in found.results if _measured_on(one) == _measured_on(first)] for found in results]
        if first.rsum is None or not all(same):
            continue
        labels = [name.replace(" ", "\n") for name in RECALLS]
        series = [(name, _recalls(found[0])) for name, found in zip(names, same, strict=True)]
        return Plot(partial(bars, labels, series, "recall (%)"), "Bar chart", f"Recalls, protocol {first.protocol}.")
    return None


def training_plots(views: Several[View]) -> list[Plot]:
    """Draw how each run was trained: validation RSUM of all, then loss and learning rate of each."""
    logs = {view.name: [line for line in view.run.metrics() if "epoch" in line] for view in views}
    plots = []
    if rsum := _known(logs, "rsum"):
        best = "; ".join(f"{name}: best {max(values):.2f} at epoch {epochs[values.index(max(values))]:.0f}"
                         for name, epochs, values in rsum)  # fmt: skip
        draw = partial(curves, rsum, "epoch", "validation RSUM (sum of six %)", whole=True)
        plots.append(Plot(draw, "Line chart", f"Validation RSUM by epoch. {best}."))
    plots += [_losses(name, log) for name, log in logs.items() if log]
    if rates := [one for one in _known(logs, "lr") if min(one[2]) > 0]:
        draw = partial(curves, rates, "epoch", "learning rate", log=True, whole=True)
        plots.append(Plot(draw, "Line chart", "Learning rate at the end of each epoch."))
    return plots


def _losses(name: str, log: list[dict[str, Any]]) -> Plot:
    terms = list(dict.fromkeys(term for line in log for term in line.get("parts", {})))
    terms = terms if len(terms) > 1 else []
    flat = [{**line.get("parts", {}), **line} for line in log]
    series = [(key, *_column(flat, key)) for key in ("loss", *terms)]
    positive = all(value > 0 for _, _, values in series for value in values)
    rows = [
        [str(line["epoch"]), *(number(line.get(key), 4) for key in ("loss", *terms)), number(line.get("rsum")),
         number(line.get("seconds"), 1)]
        for line in flat
    ]  # fmt: skip
    columns = ["epoch", "loss", *terms, "validation RSUM", "seconds"]
    table = Table(f"Training of {name}, epoch by epoch", columns, rows)
    title = "loss (log scale)" if positive else "loss"
    caption = f"{name}: mean loss of each epoch" + (", with its terms before they are weighted." if terms else ".")
    return Plot(partial(curves, series, "epoch", title, log=positive, whole=True), "Line chart", caption, table)


def _known(logs: dict[str, list[dict[str, Any]]], key: str) -> list[tuple[str, list[float], list[float]]]:
    """Return the name of each run that has numbers for `key`, its epochs and the numbers."""
    series = [(name, *_column(log, key)) for name, log in logs.items()]
    return [one for one in series if one[2]]


def _column(log: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Return the epochs that have a number for `key`, and the numbers."""
    there = [(line["epoch"], line[key]) for line in log if isinstance(line.get(key), int | float)]
    return [float(epoch) for epoch, _ in there], [float(value) for _, value in there]


@torch.no_grad()
def similarity_table(view: View, ties: Ties) -> Table | None:
    """Return what other similarities would find with the embedding sets of a run; None where they are no sets."""
    images, captions = view.image.embedding, view.text.embedding
    if not (view.is_set and isinstance(images, torch.Tensor) and isinstance(captions, torch.Tensor)):
        return None
    owner = view.scores.caption_image  # ascending
    owner = owner[owner < SOME]
    images, captions = images[:SOME], captions[: len(owner)]
    own = view.run.recipe.similarity["name"]
    scored = {f"{own} (its own)": view.scores.similarity[: len(images), : len(captions)]}
    scored |= {name: in_blocks(SIMILARITIES[name](), images, captions) for name in SETS if name != own}
    rows, values = [], list[list[float | None]]()
    for name, similarity in scored.items():
        table = recall_table(*ranks(similarity, owner), ties)
        values.append([*_recalls(table), None])
        rows.append([name, *map(number, (*_recalls(table), table.rsum))])
    caption = (
        "The same embedding sets compared by the run's own similarity and by others, which it was not trained with; "
        f"the first {len(images):,} images and their {len(captions):,} captions, recall in percent."
    )
    return Table(caption, ["similarity", *RECALLS, "RSUM"], rows, values)
