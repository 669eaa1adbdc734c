"""What there is to know of a GPU within ten minutes: right numbers first, then paces, each beside what it should be.

    python tests/benchmarks/gpu.py
    python tests/benchmarks/gpu.py --part right --part steps

Nothing is downloaded, and stores lie in memory where there is enough. A part that fails says so and the next one
follows, but where numbers are wrong. Each figure is a JSON line; ``h100`` is what xret's commit db895d0 took on an
H100, ``aim`` what it should be. Nobody else may use the GPU meanwhile.
"""

import itertools
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from extraction import same_picture
from reading import make_store
from sizes import small
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from training_epochs import F30K_IMAGES, cache_batches, device_of
from training_parts import WORD_IDS, Step, medians, on_device, roi_batch, seconds_of

import xret
from xret.heads.model import FeatureFacts
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.optimisation import float32_as
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.device import deterministic
from xret.pipeline.encoders.registry import load_visual
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import Options
from xret.pipeline.reading.batches import Batch

CPU = torch.device("cpu")
REGIONS, CHANNELS = 36, 2048
NETWORKS = "resnet152", "timm:vit_large_patch14_clip_224"
SETDIV, MAXMATCH, VSEPP = "setdiv/f30k-butd-bigru", "maxmatch/f30k-butd-bigru", "vsepp/f30k-butd-bigru"
STEPS = {  # milliseconds of a step: an H100's, and what it should take
    "mlp": (10.4, 1.5),
    "setdiv-small": (47.5, 8),
    VSEPP: (16.0, 6),
    "vse-infty/f30k-butd-bigru": (39.7, 12),
    "pcmepp": (54.7, 15),
    MAXMATCH: (65.7, 32),
    SETDIV: (55.1, 32),
}


class Session:
    """The device, how large everything is, and where stores lie."""

    def __init__(self, device: torch.device, tiny: bool, folder: Path) -> None:
        self.device, self.tiny, self.folder = device, tiny, folder
        self.images, self.steps = (40, 1) if tiny else (4096, 16)
        self.chosen: dict[str, Any] = {"model.dim": 16, "data.batch_size": 16} if tiny else {}
        self.step_ms: dict[str, float] = {}
        val = 10 if tiny else 1000
        width = 16 if tiny else CHANNELS
        self.facts = FeatureFacts("roi", width, width)
        self.cache = make_store(folder, self.images + val, REGIONS, width, val)
        self.networks = ("squeezenet1_1",) if tiny else NETWORKS
        self.few = few = 8 if tiny else 4096
        pictures = {count: same_picture(folder / f"{count} pictures", count, side=433) for count in (few, 4 * few)}
        self.manifests = {count: load_manifest(manifest) for count, manifest in pictures.items()}

    def say(self, what: str, value: float | list[float], **more: object) -> None:
        """Print a figure as soon as it is known."""
        values = value if isinstance(value, list) else [value]
        rounded = [float(f"{one:.4g}") for one in values]
        click.echo(json.dumps({"what": what, "value": rounded if isinstance(value, list) else rounded[0], **more}))

    def pixels(self, encoder: Any, count: int) -> Tensor:
        """Return a picture as often as that, as an encoder reads it."""
        return torch.stack([encoder.decode(self.manifests[self.few].images / "0.jpg")[0]] * count)

    def step(self, name: str, device: torch.device, *settings: str, reference: bool = False) -> Step:
        """Return a training's step on this store's features; those of a whole image where a recipe wants them."""
        kind = "grid" if name in ("mlp", "setdiv-small") else "roi"
        facts = (FeatureFacts(kind, self.facts.channels, self.facts.global_channels),)
        chosen = [f"{key}={value}" for key, value in self.chosen.items()]
        if reference:  # the published codes launch operation by operation
            chosen.append("runtime.capture=off")
        return Step(load_recipe(name, [*chosen, *settings]), facts, WORD_IDS, device, reference)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference over the largest value."""
    ours, theirs = ours.detach().cpu().double(), theirs.detach().double()
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def two_steps(s: Session, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the losses of two steps without dropout in float32, and the gradients of the first."""
    take = s.step(name, device, "runtime.precision=float32")
    for module in take.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    torch.manual_seed(1)
    channels = s.facts.channels or 0
    batch = roi_batch(32, 32 if name == "mlp" else 160, REGIONS, channels)
    if "global" in take.model.image_fields:
        batch = replace(batch, images=replace(batch.images, global_=torch.randn(32, channels).half()))
    batch = on_device(batch, device)
    gradients: list[Tensor] = []
    take.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(nn.utils.parameters_to_vector(p.grad for p in learning(take)).cpu())
    )
    with deterministic(device):
        losses = torch.stack([take(batch)() for _ in range(2)])
    return losses, gradients[0]


