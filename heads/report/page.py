"""The page: everything put together, rendered and written in one step."""

import sys
from collections.abc import Sequence as Several
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...pipeline.errors import RunError
from ...pipeline.files import making_file, require_writable
from ...pipeline.progress import Progress
from ...pipeline.wording import printable
from ..evaluation.evaluation import Evaluation, evaluate, evaluate_untrained
from ..evaluation.metrics import Ties
from ..runs.features import caption_set_of_run, generation_shown, image_set_of_run, titled
from ..runs.info import versions
from .diagnostics import Diagnosis, diagnose_view
from .figures import number
from .pictures import Pictures
from .sections.attention import attended_images
from .sections.comparison import agreement_table, disagreements
from .sections.diagnoses import diagnosis
from .sections.examples import by_element, different_results, gallery
from .sections.space import element_map
from .sections.tables import WAYS, evaluation_tables, rsum_plot, similarity_table, training_plots
from .sections.word_attention import words_over_images
from .views import Direction, View, open_views, same_samples

NEEDED = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}
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
    require_packages()
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
            results.append(evaluate(view.run.path, store=store, split=split, ties=ties, scores=view.scores))
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


def require_packages() -> None:
    """Raise RunError if a package that only the report needs is not installed."""
    missing = [name for module, name in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise RunError(f"a report needs {' and '.join(missing)}: `pip install 'xret[report]'`")


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
    """Return what the template fills in."""
    names = [view.name for view in views]
    measured = [*names, *(one.runs[0] for one in untrained)], [*results, *untrained]
    alike = len(views) > 1 and same_samples(views)
    seen = {view.name: pictures.seen(view.upright) for view in views}
    sets = [view for view in views if view.is_set]
    page = {
        "views": views,
        "ways": WAYS,
        "facts": [_facts(view) for view in views],
        "evaluation": evaluation_tables(*measured),
        "recalls": rsum_plot(*measured),
        "training": training_plots(views),
        "comparable": alike,
        "agreement": agreement_table(views) if alike else None,
        "disagreements": {way: disagreements(views, seen[names[0]], way, seed) for way in WAYS} if alike else {},
        "diagnoses": [diagnosis(name, one, seen[name]) for name, one in zip(names, found, strict=True)],
        "maps": [element_map(view, seed) for view in views],
        "similarities": [table for view in views if (table := similarity_table(view, ties))],
        "attention": [
            (view.name, words_over_images(view, shown, seed), *attended_images(view, shown, seed))
            for view, shown in zip(views, seen.values(), strict=True)
        ],
        "elements": [
            (view, {way: (by_element(view, seen[view.name], way, seed), _spread(view, way, seed)) for way in WAYS})
            for view in sets
        ],
        "galleries": [(view.name, {way: gallery(view, seen[view.name], way, seed) for way in WAYS}) for view in views],
        "seed": seed,
        "version": versions()["xret"],
    }
    return page | {"pictures": pictures}  # last: by now it holds what is shown


def _untrained(views: Several[View], split: str, ties: Ties, device: str) -> list[Evaluation]:
    """Return what the runs' frozen encoders reach without a head, where their features lie in one space."""
    found = {}
    for view in views:
        sets = image_set_of_run(view.run, view.cache), caption_set_of_run(view.run, view.cache)
        key = view.cache.store.url, sets[0].name, sets[1].name
        if key not in found:
            found[key] = evaluate_untrained(sets, split, ties, device)
    return [one for one in found.values() if one is not None]


def _spread(view: View, way: Direction, seed: int) -> str:
    return f"{number(different_results(view, way, seed))} of {view.ways[way].query_elements.shape[1]}"


def _facts(view: View) -> list[tuple[str, str]]:
    """Return what the page says of a run before anything else."""
    recipe, info = view.run.recipe, view.run.info
    return [
        ("recipe", f"{recipe.name} ({recipe.paper})"),
        ("aggregators", f"{recipe.aggregator['image']['name']} / {recipe.aggregator['text']['name']}"),
        ("similarity", recipe.similarity["name"]),
        ("losses", ", ".join(recipe.terms)),
        ("features", f"{' + '.join(info.names('image'))} / {' + '.join(info.names('text'))}"),
        ("seed", str(info.seed)),
        ("best epoch", f"{info.best_epoch or '–'} (validation RSUM {number(info.best_rsum)})"),
        ("store", titled(view.cache.url, generation_shown(view.cache))),
    ]
