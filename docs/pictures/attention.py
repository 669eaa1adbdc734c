"""Makes `attention.png`, the picture of the README, from the page that `make demo` writes; needs Chromium.

python docs/pictures/attention.py xret-demo/report.html docs/pictures/attention.png
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

WIDTH, HEIGHT, IMAGES = 1100, 1400, 2
HIDDEN = "section:not([aria-labelledby=attention]), header, nav, footer, h1, h2, section > p"
HIDDEN += f", h3:nth-of-type(n+{IMAGES + 1}), ul:nth-of-type(n+{IMAGES + 1})"
ALONE = f"<style>{HIDDEN} {{ display: none !important }} body {{ color: #111; background: white }}</style>"

page, out = map(Path, sys.argv[1:])
browser = shutil.which("chromium") or shutil.which("google-chrome")
if browser is None:
    sys.exit("there is no chromium: install it, or open the page in a browser")
with tempfile.TemporaryDirectory() as folder:
    alone, shot = Path(folder, "page.html"), Path(folder, "page.png")
    alone.write_text(page.read_text().replace("</head>", f"{ALONE}</head>"))
    size = f"--window-size={WIDTH},{HEIGHT}"
    command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", size, f"--screenshot={shot}", alone.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    picture = Image.open(shot).convert("RGB")
white = Image.new("RGB", picture.size, picture.getpixel((0, 0)))
left, top, right, bottom = ImageChops.difference(picture, white).getbbox() or (0, 0, WIDTH, HEIGHT)
picture.crop((left - 8, top - 8, right + 8, bottom + 8)).quantize(kmeans=2).save(out, optimize=True)
