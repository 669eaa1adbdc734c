"""What `xret serve` answers is what its retriever finds."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_server import COLOURS, JPEG, FakeRetriever, Running, picture_bytes, refused

from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.retrieval.serving.service import FORMATS, KEPT, MOST_PIXELS, Service
from xret.pipeline.data.images import open_image
from xret.pipeline.errors import EncoderError, RunError, SampleError


def test_an_index_of_more_than_the_gallery_is_refused_before_the_first_query(tmp_path):
    retriever = FakeRetriever(tmp_path)
    retriever.searched = lambda answers: 99
    with pytest.raises(RunError, match=r"the index has 99 images, which are not the 8 of split test: .* alone"):
        Service(retriever)


def test_an_index_of_as_many_others_is_refused_too(tmp_path):
    retriever = FakeRetriever(tmp_path)
    retriever.searches_others = lambda answers: answers == "captions"
    with pytest.raises(
        RunError, match=r"the index has 16 captions, which are not the 16 of split test: .* of one store"
    ):
        Service(retriever)


def test_the_page_is_told_what_a_score_is(running):
    about = running.ask("/api/about")[2]
    assert about["score"] == SIMILARITIES["smooth-chamfer"].score
    assert b'id="meaning"' in running.ask("/")[2]
    assert b"`A score is ${scores}; larger is closer" in running.ask("/page.js")[2]


def test_a_text_finds_the_retrievers_images(running):
    status, headers, answer = running.ask("/api/search?q=a+blue+thing&k=3")
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert [hit["file_name"] for hit in answer["results"]] == ["blue.png", "orange.png", "purple.png"]
    assert answer["results"][0] == {
        "rank": 1,
        "id": "i2",
        "score": 1.0,
        "file_name": "blue.png",
        "row": 2,
        "captions": ["all blue", "nothing but blue <b>& more</b>"],
    }
    assert set(answer) == {"results", "seconds"}
    assert running.retriever.asked == ["a blue thing"]


@pytest.mark.parametrize(("form", "kind"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("GIF", "image/gif")])
def test_a_picture_finds_the_retrievers_captions(running, form, kind):
    body = picture_bytes("teal", form=form)
    status, _, answer = running.ask("/api/search?k=2", "POST", body, {"Content-Type": kind})
    assert status == 200
    assert [hit["caption"] for hit in answer["results"]] == ["all teal", "nothing but teal <b>& more</b>"]
    assert [hit["row"] for hit in answer["results"]] == [5, 5]


def test_elements_are_answered_one_by_one(running):
    answer = running.ask("/api/search?q=green&k=2&elements=1")[2]
    names = [[hit["file_name"] for hit in hits] for hits in answer["elements"]]
    assert names == [["green.png", "blue.png"], ["blue.png", "orange.png"], ["orange.png", "purple.png"]]
    picture = running.ask("/api/search?k=1&elements=1", "POST", picture_bytes("green"), JPEG)[2]
    assert [hits[0]["caption"] for hits in picture["elements"]] == ["all green", "all blue", "all orange"]


def test_words_that_the_run_does_not_know_are_told(running):
    assert running.ask("/api/search?q=a+gold+zeppelin")[2]["unknown"] == ["zeppelin"]
    assert "unknown" not in running.ask("/api/search?q=a+gold+thing")[2]
    assert "unknown" not in running.ask("/api/search", "POST", picture_bytes(), JPEG)[2]


def test_examples_have_only_words_that_the_run_knows(tmp_path):
    retriever = FakeRetriever(tmp_path)
    retriever.gallery.texts[:2] = ["a red zeppelin", " "]
    retriever.gallery.texts[4] = "blue " * 30
    assert Service(retriever).about.examples == [retriever.gallery.texts[row] for row in (2, 7, 11, 15)]


def test_a_run_without_sets_has_no_elements(tmp_path):
    it = Running(FakeRetriever(tmp_path, kind="vector"))
    assert it.ask("/api/about")[2]["elements"] == 0
    assert "not sets" in refused(it.ask("/api/search?q=red&elements=1"), 400)
    it.end()


def test_gaussians_say_how_uncertain_they_are(tmp_path):
    it = Running(FakeRetriever(tmp_path, kind="gaussian"))
    answer = it.ask("/api/search?q=red&k=2")[2]
    assert answer["uncertainty"] == pytest.approx(-4)
    assert [hit["uncertainty"] for hit in answer["results"]] == [0.25, 0.25]
    it.end()


def test_pictures_come_by_row_small_and_without_their_files_secrets(running, tmp_path):
    exif = Image.Exif()
    exif[0x010E] = "a secret"
    Image.new("RGB", (3000, 1500), "red").save(tmp_path / "images" / "red.png", exif=exif)
    for size, expected in (("small", (400, 200)), ("large", (1200, 600))):
        status, headers, content = running.ask(f"/api/images/0?size={size}")
        assert (status, headers["Content-Type"]) == (200, "image/jpeg")
        image = Image.open(io.BytesIO(content))
        assert (image.size, image.format) == (expected, "JPEG")
        assert b"secret" not in content
    assert running.ask("/api/images/0?size=large", headers={"If-None-Match": headers["ETag"]})[0] == 304
    (tmp_path / "images" / "green.png").unlink()
    refused(running.ask("/api/images/1"), 404)


def test_one_missing_encoder_leaves_the_other(tmp_path):
    retriever = FakeRetriever(tmp_path)
    encode = retriever.encode_query

    def only_text(query):
        if not isinstance(query, str):
            raise EncoderError("the weights are not named; give --visual-weights")
        return encode(query)

    retriever.encode_query = only_text
    it = Running(retriever)
    about = it.ask("/api/about")[2]
    assert (about["text"], about["image"]) == (True, False)
    assert it.ask("/api/search?q=red")[0] == 200
    assert "by image" in refused(it.ask("/api/search", "POST", picture_bytes(), JPEG), 422)
    it.end()


def test_a_picture_that_is_sent_is_read_as_the_cache_reads_files(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees
    (tmp_path / "turned.jpg").write_bytes(content := picture_bytes(size=(64, 48), form="JPEG", exif=exif))
    image = open_image(content, formats=FORMATS, most_pixels=MOST_PIXELS)
    assert (image.size, image.mode) == ((64, 48), "RGB")
    for upright in (True, False):  # the run's encoder opens what was sent once more
        sent = open_image(image, upright=upright)
        assert sent.tobytes() == open_image(tmp_path / "turned.jpg", upright=upright).tobytes()
    assert MOST_PIXELS < 2 * Image.MAX_IMAGE_PIXELS  # Pillow's own limit is the second line


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP"]), st.data())
def test_a_damaged_picture_is_a_picture_or_refused(form, data):
    content = bytearray(picture_bytes(size=(24, 16), form=form))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        cut = content[: data.draw(st.integers(len(content) // 2, len(content)))]
        image = open_image(cut, formats=FORMATS, most_pixels=MOST_PIXELS)
    except SampleError:
        return
    assert image.mode == "RGB"
    assert image.width * image.height <= MOST_PIXELS


def test_the_pictures_that_are_kept_are_bounded(tmp_path):
    service = Service(FakeRetriever(tmp_path))
    first = service.picture(0, "small")
    assert service.picture(0, "small") is first
    for size in range(2 * KEPT):
        service.picture.cache_clear() if size == 0 else None
        service.picture(size % len(COLOURS), "small")
    assert service.picture.cache_info().maxsize == KEPT
