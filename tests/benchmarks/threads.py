"""What threads cost beside other processes: a training and an evaluation with one thread, with all, and as xret does.

    python tests/benchmarks/threads.py                 # on a machine that is otherwise quiet
    python tests/benchmarks/threads.py --busy 1        # beside so many processes that do nothing but compute

Each prints a markdown table of seconds by the clock, the median of rounds in which the three take turns. `spinning` has
all threads and lets them wait as OpenMP does by itself; it ends after five times what one thread took. The last column
is xret's time over that of the better of the other two; the aim is 1.2.
"""

import logging
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
from sizes import seconds_of, small

import xret
from xret.cli.demo import ROWS
from xret.demo.generate import generate_scenes

WAYS = ("one thread", "spinning", "xret")
BUSY = "import os\nwhile os.getppid() == {parent}: sum(range(100000))"  # it ends with its parent
MLP = ("mlp", {"model.dim": 128})


@click.group(invoke_without_command=True)
@click.option("--busy", default=0, show_default=True, help="Processes that compute beside.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--epochs", default=5, show_default=True)
@click.option("--recipes", default="mlp,vsepp,setdiv-k4", show_default=True, help="mlp, or rows of the demo.")
@small(rounds=1, epochs=1, recipes="mlp", images=40)
@click.pass_context
def main(context: click.Context, busy: int, rounds: int, epochs: int, recipes: str, images: int = 800) -> None:
    """Time the work in processes of their own."""
    if context.invoked_subcommand:
        return
    with tempfile.TemporaryDirectory() as folder, beside(busy):
        store = Path(folder) / "scenes.zarr"
        logging.getLogger("xret").setLevel(logging.WARNING)
        scenes = generate_scenes(Path(folder) / "scenes", train=images, val=images // 8, test=images // 8)
        xret.extract(scenes, store, visual="plain-ground", text="words")
        click.echo(f"| work, {busy} busy | {' | '.join(f'{way}, s' for way in WAYS)} | xret / better |")
        click.echo(f"|{'---|' * (len(WAYS) + 2)}")
        for name in recipes.split(","):
            found: dict[tuple[str, str], list[float]] = {}
            for number in range(rounds):
                limit = None
                for way in WAYS:
                    out = Path(folder) / f"{name}-{way}-{number}".replace(" ", "-")
                    seconds = timed(way, store, out, name, epochs, limit)
                    limit = 5 * sum(seconds) + 30 if limit is None else limit
                    for what, one in zip(("training", "evaluation"), seconds, strict=True):
                        found.setdefault((what, way), []).append(one)
            for what in ("training", "evaluation"):
                one, spinning, ours = (statistics.median(found[what, way]) for way in WAYS)
                times = " | ".join(f"{seconds:.2f}" for seconds in (one, spinning, ours))
                click.echo(f"| {what} of {name} | {times} | {ours / min(one, spinning):.2f} |")


def timed(way: str, store: Path, out: Path, name: str, epochs: int, limit: float | None) -> list[float]:
    """Return the seconds of a training and an evaluation in a process of their own; infinite beyond the limit."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_NUM_THREADS": "1"} if way == "one thread" else {}
    words = [sys.executable, __file__, "work", way, *map(str, (store, out, name, epochs))]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [float("inf")] * 2
    return [float(seconds) for seconds in done.stdout.split()]


@contextmanager
def beside(busy: int):
    """Let so many processes compute meanwhile, each in a session of its own, as another user's would."""
    with ExitStack() as running:
        for _ in range(busy):
            words = [sys.executable, "-c", BUSY.format(parent=os.getpid())]
            process = running.enter_context(subprocess.Popen(words, start_new_session=True))
            running.callback(process.kill)
        yield


@main.command()
@click.argument("way", type=click.Choice(WAYS))
@click.argument("store")
@click.argument("out")
@click.argument("name")
@click.argument("epochs", type=int)
def work(way: str, store: str, out: str, name: str, epochs: int) -> None:
    """Train and evaluate in this process, and print the seconds of both."""
    from xret.cli.memory import keep_freed_memory
    from xret.pipeline import openmp

    keep_freed_memory()
    logging.getLogger("xret").setLevel(logging.WARNING)
    if way == "spinning":
        openmp._watching.acquire()  # as if another watched, who never does anything
    recipe, settings = MLP if name == "mlp" else ROWS[name]
    settings = settings | {"schedule.epochs": epochs}
    training = seconds_of(lambda: xret.train(store, recipe=recipe, out=out, settings=settings))
    click.echo(f"{training} {seconds_of(lambda: xret.evaluate(out, split='train'))}")


if __name__ == "__main__":
    main()
