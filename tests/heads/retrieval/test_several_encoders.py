"""Runs on several feature sets at work: queries go through every encoder and get the embeddings of what is cached."""

import pytest
import torch
from small_bert import save_bert
from small_runs import NETWORK, make_pictures, make_run, make_store
from torch.nn.functional import normalize
from torchvision.models import resnet18

from xret.heads.evaluation.scoring import Ranker, embed_split
from xret.heads.report import write_report
from xret.heads.report.attention import word_attention, words_of
from xret.heads.retrieval.export import export_embeddings
from xret.heads.retrieval.retriever import Retriever
from xret.heads.runs.run import Run
from xret.heads.training.finetuning.finetuning import finetune
from xret.pipeline.errors import EncoderError, RecipeError

OTHER = "resnet18"
BOTH = [f"data.image=[{NETWORK}, {OTHER}]", "data.text=[words, bert]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures, a store of two networks, words and a small BERT, and a run on all four."""
    folder = tmp_path_factory.mktemp("encoders")
    manifest = make_pictures(folder / "pictures")
    make_store(manifest, folder / "all.zarr")
    bert = str(save_bert(folder / "bert"))
    url = make_store(manifest, folder / "all.zarr", visual=OTHER, text="bert", text_weights=bert)
    make_run(url, folder / "run", "setdiv", *BOTH)
    return folder


def opened(folder, **options):
    return Retriever(folder / "run", device="cpu", **{"text_weights": str(folder / "bert"), **options})


def test_cached_captions_and_images_get_their_embeddings_again(folder, tmp_path, caplog):
    retriever = opened(folder, data_root=folder / "pictures")
    gallery = retriever.gallery
    files = [folder / "pictures/images" / name for name in gallery.file_names]
    for found, expected in (
        (retriever.encode_images(files), gallery.images),
        (retriever.encode_text(gallery.texts), gallery.captions),
    ):
        assert (normalize(found, dim=-1) * normalize(expected, dim=-1)).sum(-1).min() > 0.999
    assert retriever.search("zeppelin", 1)[0].file_name  # which BERT reads
    assert caplog.messages[-1] == "not in the vocabulary: zeppelin"
    assert export_embeddings(retriever, tmp_path / "out")["images"] == 22


def test_weights_are_named_for_each_set_that_needs_them(folder, tmp_path):
    file, manifest = tmp_path / "w.pth", folder / "pictures/pictures.yaml"
    with torch.random.fork_rng():
        torch.save(resnet18().state_dict(), file)
    url = make_store(manifest, tmp_path / "files.zarr")
    make_store(manifest, url, visual=OTHER, visual_weights=str(file))
    make_run(url, tmp_path / "run", "vsepp", BOTH[0])

    def encode(weights):
        pictures = [folder / "pictures/images/3.png"]
        return Retriever(tmp_path / "run", device="cpu", visual_weights=weights).encode_images(pictures)

    assert torch.equal(encode(f",{file}"), encode(f"random:0, {file}"))
    assert torch.equal(encode(None), encode(f",{file}"))  # it is where it was
    with pytest.raises(EncoderError, match=r"reads 2 feature sets .*names weights of 1; give one for each"):
        encode(str(file))
    with pytest.raises(EncoderError, match="is not what"):
        encode(f"random:1,{file}")


def test_the_report_leaves_places_out(folder, tmp_path):
    write_report([folder / "run"], tmp_path / "r.html", data_root=folder / "pictures", device="cpu")
    page = (tmp_path / "r.html").read_text()
    assert "its rows are those of several feature sets, which do not share one division of the picture." in page
    assert " + ".join(Run(folder / "run").info.names("image")) in page


def test_words_and_tokens_have_labels_in_the_order_of_their_rows(folder, tmp_path):
    settings = f"data.image={NETWORK}", BOTH[1], "adapter.words.ends=false"
    run = make_run(str(folder / "all.zarr"), tmp_path / "scan", "scan", *settings)
    view = embed_split(Ranker(run, device="cpu"), "test")
    labels, words = words_of(view, 1), view.texts[1].split()
    assert labels == words + [f"token {number + 1}" for number in range(len(labels) - len(words))]
    attention = word_attention(view, int(view.caption_image[1]), 1)
    assert len(labels) == attention.shape[1] == int(view.text.length[1])


def test_the_backbone_of_a_single_set_is_put_back_beside_several(folder, tmp_path):
    run = make_run(str(folder / "all.zarr"), tmp_path / "run", "vsepp", f"data.image={NETWORK}", BOTH[1])
    settings, root = ["schedule.epochs=2", "finetune.image_lr=0.01"], folder / "pictures"
    finetune(run, tmp_path / "tuned", reattach=["image"], data_root=root, settings=settings, device="cpu")
    assert len(Run(tmp_path / "tuned").metrics()) == 2
    with pytest.raises(RecipeError, match=r"reads several text feature sets \(words@\w+, bert@\w+\)"):
        finetune(run, tmp_path / "no", reattach=["text"], settings=settings, device="cpu")
