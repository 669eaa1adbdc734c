"""What every page of a report must be: sound HTML that needs nothing else."""

import re
from html.parser import HTMLParser


class Outline(HTMLParser):
    """Collects what a page is made of, and refuses tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.levels, self.unnamed, self.tables, self.text = [], [], [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in ("meta", "br", "link", "img", "input", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[key] for key in ("href", "xlink:href", "src") if key in attributes]
        self.levels += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        self.tables += [tag] if tag in ("table", "caption") else []
        if attributes.get("role") in ("img", "region") and not attributes.get("aria-label"):
            self.unnamed.append(tag)
        assert tag != "th" or attributes.get("scope") in ("row", "col")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text += data


def require_sound(text):
    """Return the outline of a page, having seen that it is sound and needs nothing else."""
    outline = Outline(text)
    assert len(set(outline.ids)) == len(outline.ids)
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)
    assert all(link.startswith(("#", "data:image/")) for link in outline.links)
    assert {url for url in re.findall(r"https?://[^\s\"'<]*", text) if "www.w3.org" not in url} == set()
    assert "url(http" not in text
    assert outline.levels[0] == 1
    assert outline.levels.count(1) == 1
    assert all(below <= above + 1 for above, below in zip(outline.levels, outline.levels[1:], strict=False))
    assert outline.unnamed == []
    assert outline.tables == ["table", "caption"] * (len(outline.tables) // 2)
    return outline
