"""What training costs: against a straightforward reference, the bare products, and the backbone in the loop.

    python tests/benchmarks/training.py step --images 40 --captions 200
    python tests/benchmarks/training.py epoch

Each prints a markdown table of ratios measured within one run; what is compared takes turns, and medians count. On a
CPU one thread works, and its processor time is measured, so that other programs on the machine hardly count.
"""

from functools import partial

import click
import torch
from sizes import small
from training_epochs import epoch
from training_parts import WORD_IDS, Step, Watched, medians, print_table, replay, roi_batch

from xret.cli.memory import keep_freed_memory
from xret.heads.model import FeatureFacts
from xret.heads.recipes.recipe import load_recipe

CPU = torch.device("cpu")


@click.group()
def main() -> None:
    """What training costs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@main.command()
@click.option("--images", default=200, show_default=True)
@click.option("--captions", default=1000, show_default=True)
@small(images=20, captions=40, regions=4, channels=16, rounds=1, settings=("model.dim=16",))
def step(
    images: int,
    captions: int,
    regions: int = 36,
    channels: int = 2048,
    rounds: int = 3,
    settings: tuple[str, ...] = (),
) -> None:
    """A whole training step against its bare matrix products and the reference, on a CPU, memory kept as in training.

    The products of a step, forward and backward, are noted and formed again alone, in the shapes and layouts in which
    the step forms them.
    """
    batch, rows = roi_batch(images, captions, regions, channels), []
    for name in ("setdiv/f30k-butd-bigru", "maxmatch/f30k-butd-bigru"):
        what = load_recipe(name, list(settings)), (FeatureFacts("roi", channels, channels),), WORD_IDS, CPU
        take, reference = Step(*what), Step(*what, reference=True)
        keep_freed_memory()
        with Watched() as watched:
            take(batch)
        jobs = {"step": partial(take, batch), "bare": replay(watched.products), "theirs": partial(reference, batch)}
        whole, bare, theirs = medians(jobs, rounds, CPU).values()
        ratios = f"{whole / bare:.2f} (aim 1.25)", f"{theirs / whole:.2f}"
        seconds = (f"{one:.2f}" for one in (whole, bare, theirs))
        rows.append([name, *seconds, *ratios, f"{watched.flops / 1e9:.3g}", f"{watched.flops / 1e9 / bare:.0f}"])
    click.echo(f"{images} images of {regions} x {channels}, {captions} captions, float32\n")
    head = ["recipe", "step, s", "products, s", "reference, s", "step / products", "reference / step"]
    print_table([*head, "GFLOP", "GFLOP/s of the products"], rows)


main.add_command(epoch)

if __name__ == "__main__":
    main()
