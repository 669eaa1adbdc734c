"""A data set without pictures, and its region features written in the formats of others."""

import base64
import json

import h5py
import numpy as np

CHANNELS = 16


class World:
    """A Karpathy data set of COCO's kind and the regions of its images.

    Args:
        folder: where manifest and sources are written.
        ragged: images have 1 to 5 regions, not 4 each.
        captions: of each image.
    """

    def __init__(self, folder, ragged=False, captions=2, train=20, val=6, test=6):
        self.folder, self.captions = folder, captions
        rng = np.random.default_rng(5)
        splits = rng.permutation(["train"] * train + ["val"] * val + ["test"] * test).tolist()
        self.images = []
        for imgid, split in enumerate(splits):
            cocoid = 1000 + 37 * imgid
            count = int(rng.integers(1, 6)) if ragged else 4
            corner = rng.random((count, 2)).astype(np.float32) * 100
            self.images.append(
                {
                    "imgid": imgid,
                    "cocoid": cocoid,
                    "filepath": "val2014",
                    "filename": f"COCO_val2014_{cocoid:012d}.jpg",
                    "split": split,
                    "sentences": [
                        {"raw": f"thing {imgid} in scene {k}", "sentid": 10 * imgid + k} for k in range(captions)
                    ],
                    "regions_of_test": {
                        "local": rng.standard_normal((count, CHANNELS)).astype(np.float32),
                        "boxes": np.concatenate([corner, corner + 7], axis=1),
                        "classes": rng.integers(0, 1600, count),
                        "scores": rng.random(count).astype(np.float32),
                        "size": (640 + imgid, 480),
                    },
                }
            )
        (folder / "images").mkdir(parents=True)
        rows = [{key: value for key, value in image.items() if key != "regions_of_test"} for image in self.images]
        (folder / "captions.json").write_text(json.dumps({"dataset": "coco", "images": rows}))
        self.manifest = folder / "world.yaml"
        self.manifest.write_text("name: world\nimages: images\ncaptions: captions.json\n")

    def of(self, split):
        """Return the images of a split, in the file's order, which is the store's."""
        return [image for image in self.images if image["split"] == split]

    @property
    def stored(self):
        """Return the regions of all images in the order of the store."""
        return [image["regions_of_test"] for split in ("train", "val", "test") for image in self.of(split)]

    def scan(self, name="precomp", rows="image", ids="image", key="imgid", splits=("train", "dev", "testall", "test")):
        """Write SCAN's folder; `rows` and `ids` come one an ``image`` or one a ``caption``."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        for split in splits:
            images = self.of({"dev": "val", "testall": "test"}.get(split, split))
            images = images[:3] if split == "test" else images  # of COCO only a part
            repeat = {"image": 1, "caption": self.captions}
            local = np.stack([image["regions_of_test"]["local"] for image in images])
            np.save(folder / f"{split}_ims.npy", np.repeat(local, repeat[rows], axis=0))
            lines = [str(image[key]) for image in images for _ in range(repeat[ids])]
            (folder / f"{split}_ids.txt").write_text("\n".join(lines) + "\n")
            texts = [sentence["raw"] for image in images for sentence in image["sentences"]]
            texts[0] += " \x1c ."  # a separator that ends no line
            (folder / f"{split}_caps.txt").write_text("\n".join(texts) + "\n")
        return folder

    def tsv(self, name="butd.tsv", lxmert=False, images=None, key="cocoid", **types):
        """Write a TSV; bottom-up attention's, or LXMERT's; `types` of ``features`` and ``boxes``."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            for image in self.images if images is None else images:
                file.write(self.line(image, lxmert, key, **types))
        return path

    def line(self, image, lxmert=False, key="cocoid", features="<f4", boxes="<f4"):
        """Return one line of a TSV."""
        regions = image["regions_of_test"]
        (width, height), count = regions["size"], len(regions["local"])
        end = [str(count).encode(), _b64(regions["boxes"], boxes), _b64(regions["local"], features)]
        name = str(image[key]).encode()
        if not lxmert:
            return b"\t".join([name, b"%d" % width, b"%d" % height, *end]) + b"\n"
        objects = [_b64(regions["classes"], "<i8"), _b64(regions["scores"], "<f4")]
        attributes = [_b64(regions["classes"] + 1, "<i8"), _b64(regions["scores"] / 2, "<f4")]
        return b"\t".join([name, b"%d" % height, b"%d" % width, *objects, *attributes, *end]) + b"\n"

    def hdf5(self, ids="filename"):
        """Write an HDF5 file whose padding is NaN; `ids` are of that key."""
        path = self.folder / "features.h5"
        images = self.images[::-1]
        longest = max(len(image["regions_of_test"]["local"]) for image in images)
        with h5py.File(path, "w") as file:
            group = file.create_group("regions")
            for name in ("local", "boxes", "classes", "scores"):
                parts = [image["regions_of_test"][name] for image in images]
                whole = np.full((len(images), longest, *parts[0].shape[1:]), -7 if name == "classes" else np.nan)
                for row, part in enumerate(parts):
                    whole[row, : len(part)] = part
                dtype = "i4" if name == "classes" else "f4"
                group.create_dataset(name, data=whole.astype(dtype), chunks=(4, *whole.shape[1:]), compression="gzip")
            file["count"] = [len(image["regions_of_test"]["local"]) for image in images]
            file["size"] = [image["regions_of_test"]["size"] for image in images]
            file["name"] = [image[ids] for image in images]
        return path


# The formats of regions that the parametrised tests write.
WRITERS = {"butd-tsv": World.tsv, "scan": World.scan, "hdf5": World.hdf5}
ARRAYS = {
    "local": "regions/local", "boxes": "regions/boxes", "classes": "regions/classes", "scores": "regions/scores",
    "id": "name", "length": "count", "size": "size",
}  # fmt: skip


def _b64(values, dtype):
    return base64.b64encode(values.astype(dtype).tobytes())
