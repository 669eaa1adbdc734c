"""Makes `serve.png`, the first picture of the README, from what `make demo` writes; needs `xret[serve,test]`, Chromium.

python docs/pictures/serve.py xret-demo docs/pictures/serve.png
"""

import io
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

from PIL import Image
from playwright.sync_api import sync_playwright

import xret
from xret.demo.generate import SCENES
from xret.demo.pictures import random_scene

SIZE, SHAPE, ANSWERS = "big", "heart", 10
CLIP = {"x": 136, "y": 8, "width": 728, "height": 776}  # without the fold of help and options
QUERY = f"a {SIZE} {SHAPE}"

folder, out = map(Path, sys.argv[1:])
run = folder / "setdiv-k4"
for hit in xret.load(run).search(QUERY, k=ANSWERS):
    scene = random_scene(Random(f"scene {SCENES} 0 {int(Path(hit.file_name).stem[6:])}"))
    if not any((thing.size, thing.shape) == (SIZE, SHAPE) for thing in scene.things):
        sys.exit(f"{hit.file_name} does not show {QUERY}: ask for something else")
command = [sys.executable, "-m", "xret.cli", "serve", run, "--data-root", folder / "scenes"]
server = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
with sync_playwright() as play:
    address = server.stdout.readline().split()[-1]
    browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1000, "height": 800}, color_scheme="light")
    page.goto(address)
    page.locator("textarea").first.fill(QUERY)
    page.keyboard.press("Enter")
    page.locator(".thumbnail-lg img").nth(ANSWERS - 1).wait_for()
    page.wait_for_timeout(2000)  # for the pictures
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=CLIP)))
server.terminate()
shot.convert("RGB").quantize(kmeans=2).save(out, optimize=True)
