"""The page: everything put together, rendered and written in one step."""

import json
import sys
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...pipeline.errors import RunError
from ...pipeline.files import making_file, require_writable
from ...pipeline.progress import Progress
from ...pipeline.versions import require_packages
from ...pipeline.wording import printable
from ..evaluation.evaluation import Evaluation, evaluate_scores, evaluate_untrained
from ..evaluation.metrics import Ties
from ..evaluation.rankers import Ranker
from ..recipes.blocks import Recipe
from ..runs.config import flat
from ..runs.features import caption_set_of_run, image_set_of_run
from ..runs.info import versions
from ..runs.run import MAY_CHANGE
from .diagnostics import Diagnosis, diagnose_view
from .figures import Table, by_kind, number, side_by_side
from .pictures import Pictures
from .sections.attention import attended_images
from .sections.comparison import agreement_table, disagreements
from .sections.crops import together
from .sections.diagnoses import Shown, diagnosis
from .sections.examples import Example, by_element, different_results, gallery
from .sections.space import element_map
from .sections.tables import WAYS, evaluation_tables, rsum_plot, similarity_table, training_plots
from .sections.word_attention import Read, words_over_images
from .views import Direction, View, open_views, same_samples

IMAGES = 3  # of one run, whose attention is drawn
CASES = 3  # queries of one run that succeed, and as many that fail, whose elements are looked at
GALLERY = 3, 5  # queries of a gallery in each direction, and results of each
SHARED = 2, 3  # the same for several runs
MARK = '<meta name="generator" content="xret report">'  # by which a report is known


def write_report(
    runs: Several[str | Path],
    out: str | Path,
    *,
    store: str | None = None,
    split: str = "test",
    ties: Ties = "pessimistic",
    device: str = "auto",
    data_root: str | Path | None = None,
    visual_weights: str | None = None,
    text_weights: str | None = None,
    seed: int = 0,
) -> int:
    """Write a page about a run, or about several of one data set side by side.

    The same runs, seed and device give the same page. `diagnostics.diagnose` explains the other arguments.

    Args:
        runs: run folders.
        out: the HTML file; an earlier report there is replaced.
        data_root: where the pictures are, see `reattachment.image_folder`; None: where the manifest says, or nowhere:
            the page then shows ids and captions only.
        seed: picks what is shown.

    Returns:
        The bytes of the page.

    Raises:
        RunError: a package is missing, `out` is something else or cannot be written, or the runs are of several data
            sets, or do not fit their stores or the split.
        CacheError: a store cannot be read.
    """
    require_packages("a report needs", {"matplotlib": "matplotlib", "scikit-learn": "sklearn"}, "report")
    require_place(Path(out))
    views = open_views(runs, store, split, device)
    for view in views:
        if view.cache.dataset != views[0].cache.dataset:
            raise RunError(
                f"{views[0].run.path} is of the data set '{views[0].cache.dataset}' and {view.run.path} of "
                f"'{view.cache.dataset}'; a page is about one: make one for each"
            )
    pictures = Pictures(views[0].cache, None if data_root is None else Path(data_root))
    if pictures.why_not:
        print(printable(f"the page will have no pictures: {pictures.why_not}"), file=sys.stderr)
    results, found = [], []
    with Progress("report", 2 * len(views) + 1, "parts") as progress:
        for view in views:
            sets = image_set_of_run(view.run, view.cache), caption_set_of_run(view.run, view.cache)
            results.append(evaluate_scores(Ranker(view.run, view.cache, sets), view.scores, split, ties))
            progress.update(1)
            found.append(diagnose_view(view, ties, data_root, visual_weights, text_weights))
            progress.update(1)
        untrained = _untrained(views, split, ties, device)
        page = _content(views, results, untrained, found, pictures, ties, seed)
        progress.update(1)
    if pictures.unreadable:
        print(printable(f"unread pictures: {len(pictures.unreadable)}; the first: {pictures.reason}"), file=sys.stderr)
    text = render(page)
    with making_file(Path(out), RunError) as partial:
        partial.write_text(text, encoding="utf-8")
    return len(text.encode())


def require_place(out: Path) -> None:
    """Raise RunError if `out` is there and is no earlier report, OutputError if nothing can be written there."""
    if out.is_dir():
        raise RunError(f"{out} is a folder; give --out the name of a file, as {out / 'report.html'}")
    require_writable(out, "--out")
    if out.exists():
        with out.open("rb") as file:
            if MARK.encode() not in file.read(1000):
                raise RunError(f"{out} exists and is no report of xret; take another --out, or delete it")


