"""The page of `xret serve` in headless Chromium: with mouse, keyboard and a dropped file, at two widths."""

import io
import json
import re
from urllib.parse import urlsplit

import pytest
from oriented import exif
from PIL import Image
from small_server import COLOURS, FakeRetriever, Running, picture_bytes

from xret.heads.modules.similarity import SmoothChamfer
from xret.heads.retrieval.serving import site

WIDTHS = {"phone": (390, 844), "desktop": (1280, 860)}

pytestmark = pytest.mark.browser


@pytest.fixture
def open_page(chromium, started):
    """Return a function that opens the page; no page may say or miss anything, or ask anybody else."""
    contexts, wrong = [], []

    def open_it(width="desktop", path="", **options):
        size = WIDTHS[width]
        contexts.append(chromium.new_context(viewport={"width": size[0], "height": size[1]}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: "status of 4" in message.text or wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: foreign(request.url, started) and wrong.append(request.url))
        page.goto(started.url + path)
        until(page, "document.getElementById('about').textContent")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert wrong == []


def until(page, condition):
    """Wait for JavaScript to be true; the page's policy forbids Playwright's own way, which compiles it in the page."""
    for _ in range(500):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(condition)


def foreign(url, server):
    return not url.startswith((server.url, f"blob:{server.url}"))


def shown(page):
    """Return the descriptions of the pictures that were found, all of which are really there."""
    page.wait_for_selector("#results .picture img")
    until(page, "[...document.querySelectorAll('#results img')].every((image) => image.complete && image.naturalWidth)")
    return page.eval_on_selector_all("#results .picture img", "images => images.map((image) => image.alt)")


def status(page):
    return page.inner_text("#status")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sentence_finds_pictures(open_page, width):
    page = open_page(width)
    page.fill("#q", "a gold thing")
    page.click("button[type=submit]")
    assert shown(page)[:2] == ["all gold", "all grey"]
    assert re.fullmatch(r"8 pictures, best first, in \d+ milliseconds?", status(page))
    assert page.inner_text("#meaning") == f"A score is {SmoothChamfer.score}; larger is closer."
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width][0]
    lefts = page.eval_on_selector_all("#results li", "all => all.map((one) => one.getBoundingClientRect().left)")
    assert len(set(lefts)) == (2 if width == "phone" else 6)
    small = page.eval_on_selector_all(
        "button:not([hidden]), select, .file label, .choice",
        "all => all.map((one) => one.getBoundingClientRect()).filter((box) => box.height && box.height < 24)",
    )
    assert small == []  # nothing is too small for a thumb


def test_words_that_the_run_does_not_know_are_told(open_page):
    page = open_page()
    page.fill("#q", "a gold zeppelin")
    page.keyboard.press("Enter")
    assert shown(page)[0] == "all gold"
    assert status(page).endswith(". The run does not know “zeppelin”; it looked for the other words")


@pytest.mark.parametrize("width", WIDTHS)
def test_each_slot_is_shown_on_request(open_page, width):
    page = open_page(width)
    page.fill("#q", "green")
    page.keyboard.press("Enter")
    shown(page)
    assert page.locator(".slot").count() == 0
    page.check("#elements")
    page.wait_for_selector(".slot")
    assert page.inner_text("#slot-count") == "3"
    firsts = page.eval_on_selector_all(".slot", "slots => slots.map((slot) => slot.querySelector('img').alt)")
    assert firsts == ["all green", "all blue", "all orange"]
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width][0]
    page.uncheck("#elements")
    until(page, "document.getElementById('slots').hidden")


def test_gaussians_show_how_uncertain_they_are(chromium, tmp_path):
    it = Running(FakeRetriever(tmp_path, kind="gaussian"))
    page = chromium.new_page()
    page.goto(f"{it.url}?q=red")
    shown(page)
    assert page.inner_text("#results .line >> nth=0").split() == ["1", "1.000", "·", "uncertainty", "0.25"]
    assert status(page).endswith("the uncertainty of the query is -4.00")
    assert page.inner_text("#meaning").endswith(
        "Uncertainty is the log-determinant of a covariance; larger is less certain."
    )
    assert page.is_hidden("#elements-choice")
    page.close()
    it.end()


def test_a_chosen_picture_finds_captions(open_page):
    page = open_page()
    page.fill("#q", "something else")
    page.set_input_files("#file", {"name": "mine.png", "mimeType": "image/png", "buffer": picture_bytes("teal")})
    page.wait_for_selector("ol.captions")
    texts = page.eval_on_selector_all("#results .text", "all => all.map((one) => one.textContent)")
    assert texts[:2] == ["all teal", "nothing but teal <b>& more</b>"]  # text, never markup
    assert page.inner_text("#asked") == "Captions for mine.png"
    assert page.evaluate("document.getElementById('sent').naturalWidth") == 64
    assert page.input_value("#q") == ""
    assert status(page).startswith("12 captions")
    page.set_input_files("#file", {"name": "n.png", "mimeType": "image/png", "buffer": b"no picture"})
    until(page, "document.getElementById('status').classList.contains('wrong')")
    assert "no JPEG, PNG, WEBP, GIF or BMP file" in status(page)
    assert page.is_hidden("#answer")  # it was another question's


