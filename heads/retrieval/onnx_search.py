"""Search pictures with a text: ``python search.py "two dogs in the snow" PICTURE …``.

Needs numpy, onnxruntime, Pillow and tokenizers; the graphs and settings lie beside this file.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps
from tokenizers import Tokenizer


class Model:
    """The graphs and settings of a folder that ``xret export --to onnx`` wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.graphs = folder, dict[str, Any]()
        self.about, self.how = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in _SETTINGS)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def run(self, graph: str, **inputs: Any) -> dict[str, Any]:
        """Return the outputs of a graph by name."""
        if graph not in self.graphs:
            file = str(self.folder / f"{graph}.onnx")
            self.graphs[graph] = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        outputs = [output.name for output in self.graphs[graph].get_outputs()]
        return dict(zip(outputs, self.graphs[graph].run(outputs, inputs), strict=True))

    def embed_images(self, pictures: list[Any]) -> dict[str, Any]:
        """Embed pictures: files, or open ones of Pillow."""
        return self.run("image", pixel_values=np.stack([pixels(picture, self.how) for picture in pictures]))

    def embed_texts(self, texts: list[str]) -> dict[str, Any]:
        """Embed texts."""
        encoded = self.tokenizer.encode_batch([self.about["prompt"].replace("{}", text) for text in texts])
        if not all(any(one.attention_mask) for one in encoded):
            raise ValueError("a text has no words; describe in a few words what to look for")
        ids, mask = (np.array([getattr(one, name) for one in encoded]) for name in ("ids", "attention_mask"))
        return self.run("text", input_ids=ids.astype(np.int64), attention_mask=mask.astype(np.int64))

    def similarity(self, images: dict[str, Any], texts: dict[str, Any]) -> Any:
        """Compare I images with C texts, [I, C]; larger is closer."""
        if self.about["dot_product"]:
            return images["image_embedding"] @ texts["text_embedding"].T
        return self.run("similarity", **images, **texts)["scores"]


_SETTINGS = ("about", "preprocessor_config")


def pixels(picture: Any, how: dict[str, Any]) -> Any:
    """Return a picture as the network takes it, float32 [3,H,W], by the settings of a preprocessor_config.json."""
    image = picture if isinstance(picture, Image.Image) else Image.open(picture)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits, of which Pillow would keep the lower 8
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("RGB")
    size, (width, height) = how["size"], image.size
    if "shortest_edge" in size:
        scale, shorter = size["shortest_edge"], min(width, height)
        shape = int(scale * width / shorter), int(scale * height / shorter)
    else:
        shape = size["width"], size["height"]
    image = image.resize(shape, how["resample"])
    wide, high = how["crop_size"]["width"], how["crop_size"]["height"]
    whole = round if how["crop_offset"] == "round" else int  # libraries differ where an odd number of pixels goes
    left, top = whole((image.width - wide) / 2), whole((image.height - high) / 2)
    values = np.asarray(image.crop((left, top, left + wide, top + high)), np.float32) * how["rescale_factor"]
    return ((values - how["image_mean"]) / how["image_std"]).astype(np.float32).transpose(2, 0, 1)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    model, (text, *files) = Model(Path(__file__).parent), sys.argv[1:]
    try:
        scores = model.similarity(model.embed_images(files), model.embed_texts([text]))[:, 0]
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
    for row in np.argsort(-scores, kind="stable")[:10]:
        print(f"{scores[row]:.4f} {files[row]}")
