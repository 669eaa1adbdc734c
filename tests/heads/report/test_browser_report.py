"""The report in a browser: on a phone and on a screen, light and dark, by keyboard, without a network."""

import contextlib

import pytest

from xret.heads.report import write_report

pytestmark = pytest.mark.browser

CONTRAST = """() => {
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const behind = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      let [r, g, b, a = 1] = channels(colour);
      if (colour.startsWith('color(srgb')) [r, g, b] = [r * 255, g * 255, b * 255];
      if (a > 0) layers.push([r, g, b, a]);
      if (a === 1) break;
    }
    return layers.reverse().reduce((under, [r, g, b, a]) =>
      [r, g, b].map((v, k) => v * a + under[k] * (1 - a)), [255, 255, 255]);
  };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest('.skip')) continue;
    const style = getComputedStyle(element);
    const ink = light(channels(element.closest('svg') ? style.fill : style.color));
    const paper = light(behind(element));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) low.push(`${element.tagName} '${element.textContent.trim().slice(0, 30)}' ${ratio.toFixed(2)}`);
  }
  return low;
}"""

CUT_OFF = """() => {
  const cut = [];
  for (const drawing of document.querySelectorAll('figure svg')) {
    const frame = drawing.getBoundingClientRect();
    for (const text of drawing.querySelectorAll('text')) {
      const box = text.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 ||
          box.bottom > frame.bottom + 1) cut.push(text.textContent);
    }
  }
  for (const element of document.querySelectorAll('caption, figcaption, p, h1, h2, h3, .picture')) {
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > innerWidth + 1 || box.left < -1) && !element.closest('.skip'))
      cut.push(`${element.tagName} ${(element.textContent || element.getAttribute('aria-label')).slice(0, 40)}`);
  }
  return cut;
}"""


@pytest.fixture(scope="module")
def report(folder, run):
    runs = [run(name) for name in ("setdiv", "gaussian-vsepp", "scan")]
    write_report(runs, folder / "browser.html", data_root=folder, device="cpu")
    return folder / "browser.html"


@pytest.fixture
def opened(chromium, report):
    with contextlib.ExitStack() as stack:

        def show(width=1280, scheme="light"):
            context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
            stack.callback(context.close)
            page = context.new_page()
            page.said = []
            page.on("console", lambda message: page.said.append(message.text))
            page.on("pageerror", lambda error: page.said.append(str(error)))
            page.on("request", lambda request: page.said.append(request.url))
            page.goto(report.as_uri())
            return page

        yield show


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_cut_off_and_everything_can_be_read(opened, report, width, scheme):
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 26)"}[scheme]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    boxes = page.evaluate("[...document.querySelectorAll('.picture use')].map(e => e.getBBox().width)")
    assert len(boxes) > 20
    assert min(boxes) > 0
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate(CONTRAST) == []
    widths = page.evaluate(
        "[...document.querySelectorAll('.looks .picture')].map(e => e.getBoundingClientRect().width)"
    )
    assert len(widths) > 20
    assert min(widths) >= 160
    page.evaluate("scrollTo(0, 3000)")
    assert page.get_by_role("navigation").bounding_box()["y"] == 0
    assert [said for said in page.said if not said.startswith("data:image/")] == [report.as_uri()]


def test_on_paper_nothing_is_wider_than_the_sheet(opened):
    page = opened(718)  # A4 between margins of 1 cm
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    assert page.evaluate(f"{wide}.map(e => e.getAttribute('aria-label') + e.scrollWidth)") == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.get_by_role("navigation").is_visible()


def test_by_keyboard(opened):
    page = opened()
    page.keyboard.press("Tab")
    focused = page.locator(":focus")
    assert focused.inner_text() == "Skip to the content"
    assert focused.bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")
    style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert style == "solid"


def test_a_screen_reader_finds_its_way(opened):
    page = opened()
    assert [page.get_by_role(role).count() for role in ("banner", "navigation", "main", "contentinfo")] == [1, 1, 1, 1]
    sections = page.get_by_role("main").get_by_role("region")
    titles = [link.inner_text() for link in page.get_by_role("navigation").get_by_role("link").all()]
    assert "Comparison" in titles
    assert sections.count() >= len(titles)
    for link in page.get_by_role("navigation").get_by_role("link").all():
        link.click()
        target = page.evaluate("document.getElementById(location.hash.slice(1)).getBoundingClientRect().top")
        assert -1 <= target < 800
    table = page.get_by_role("table", name="Protocol full").first
    assert table.get_by_role("rowheader").first.inner_text() == "setdiv"
    assert page.get_by_role("img", name="Image 6").count() > 0
