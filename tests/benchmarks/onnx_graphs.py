"""What graphs of ONNX cost, and how near they are to the run: the test split's pictures and all of their captions.

    OMP_NUM_THREADS=1 python tests/benchmarks/onnx_graphs.py run --data-root PICTURES

Exports the run twice, in float32 and in bytes. `cosine` is the least of a picture's or caption's with the run's own;
`same ten` counts captions whose first ten pictures are the run's, in any order; times are of one thread, a caption by
itself (median) and pictures in batches of 25 with decoding (mean).
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch
from sizes import small
from torch import Tensor

COLUMNS = "weights,MB image,MB text,cosine image,cosine text,same ten,mR,ms a caption,ms a picture"


@click.command()
@click.argument("run")
@click.option("--data-root", help="Finds the pictures.")
@click.option("--captions", default=5000, help="At most so many.")
@small(captions=6)
def main(run: str, data_root: str | None = None, captions: int = 5000) -> None:
    """Compare graphs of RUN, whose vectors are compared by cosine, with the run."""
    import onnxruntime

    import xret
    from xret.heads.retrieval.onnx import export_onnx
    from xret.heads.retrieval.onnx_search import Model

    retriever = xret.load(run, split="test", device="cpu", data_root=data_root)
    gallery = retriever.gallery
    files = [gallery.picture(row) for row in range(len(gallery.file_names))]
    texts, owner = gallery.texts[:captions], torch.from_numpy(gallery.caption_image[:captions])
    ours = retriever.encode_images(files), retriever.encode_text(texts, warn=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1

    def row(name: str, images: Tensor, captions: Tensor, *more: str) -> None:
        cells = [f"{float((a * b).sum(1).min()):.7f}" for a, b in zip((images, captions), ours, strict=True)]
        mine, theirs = (
            (b @ a.T).topk(min(10, len(files))).indices.sort(1).values for a, b in ((images, captions), ours)
        )
        same = f"{int((mine == theirs).all(1).sum())} of {len(texts)}"
        scores = captions @ images.T
        rank = (scores > scores.gather(1, owner[:, None])).sum(1)
        own = scores.masked_fill(torch.arange(len(files)) != owner[:, None], -2).amax(0)
        ranks = (rank, (scores > own).sum(0))
        recall = sum(float((some < k).double().mean()) for some in ranks for k in (1, 5, 10)) / 0.06
        click.echo(f"| {' | '.join([name, *more[:2], *cells, same, f'{recall:.2f}', *more[2:]])} |")

    click.echo(f"| {COLUMNS.replace(',', ' | ')} |\n|{'---|' * len(COLUMNS.split(','))}")
    row("the run's own", *ours, *"----")
    with TemporaryDirectory() as folder:
        for dtype in ("float32", "int8"):
            out = Path(folder) / dtype
            export_onnx(retriever, out, dtype=dtype)
            model, times, images = Model(out), [], []
            paths = {side: str(out / f"{side}.onnx") for side in ("image", "text")}
            model.graphs |= {side: onnxruntime.InferenceSession(path, options) for side, path in paths.items()}
            began = time.perf_counter()
            for first in range(0, len(files), 25):
                images.append(torch.from_numpy(model.embed_images(files[first : first + 25])["image_embedding"]))
            picture = (time.perf_counter() - began) / len(files)
            for text in texts:
                began = time.perf_counter()
                times.append((model.embed_texts([text])["text_embedding"], time.perf_counter() - began))
            embedded = torch.cat([torch.from_numpy(one) for one, _ in times])
            caption = torch.tensor([taken for _, taken in times]).median().item()
            sizes = [f"{Path(path).stat().st_size / 1e6:.1f}" for path in paths.values()]
            row(dtype, torch.cat(images), embedded, *sizes, f"{1000 * caption:.1f}", f"{1000 * picture:.1f}")


if __name__ == "__main__":
    main()