def learning(take: Step) -> list[Any]:
    """Return the weights that have a gradient."""
    return [p for p in (*take.model.parameters(), *take.losses.parameters()) if p.grad is not None]


def right(s: Session) -> None:
    """Compare features and steps with the CPU's; RuntimeError where they are other numbers."""
    wrong = []

    def check(what: str, found: list[float], bounds: list[float]) -> None:
        s.say(f"{what} from the CPU's", found, aim=bounds)
        if not all(one <= bound for one, bound in zip(found, bounds, strict=True)):
            wrong.append(what)

    with float32_as("float32"):
        for name in s.networks:
            ours, theirs = (load_visual(EncoderSpec(name, "random:0"), str(one)) for one in (s.device, CPU))
            pixels = s.pixels(theirs, 2)
            found = difference(ours.features(pixels)[0], theirs.features(pixels)[0])
            # bfloat16; float32, whose features of a random ResNet-152 are 1e-3 from those of float64 on either device
            check(f"features of {name}", [found], [0.1 if "vit" in name else 3e-3])
        for name in ("mlp", SETDIV) if s.tiny else STEPS:
            both = zip(*(two_steps(s, name, one) for one in (s.device, CPU)), strict=True)
            check(f"losses and gradients of {name}", [difference(*one) for one in both], [1e-3, 3e-3])
    if wrong:
        raise RuntimeError(f"too far from the CPU's: {', '.join(wrong)}")


def extraction(s: Session) -> None:
    """Compare extraction with its network on pictures that lie on the device; its start is told apart by two sizes."""
    for name in s.networks:
        spec, size = EncoderSpec(name, "random:0"), 4 if s.tiny else 128
        encoder = load_visual(spec, str(s.device))
        pixels = s.pixels(encoder, size)
        there = pixels.to(s.device)
        with torch.inference_mode():
            jobs = {"bare": partial(encoder.features, there), "with copies": partial(encoder.encode, pixels)}
            bare, copies = (size / seconds for seconds in medians(jobs, s.steps, s.device).values())
        s.say(f"images/s of {name}, bare and with copies to the host", [bare, copies])
        options = Options(spec, None, batch_size=size, device=str(s.device))
        took = {}
        for count, manifest in s.manifests.items():
            store = s.folder / f"{name.replace(':', '-')}-{count}.zarr"
            took[count] = extract(manifest, str(store), options).sets[0].seconds
            shutil.rmtree(store)
        (few, short), (many, long) = took.items()
        rate = (many - few) / (long - short)
        s.say(
            f"extraction of {name} over its bare network, and its start in seconds",
            [rate / bare, short - few / rate],
            aim=0.9,
            in_all=round(many / long / bare, 2),
        )


def steps(s: Session) -> None:
    """Time steps, loading included, and what the device has to do in them."""
    for name, (before, aim) in list(STEPS.items())[:: 6 if s.tiny else 1]:
        take = s.step(name, s.device)
        data = take.recipe.data
        batches = cache_batches(s.cache, take, take.recipe, str(s.device), "memory" if s.tiny else "device")
        with deterministic(s.device):
            s.step_ms[name] = 1e3 * median(pace(take, batches, s.steps, s.device) for _ in range(4))
            activity = ProfilerActivity.CPU if s.device.type == "cpu" else ProfilerActivity.CUDA
            with profile(activities=[activity]) as seen:
                for batch in itertools.islice(batches, s.steps):
                    take(batch)
        times = [(one.self_device_time_total, one.count) for one in seen.key_averages() if one.self_device_time_total]
        busy = sum(of for of, _ in times) / 1e3 / s.steps
        more = {"kernels": round(sum(count for _, count in times) / s.steps), "device_ms": round(busy, 2)}
        s.say(f"ms a step of {name}, {data.batch_size} {data.unit}s", s.step_ms[name], h100=before, aim=aim, **more)


