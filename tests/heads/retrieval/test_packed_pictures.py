"""Pictures in tars and Parquet are searched with, served, shown in a report, and read by a backbone that is tuned."""

import html
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from packed_data import PackedData
from PIL import Image
from small_runs import make_run, make_store

from xret.heads.report import write_report
from xret.heads.retrieval.retriever import Retriever
from xret.heads.training.finetuning.finetuning import finetune
from xret.pipeline.errors import CacheError, ManifestError


@pytest.fixture(scope="module", params=["tars", "parquet", "saved"])
def made(request, tmp_path_factory):
    """Return a data set and a run on its store."""
    data = PackedData(tmp_path_factory.mktemp(request.param) / "data")
    store = make_store(getattr(data, f"as_{request.param}")(), data.folder.parent / "s.zarr")
    return data, make_run(store, data.folder.parent / "run")


def test_a_gallery_opens_each_picture_from_any_thread_and_each_is_a_query(made):
    data, run = made
    retriever = Retriever(run, device="cpu", data_root=data.folder)
    gallery = retriever.gallery
    contents = {name: content for name, content, *_ in data.rows}
    rows = [7 * row % len(gallery.image_ids) for row in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: gallery.picture(row).getvalue(), rows))
    assert found == [contents[gallery.file_names[row]] for row in rows]
    picture = gallery.picture(2)
    assert retriever.search(picture, 3) == retriever.search(Image.open(picture).convert("RGB"), 3)


def test_a_backbone_is_tuned_on_them(made, tmp_path):
    data, run = made
    settings = ["schedule.epochs=2", "finetune.image_lr=0.01", "data.batch_size=5"]
    how = {"reattach": ["image"], "settings": settings, "device": "cpu"}
    finetune(run, tmp_path / "tuned", data_root=data.folder, **how)
    assert (tmp_path / "tuned" / "image_backbone.safetensors").exists()
    with pytest.raises(CacheError, match="the images of 'packed' are missing"):
        finetune(run, tmp_path / "not", **how)


def test_a_report_shows_them_but_not_files_that_were_copied_without_their_times(made, tmp_path, caplog):
    data, run = made

    def page(**options):
        write_report([run], tmp_path / "page.html", device="cpu", **options)
        return html.unescape((tmp_path / "page.html").read_text())

    assert "data:image/jpeg" in page(data_root=data.folder)
    assert "data:image/jpeg" not in page()
    shutil.copytree(data.folder, tmp_path / "moved", copy_function=shutil.copyfile)
    with pytest.raises(ManifestError, match="it has changed since it was read"):
        Retriever(run, device="cpu", data_root=tmp_path / "moved").gallery.picture(0)
    text = page(data_root=tmp_path / "moved")
    assert "data:image/jpeg" not in text
    how = r"it has changed since it was read \(.*\); put the file back with its time \(cp -p"
    assert re.search(rf"could not be read are shown as id and caption: [^<]*{how}", text)
    assert re.search(rf"unread pictures: [0-9]+; the first: .*moved/.*: {how}", caplog.text)