def render(page: dict[str, Any]) -> str:
    """Return the HTML of a page."""
    templates = Environment(
        loader=PackageLoader(__package__ or "", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["sentence"] = lambda text: f"{text[:1].upper()}{text[1:].rstrip('.')}."
    return templates.get_template("page.html").render(page, mark=MARK)


def _content(
    views: Several[View],
    results: Several[Evaluation],
    untrained: Several[Evaluation],
    found: Several[Diagnosis],
    pictures: Pictures,
    ties: Ties,
    seed: int,
) -> dict[str, Any]:
    """Return what the template fills in; of several runs there is less of each."""
    names = [view.name for view in views]
    measured = [*names, *(one.runs[0] for one in untrained)], [*results, *untrained]
    shown = {view.name: diagnosis(one, pictures.seen(view.upright)) for view, one in zip(views, found, strict=True)}
    alike = same_samples(views)
    other = {} if alike else {"comparison": "the runs do not see the same images and captions"}
    slots, words, reasons = _attention(views, pictures, seed)
    similarities = {view.name: table for view in views if (table := similarity_table(view, ties))}
    tables = by_kind({name: one.tables for name, one in shown.items()})
    page = {
        "names": names,
        "dataset": views[0].cache.dataset,
        "split": views[0].split,
        "ways": WAYS,
        "facts": _facts(views, shown),
        "evaluation": evaluation_tables(*measured),
        "recalls": rsum_plot(*measured) if len(measured[0]) > 1 else None,
        "similarities": side_by_side(similarities, len(views) > 1),
        "agreement": agreement_table(views) if alike and views[1:] else None,
        "disagreements": {way: disagreements(views, pictures.seen(views[0].upright), way, seed) for way in WAYS}
        if alike and views[1:]
        else {},
        "training": training_plots(views),
        "tables": [
            table
            for kind in dict.fromkeys(kind for _, kind, _ in tables)
            for table in side_by_side({run: one for run, other, one in tables if other == kind}, len(views) > 1)
        ],
        "heat_maps": by_kind({name: one.heat_maps for name, one in shown.items()}),
        "plots": by_kind({name: one.plots for name, one in shown.items()}),
        "uncertain": by_kind({name: one.uncertain for name, one in shown.items()}),
        "triplets": together({name: one.triplets for name, one in shown.items() if one.triplets}),
        "maps": [(view.name, element_map(view, seed)) for view in views],
        "slots": slots,
        "words": words,
        "elements": _elements(views, pictures, seed),
        "galleries": {way: _galleries(views, pictures, way, seed, alike) for way in WAYS},
        "absent": absent({name: one.reasons | reasons[name] | other for name, one in shown.items()}),
        "seed": seed,
        "version": versions()["xret"],
    }
    return page | {"pictures": pictures}  # last: by now it holds what is shown


def _attention(views: Several[View], pictures: Pictures, seed: int) -> tuple[Any, Any, dict[str, dict[str, str]]]:
    """Return what slots look at, what words do by how they are compared, and by run why there is nothing."""
    slots, reasons = [], dict[str, dict[str, str]]()
    words: dict[tuple[bool, str], list[tuple[str, Read]]] = {}
    count = _each(IMAGES, len(views))
    for view in views:
        seen = pictures.seen(view.upright)
        reading = words_over_images(view, seen, count, seed)
        images, reason = attended_images(view, seen, count, seed)
        slots += [(view.name, image) for image in images]
        if reading:
            reason = reading.reason
            if reading.images:
                words.setdefault((reading.by_word, reading.what), []).extend((view.name, one) for one in reading.images)
        reasons[view.name] = {"attention": reason} if reason and not pictures.why_not else {}
    return slots, words, reasons


def _elements(views: Several[View], pictures: Pictures, seed: int) -> list[tuple[str, str, list[tuple[str, Example]]]]:
    """Return what single elements find: a title, what is said of it, and by run the queries."""
    sets, shown = [view for view in views if view.is_set], []
    count = CASES if len(views) == 1 else _each(2, len(sets))
    cases = {"successes": "the whole set is right", "failures": "the whole set is wrong"}
    for way, title in WAYS.items():
        found = [(view, by_element(view, pictures.seen(view.upright), way, count, seed)) for view in sets]
        spread = ", ".join(f"{view.name} {_spread(view, way, seed)}" for view in sets)
        for key, case in cases.items():
            examples = [(view.name, example) for view, one in found for example in one[key]]
            if examples:
                shown.append((f"{title.capitalize()}: {case}", spread, examples))
    return shown


def _galleries(
    views: Several[View], pictures: Pictures, way: Direction, seed: int, alike: bool
) -> list[Several[tuple[str, Example]]]:
    """Return queries with what each run finds; those of runs that see other samples have no query in common."""
    count, top = GALLERY if len(views) == 1 else SHARED
    runs = [
        [(view.name, one) for one in gallery(view, pictures.seen(view.upright), way, count, top, seed)]
        for view in views
    ]
    return list(zip(*runs, strict=True)) if alike else [[one] for run in runs for one in run]


def absent(reasons: dict[str, dict[str, str]]) -> list[tuple[str, str, str]]:
    """Return what is not on the page, of which runs if not of all, and why; each reason once.

    Args:
        reasons: by run, then by what is absent.
    """
    runs: dict[tuple[str, str], list[str]] = {}
    for run, own in reasons.items():
        for what, why in own.items():
            runs.setdefault((what, why), []).append(run)
    things: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (what, why), of in runs.items():
        things.setdefault((why, tuple(of)), []).append(what)
    return [
        (", ".join(what), ", ".join(of) if len(of) < len(reasons) else "", why) for (why, of), what in things.items()
    ]


def _each(total: int, runs: int) -> int:
    """Return how many each of several runs shows, if one shows `total`."""
    return -(-total // max(1, runs))


def _untrained(views: Several[View], split: str, ties: Ties, device: str) -> list[Evaluation]:
    """Return what the runs' frozen encoders reach without a head, where their features lie in one space."""
    found = {}
    for view in views:
        sets = image_set_of_run(view.run, view.cache), caption_set_of_run(view.run, view.cache)
        key = view.cache.url, sets[0].name, sets[1].name
        if key not in found:
            found[key] = evaluate_untrained(sets, split, ties, device)
    return [one for one in found.values() if one is not None]


def _spread(view: View, way: Direction, seed: int) -> str:
    return f"{number(different_results(view, way, seed))} of {view.ways[way].query_elements.shape[1]}"


def _facts(views: Several[View], shown: dict[str, Shown]) -> Table:
    """Return what the page says of the runs before anything else: a row a fact, a column a run."""
    columns = [dict([*_known(view), *shown[view.name].facts]) for view in views]
    rows = [[fact, *(column[fact] for column in columns)] for fact in columns[0]]
    rows += differing_settings([view.run.recipe for view in views])
    return Table("What was trained on what", ["run", *(view.name for view in views)], rows)


def differing_settings(recipes: Several[Recipe]) -> list[list[str]]:
    """Return a row for each key in which recipes of one name differ: the key, and the value of each recipe.

    What no number depends on is left out, and the feature sets, which a fact of their own tells.
    """
    values = [flat(recipe.to_dict()) for recipe in recipes]
    alike: dict[str, list[dict[str, Any]]] = {}
    for recipe, own in zip(recipes, values, strict=True):
        alike.setdefault(recipe.name, []).append(own)
    keys = dict.fromkeys(key for own in values for key in own if key not in MAY_CHANGE)
    differing = [key for key in keys if any(any(own.get(key) != of[0].get(key) for own in of) for of in alike.values())]
    return [[key, *(_setting(own, key) for own in values)] for key in differing]


def _setting(values: dict[str, Any], key: str) -> str:
    """Return a value as `--set` takes it, or a dash where there is none."""
    if key not in values:
        return "–"
    value = values[key]
    return value if isinstance(value, str) else json.dumps(value)


def _known(view: View) -> list[tuple[str, str]]:
    recipe, info = view.run.recipe, view.run.info
    return [
        ("recipe", f"{recipe.name} ({recipe.paper})"),
        ("aggregators", f"{recipe.aggregator['image']['name']} / {recipe.aggregator['text']['name']}"),
        ("similarity", recipe.similarity["name"]),
        ("losses", ", ".join(recipe.terms)),
        ("features", f"{' + '.join(info.names('image'))} / {' + '.join(info.names('text'))}"),
        ("seed", str(info.seed)),
        ("best epoch", f"{info.best_epoch or '–'} (validation RSUM {number(info.best_rsum)})"),
        ("store", view.cache.url),
    ]
