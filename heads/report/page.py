"""The page: everything put together, rendered and written in one step."""

import logging
from collections.abc import Sequence as Several
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from tqdm import tqdm

from ...pipeline.errors import RunError
from ...pipeline.files import require_writable, write_text
from ...pipeline.progress import hidden
from ..evaluation.evaluation import evaluate_untrained, load_measures, open_rankers, tables
from ..evaluation.number_table import shown
from ..evaluation.own_model import Embedder
from ..evaluation.scoring import embed_split
from ..runs.info import BRANCHES, versions
from .attention import Attended, attention_of_run
from .examples import DIRECTIONS, PageRun, agreement_table, by_element, disagreements, exemplary, gallery, mixed
from .pictures import Pictures
from .tables import Opening, evaluation_tables, facts_table, training_charts

IMAGES = 3  # whose attention is drawn, of all runs together
CASES = 3  # queries that succeed, and as many that fail, whose elements are looked at
QUERIES = 3  # of a gallery in each direction
TOP, SHARED = 5, 3  # their results by one run, and by each of several
COLLAPSED = 0.95  # the mean cosine of two elements of a set from which on they are called collapsed
MARK = '<meta name="generator" content="xret report">'  # by which a report is known
log = logging.getLogger("xret")


def write_report(
    runs: str | Path | Embedder | Several[str | Path | Embedder],
    out: str | Path,
    *,
    store: str | Path | None = None,
    split: str = "test",
    data_root: str | Path | None = None,
    seed: int = 0,
    features: str = "auto",
    device: str = "auto",
    trust: bool = False,
    opening: Opening | None = None,
) -> int:
    """Write a page about a run, a store or a user-defined model, or several of one data set; return its bytes.

    The same runs, `seed` and device give the same page; the seed picks what is shown. An earlier report at `out` is
    replaced. Pictures are in `data_root`; without it, ids and captions replace them. An `opening` comes first.
    Other arguments are those of `evaluate`.

    Raises:
        RunError: `out` is something else, or the runs are of several data sets, or do not fit their stores or split.
        CacheError: a store cannot be read.
    """
    require_place(Path(out))
    opened = tqdm(open_rankers(runs, store, features, device, trust), "report", unit=" runs", disable=hidden())
    embedded = [embed_split(ranker, split) for ranker in opened]
    if len(datasets := {run.ranker.cache.dataset for run in embedded}) > 1:
        raise RunError(f"the runs are of several data sets, {' and '.join(sorted(datasets))}; make a page for each")
    pictures = Pictures(embedded[0].ranker.cache, None if data_root is None else Path(data_root))
    if pictures.why_not:
        log.warning("the page will have no pictures: %s", pictures.why_not)
    named = zip(names([run.ranker.name for run in embedded]), embedded, strict=True)
    shown_runs = [PageRun(name, run, pictures) for name, run in named]
    text = render({"opening": opening, **_content(shown_runs, pictures, seed, device)})
    if pictures.unreadable:
        first = next(iter(pictures.unreadable.values()))
        log.warning("unread pictures: %d; the first: %s", len(pictures.unreadable), first)
    write_text(Path(out), text, RunError, "make room, or take another --out")
    return len(text.encode())


def require_place(out: Path) -> None:
    """Raise RunError if `out` is there and is no earlier report, OutputError if nothing can be written there."""
    if out.is_dir():
        raise RunError(f"{out} is a folder; give --out the name of a file, as {out / 'report.html'}")
    require_writable(out, "--out")
    if out.exists() and MARK.encode() not in out.read_bytes()[:1000]:
        raise RunError(f"{out} exists and is no report of xret; take another --out, or delete it")


