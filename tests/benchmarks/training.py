"""What training costs: against a straightforward reference, the bare products, and the backbone in the loop.

    python tests/benchmarks/training.py similarity
    python tests/benchmarks/training.py step --images 40 --captions 200
    python tests/benchmarks/training.py epoch --visual resnet152

Each prints a markdown table of ratios measured within one run; what is compared takes turns, and medians count. On a
CPU one thread works, and its processor time is measured, so that other programs on the machine hardly count.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from sizes import small
from torch import Tensor, nn
from training_epochs import epoch
from training_parts import (
    WORD_IDS,
    Step,
    Watched,
    freshly,
    medians,
    print_table,
    replay,
    roi_batch,
    status_mb,
)
from training_reference import REFERENCES

from xret.cli.memory import keep_freed_memory
from xret.heads.model import FeatureFacts
from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.recipes.recipe import load_recipe

Jobs = dict[str, Callable[[], Any]]
CPU = torch.device("cpu")
AIMS = {"smooth-chamfer": 1.3, "assignment": 4.0}  # times as fast as the reference


@click.group()
def main() -> None:
    """What training costs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def compared(similarity: nn.Module, images: Tensor, captions: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Compare, forward and backward; return the values and both gradients."""
    values = similarity(images, captions)
    return values, *torch.autograd.grad(values, (images, captions), weight)


def sets_of(images: int, captions: int, size: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sets of random elements of both sides that collect gradients, and the gradient of their similarity."""
    sides = (torch.randn(count, size, dim, requires_grad=True) for count in (images, captions))
    return *sides, torch.randn(images, captions)


def peak_mb(name: str, ours: bool, sizes: tuple[int, int, int, int]) -> float:
    """Return by how much the memory of this process, which must be fresh, grows at most, in MB (Linux)."""
    torch.set_num_threads(1)
    similarity = SIMILARITIES[name]() if ours else REFERENCES[name](sizes[2])
    compared(similarity, *sets_of(2, 2, *sizes[2:]))  # whatever libraries keep is there now
    sets = sets_of(*sizes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_mb("VmRSS")
    compared(similarity, *sets)
    return status_mb("VmHWM") - before


@main.command()
@click.option("--images", default=200, show_default=True)
@click.option("--captions", default=1000, show_default=True)
@click.option("--elements", default=4, show_default=True, help="Size of the sets.")
@click.option("--dim", default=1024, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@small(images=20, captions=40, dim=16, rounds=1)
def similarity(images: int, captions: int, elements: int, dim: int, rounds: int) -> None:
    """Both set similarities against the reference, forward and backward, in float32 on a CPU.

    Values and gradients are compared first. Both form the same three matrix products, which bound the ratio; it is
    given without them as well. Memory is the peak of a fresh process over its inputs, gradients included.
    """
    sizes = images, captions, elements, dim
    left, right, weight = sets_of(*sizes)
    flat, flat_right = left.detach().flatten(0, 1), right.detach().flatten(0, 1)
    cotangent = torch.randn(len(flat), len(flat_right))

    def products() -> None:
        flat @ flat_right.T, cotangent @ flat_right, cotangent.T @ flat

    rows = []
    for name, aim in AIMS.items():
        jobs = {
            "ours": partial(compared, SIMILARITIES[name](), left, right, weight),
            "reference": partial(compared, REFERENCES[name](elements), left, right, weight),
        }
        differ = max(
            ((one - other).abs().max() / other.abs().max()).item()
            for one, other in zip(*(job() for job in jobs.values()), strict=True)
        )
        if differ > 1e-4:
            raise click.ClickException(f"{name}: ours and the reference differ by {differ:.1e} of the largest value")
        time_of = medians({**jobs, "products": products}, rounds, CPU)
        ours, theirs, bare = time_of["ours"], time_of["reference"], time_of["products"]
        ours_mb, reference_mb = (freshly(peak_mb, name, ours, sizes) for ours in (True, False))
        rows.append(
            [
                name,
                f"{differ:.0e}",
                f"{bare:.3f}",
                f"{ours:.3f}",
                f"{theirs:.3f}",
                f"{theirs / ours:.2f} (aim {aim})",
                f"{(theirs - bare) / (ours - bare):.1f}",
                f"{ours_mb:.0f}",
                f"{reference_mb:.0f}",
                f"{ours_mb / reference_mb:.2f}",
            ]
        )
    click.echo(f"{images} x {captions} sets of {elements} x {dim}, float32, forward and backward\n")
    head = ["similarity", "differ by", "products, s", "ours, s", "reference, s", "reference / ours", "without products"]
    print_table([*head, "ours, MB", "reference, MB", "ours / reference"], rows)


@main.command()
@click.option("--recipe", "names", multiple=True, default=("setdiv/f30k-butd-bigru", "maxmatch/f30k-butd-bigru"))
@click.option("--set", "settings", multiple=True, help="Recipe keys, KEY=VALUE.")
@click.option("--images", default=200, show_default=True)
@click.option("--captions", default=1000, show_default=True)
@click.option("--regions", default=36, show_default=True)
@click.option("--channels", default=2048, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@small(images=20, captions=40, regions=4, channels=16, rounds=1, settings=("model.dim=16",))
def step(
    names: tuple[str, ...],
    settings: tuple[str, ...],
    images: int,
    captions: int,
    regions: int,
    channels: int,
    rounds: int,
) -> None:
    """A whole training step against its bare matrix products and the reference, on a CPU, memory kept as in training.

    The products of a step, forward and backward, are noted and formed again alone, in the shapes and layouts in which
    the step forms them.
    """
    batch, rows = roi_batch(images, captions, regions, channels), []
    for name in names:
        what = load_recipe(name, list(settings)), FeatureFacts("roi", channels, channels), WORD_IDS, CPU
        try:
            take, reference = Step(*what), Step(*what, reference=True)
        except ValueError as error:
            raise click.ClickException(f"{name}: {error}") from error
        keep_freed_memory()
        with Watched() as watched:
            take(batch)
        jobs = {"step": partial(take, batch), "bare": replay(watched.products), "theirs": partial(reference, batch)}
        whole, bare, theirs = medians(jobs, rounds, CPU).values()
        times = (
            f"{whole:.2f}",
            f"{bare:.2f}",
            f"{theirs:.2f}",
            f"{whole / bare:.2f} (aim 1.25)",
            f"{theirs / whole:.2f}",
        )
        rows.append([name, *times, f"{watched.flops / 1e9:.3g}", f"{watched.flops / 1e9 / bare:.0f}"])
    click.echo(f"{images} images of {regions} x {channels}, {captions} captions, float32\n")
    head = ["recipe", "step, s", "products, s", "reference, s", "step / products", "reference / step"]
    print_table([*head, "GFLOP", "GFLOP/s of the products"], rows)


main.add_command(epoch)

if __name__ == "__main__":
    main()
