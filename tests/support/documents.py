"""The documents of the repository, and the blocks in them that tests run."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def text_of(document):
    """Return a document, with the files in it that the site puts there."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.sub(r'^--8<-- "(.*)"$', lambda found: text_of(found[1]), text, flags=re.MULTILINE)


def blocks(document, language=r"\w*"):
    """Return the fenced blocks of a document."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(document), re.DOTALL | re.MULTILINE)


def block(document, having=""):
    """Return the first Python block of a document that has a text."""
    return next(one for one in blocks(document, "python") if having in one)