def pace(take: Step, batches: Iterator[Batch], steps: int, device: torch.device) -> float:
    """Return the seconds of a step among others, loading included; a loss is read when the next step is on its way."""

    def run() -> None:
        waiting = take(next(batches))
        for batch in itertools.islice(batches, steps - 1):
            read, waiting = waiting, take(batch)
            read()
        waiting()

    return seconds_of(run, device) / steps


def published(s: Session) -> None:
    """Compare whole steps with those of the published form."""
    images, captions = (16, 40) if s.tiny else (200, 1000)
    batch = on_device(roi_batch(images, captions, REGIONS, s.facts.channels or 0), s.device)
    for name, before in {SETDIV: 73.5 / 55.1, MAXMATCH: 71.9 / 65.7}.items():
        jobs = {form: partial(s.step(name, s.device, reference=form == "theirs"), batch) for form in ("ours", "theirs")}
        with deterministic(s.device):
            ours, theirs = medians(jobs, s.steps, s.device).values()
        s.say(f"{name}: its published form over it", theirs / ours, aim=1.5, h100=round(before, 2))


def whole(s: Session) -> None:
    """Train a few epochs, and say what 80 of Flickr30K would take."""
    settings = s.chosen | {"schedule.epochs": 3}
    run = s.folder / "whole"
    began = time.perf_counter()
    xret.train(s.cache.url, recipe=SETDIV, out=run, settings=settings, device=str(s.device))
    took = time.perf_counter() - began
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    a_step = s.step_ms.get(SETDIV, 1e3 * lines[-1]["seconds"] / lines[0]["step"]) / 1e3
    around = max(0.0, median(line["seconds"] for line in lines[1:]) - lines[0]["step"] * a_step)
    epoch = F30K_IMAGES / 200 * a_step + around
    s.say("seconds of an epoch but its steps, and before the first epoch", [around, took - 3 * lines[-1]["seconds"]])
    s.say(f"minutes of 80 epochs of {SETDIV}", 80 * epoch / 60, aim=6, h100=10.7)


def sharing(s: Session) -> None:
    """Train four heads side by side, and one alone; their processes' start does not count."""

    def epoch(count: int) -> float:
        out, how = s.folder / f"side{count}", {"seeds": count, "jobs": count, "split": "val", "device": str(s.device)}
        settings = s.chosen | {"schedule.epochs": 3 if s.tiny else 40}
        xret.ablate(s.cache.url, out=out, recipe="mlp", vary={"optimizer.lr": ["0.001"]}, settings=settings, **how)
        lines = [json.loads(line) for file in out.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
        return median(line["seconds"] for line in lines if line["epoch"] > 1)

    side = 1 if s.tiny else 4  # processes: their start would be most of it
    s.say(f"an epoch of mlp, {side} side by side, over one alone", epoch(side) / epoch(1), aim=1.5)


PARTS = {one.__name__: one for one in (right, steps, published, extraction, whole, sharing)}


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), default=tuple(PARTS))
@small(device="cpu", tiny=True)
def main(parts: tuple[str, ...], device: str = "cuda", tiny: bool = False) -> None:
    """Measure a GPU."""
    target, shared = device_of(device), Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 16e9
    failed = []
    with tempfile.TemporaryDirectory(dir=shared if roomy else None) as folder:
        session = Session(target, tiny, Path(folder))
        for part in parts:
            began = time.perf_counter()
            try:
                PARTS[part](session)
            except Exception as error:
                failed.append(part)
                click.echo(f"{part}: {error}\n{traceback.format_exc(limit=-3)}", err=True)
                if part == "right":  # wrong numbers need no times
                    break
            session.say(f"seconds of the part {part}", time.perf_counter() - began)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
