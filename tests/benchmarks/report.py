"""How long a report takes and how large its page is, over a split of a real store.

    python tests/benchmarks/report.py RUN --data-root DIR

The target: 1,000 images with 5,000 captions in under a minute on two cores, the page under 10 MB. Prints one JSON line.
"""

import json
import os
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import click


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--store", help="Another feature cache than each run's own.")
@click.option("--split", default="test", show_default=True)
@click.option("--data-root", help="Where the pictures are.")
def main(runs: tuple[str, ...], store: str | None, split: str, data_root: str | None) -> None:
    """Write a report and throw it away; the imports count."""
    began = time.monotonic()
    from xret.heads.report import write_report
    from xret.heads.runs.features import open_store
    from xret.heads.runs.run import Run

    with TemporaryDirectory() as folder:
        size = write_report(runs, Path(folder) / "report.html", store=store, split=split, data_root=data_root)
    seconds = time.monotonic() - began
    cache = open_store(Run(runs[0]), store)
    first, last = cache.splits[split]
    print(
        json.dumps(
            {
                "runs": len(runs),
                "images": last - first,
                "captions": int(cache.caption_count[first:last].sum()),
                "seconds": round(seconds, 1),
                "cpu_seconds": round(time.process_time(), 1),
                "cores": len(os.sched_getaffinity(0)),
                "megabytes": round(size / 1e6, 2),
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