def names(paths: Several[str]) -> list[str]:
    """Return names that tell runs apart: their folders', or where two are alike, their paths with a number."""
    short = [Path(path).resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [f"{path} ({number})" for number, path in enumerate(paths, 1)]


def render(page: dict[str, Any]) -> str:
    """Return the HTML of a page."""
    loader = PackageLoader(__package__ or "", "templates")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters["shown"] = shown
    return pages.get_template("page.html").render(page, mark=MARK)


def _content(runs: Several[PageRun], pictures: Pictures, seed: int, device: str) -> dict[str, Any]:
    """Return what the template fills in; of several runs there is less of each."""
    first, *others = [(run.seen.ids, run.seen.texts) for run in runs]
    alike = all(other == first for other in others)
    compared = alike and bool(others)
    absent = [] if alike else [("comparison", "the runs do not see the same images and captions")]
    attended = _attended(runs, seed, alike)
    absent += [(f"attention of {name}", reason) for name, (_, _, reason) in attended.items() if reason]
    page = {
        "runs": [run.name for run in runs],
        "dataset": runs[0].seen.ranker.cache.dataset,
        "split": runs[0].seen.split,
        "directions": DIRECTIONS,
        "facts": facts_table(runs),
        "evaluation": evaluation_tables(_evaluations(runs, device)),
        "charts": training_charts(runs),
        "agreement": agreement_table(runs) if compared else None,
        "disagreements": {way: disagreements(runs, way, 3, seed) if compared else [] for way in DIRECTIONS},
        "attention": [(name, what, images) for name, (what, images, _) in attended.items() if images],
        "elements": _elements(runs, seed),
        "spreads": [*chain.from_iterable(map(spread, runs))],
        "galleries": {way: _galleries(runs, way, seed, alike) for way in DIRECTIONS},
        "absent": absent,
        "seed": seed,
        "version": versions()["xret"],
    }
    return page | {"pictures": pictures}  # last: by now it holds what is shown


def _attended(runs: Several[PageRun], seed: int, alike: bool) -> dict[str, tuple[str, list[Attended], str]]:
    """Return where each run looks, as `attention_of_run` has it; if all see the same samples, in one image first."""
    lead, count = max(runs, key=lambda run: run.ways["image_to_text"].query_elements.shape[1]), _each(IMAGES, len(runs))
    return {run.name: attention_of_run(run, count, seed, exemplary(lead if alike else run, seed)) for run in runs}


def _evaluations(runs: Several[PageRun], device: str) -> list[tuple[str, Any]]:
    evaluations = [(run.name, tables([run.seen.ranker], run.seen, load_measures(run.seen.ranker))) for run in runs]
    rankers = [run.seen.ranker for run in runs]
    by_sets = {(ranker.cache.url, *(part.name for part in ranker.sets)): ranker for ranker in rankers}
    for ranker in by_sets.values():
        untrained = evaluate_untrained(ranker.sets, runs[0].seen.split, device=device)
        if untrained and untrained.runs[0] not in {other.name for other in rankers}:
            evaluations.append((untrained.runs[0], untrained))
    return evaluations


def _elements(runs: Several[PageRun], seed: int) -> list[tuple[str, list[tuple[str, Any]]]]:
    sets, sections = [run for run in runs if run.seen.is_set], []
    for way, title in DIRECTIONS.items():
        for right, what in ((True, "right"), (False, "wrong")):
            count = _each(CASES, len(sets))
            cases = [(run.name, example) for run in sets for example in by_element(run.ways[way], right, count, seed)]
            sections += [(f"{title.capitalize()}: the whole set is {what}", cases)] if cases else []
    return sections


def spread(run: PageRun) -> list[str]:
    """Return how far the elements of a run's sets lie apart, in words; nothing if it has no sets."""
    cosines = {}
    for side, elements in zip(BRANCHES, (run.seen.image.elements, run.seen.text.elements), strict=True):
        count = elements.shape[1]
        if count > 1:
            both = elements.sum(1).square().sum(1).double().mean().item()
            cosines[side] = (both - count) / (count * (count - 1))
    if not cosines:
        return []
    said = " and ".join(f"{cosine:.2f} in {side} sets" for side, cosine in cosines.items())
    collapsed = [side for side, cosine in cosines.items() if cosine > COLLAPSED]
    verdict = f"above {COLLAPSED} they would have collapsed into one vector"
    if collapsed:
        verdict = f"above {COLLAPSED}, the {' and '.join(collapsed)} sets have collapsed: their elements say the same"
    return [f"{run.name}: the mean cosine of two elements of a set is {said}; {verdict}."]


def _galleries(runs: Several[PageRun], way: str, seed: int, alike: bool) -> list[list[tuple[str, Any]]]:
    """Return queries with what each run finds; runs that see other samples have no query in common."""
    best = max(runs, key=lambda run: run.ways[way].hits.mean())
    top, queries = TOP if len(runs) == 1 else SHARED, mixed(best.ways[way], QUERIES, seed)
    if alike:
        of_runs = [[(run.name, example) for example in gallery(run.ways[way], queries, top)] for run in runs]
        return [list(group) for group in zip(*of_runs, strict=True)]
    each = [(run.name, gallery(run.ways[way], mixed(run.ways[way], QUERIES, seed), top)) for run in runs]
    return [[(name, example)] for name, examples in each for example in examples]


def _each(total: int, runs: int) -> int:
    return -(-total // max(1, runs))