@pytest.mark.parametrize("upright", [True, False])
def test_a_picture_that_is_sent_is_shown_as_the_encoder_saw_it(chromium, tmp_path, upright):
    retriever = FakeRetriever(tmp_path)
    retriever.gallery.upright = upright
    it = Running(retriever)
    page = chromium.new_page()
    page.goto(it.url)
    until(page, "document.getElementById('about').textContent")
    halves, file = Image.new("RGB", (64, 48), "red"), io.BytesIO()  # blue on the right; below, once it is turned
    halves.paste("blue", (32, 0, 64, 48))
    halves.save(file, "JPEG", exif=exif(6))
    sent = file.getvalue()
    page.set_input_files("#file", {"name": "mine.jpg", "mimeType": "image/jpeg", "buffer": sent})
    page.wait_for_selector("ol.captions")
    until(page, "document.getElementById('sent').naturalWidth")
    drawn = Image.open(io.BytesIO(page.locator("#sent").screenshot())).convert("RGB")
    above, below = (drawn.getpixel((drawn.width * 3 // 8, drawn.height * part // 8)) for part in (3, 5))
    assert above[0] > 200 > 100 > above[2]  # red
    assert (below[2] > 200) == upright
    page.close()
    it.end()


def test_a_dropped_picture_finds_captions(open_page):
    page = open_page()
    drag = """(bytes) => {
        const carried = new DataTransfer();
        carried.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
        const drag = (type) => document.body.dispatchEvent(
            new DragEvent(type, { dataTransfer: carried, bubbles: true, cancelable: true }));
        drag("dragenter");
        const asked = !document.getElementById("drop").hidden;
        drag("dragover");
        drag("drop");
        return asked && document.getElementById("drop").hidden;
    }"""
    assert page.evaluate(drag, list(picture_bytes("purple")))
    page.wait_for_selector("ol.captions")
    assert page.inner_text("#results .text >> nth=0") == "all purple"
    assert page.inner_text("#asked") == "Captions for dropped.png"


def test_a_picture_too_large_is_not_sent(open_page, started, monkeypatch):
    monkeypatch.setattr(site, "UPLOAD_BYTES", 1 << 20)
    page = open_page()
    started.retriever.asked.clear()
    page.set_input_files("#file", {"name": "big.png", "mimeType": "image/png", "buffer": bytes((1 << 20) + 1)})
    assert status(page) == "big.png has more than 1 MiB; choose a smaller picture."
    assert started.retriever.asked == []


def test_the_keyboard_alone_is_enough(open_page):
    page = open_page()
    focused = "document.activeElement.id || document.activeElement.className || document.activeElement.textContent"
    assert page.evaluate(focused) == "q"  # where one begins
    page.keyboard.type("red")
    page.keyboard.press("Enter")
    shown(page)
    assert page.evaluate(focused) == "q"  # the results are announced, the focus stays
    order = []
    for _ in range(5):
        page.keyboard.press("Tab")
        order.append(page.evaluate(focused))
        outline = "getComputedStyle(document.activeElement.matches('.unseen') ? document.activeElement"
        outline += ".nextElementSibling : document.activeElement).outlineStyle"
        assert page.evaluate(outline) != "none", order
    assert order == ["Search", "file", "elements", "k", "picture"]
    page.keyboard.press("Enter")
    assert page.evaluate("document.getElementById('large').open")
    assert page.inner_text("#large-title") == "Number 1: red.png"
    page.keyboard.press("Escape")
    assert page.evaluate("!document.getElementById('large').open")
    assert page.evaluate(focused) == "picture"  # back to where one was


def test_a_screen_reader_is_told_everything(open_page):
    page = open_page()
    page.fill("#q", "red")
    page.keyboard.press("Enter")
    shown(page)
    assert page.get_by_role("searchbox", name="Describe the picture you are looking for").count() == 1
    assert page.get_by_label("Choose a picture").count() == 1
    assert page.get_by_role("checkbox", name="What did each slot look for?").count() == 1
    assert page.get_by_role("combobox", name="Results").count() == 1
    assert page.get_by_role("region", name="“red”").get_by_role("listitem").count() == len(COLOURS)
    assert page.get_by_role("button", name="all red").count() == 1
    assert page.get_by_role("status").inner_text() == status(page)
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("img:visible:not([alt])").count() == 0


def luminance(colour):
    values = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_light_and_dark(open_page, scheme):
    page = open_page(color_scheme=scheme)
    page.fill("#q", "red")
    page.keyboard.press("Enter")
    shown(page)
    pairs = page.evaluate("""() => {
        const found = {};
        for (const element of document.querySelectorAll("body *")) {
            const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
            if (!own || !element.getClientRects().length) continue;
            const clear = (one) => getComputedStyle(one).backgroundColor === "rgba(0, 0, 0, 0)";
            let behind = element;
            while (behind && clear(behind)) behind = behind.parentElement;
            const pair = [getComputedStyle(element).color, getComputedStyle(behind || document.body).backgroundColor];
            found[JSON.stringify(pair)] = element.id || element.className || element.tagName;
        }
        return found;
    }""")
    assert len(pairs) >= 3
    for pair, where in pairs.items():
        light, dark = sorted((luminance(colour) for colour in json.loads(pair)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, where  # WCAG 2.2, 1.4.3
    paper = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (paper > 0.5) == (scheme == "light")


def test_an_address_is_a_search_and_back_goes_back(open_page):
    page = open_page(path="?q=orange&k=24")
    assert shown(page)[0] == "all orange"
    assert page.input_value("#k") == "24"
    page.fill("#q", "grey & more")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('asked').textContent.includes('grey')")
    assert urlsplit(page.url).query == "q=grey+%26+more&k=24"
    page.go_back()
    until(page, "document.getElementById('asked').textContent.includes('orange')")
    assert page.input_value("#q") == "orange"


def test_examples_are_searches(open_page):
    page = open_page()
    page.click("#examples button >> nth=1")
    assert shown(page)[0] == page.input_value("#q")
    assert page.is_hidden("#examples")
