"""The documents hold: commands parse, links and paths resolve, examples run, and a README of one screen a topic."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from random import Random

import click
import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from documents import ROOT, block, blocks, text_of
from imported import Bomb, bring
from PIL import Image
from region_sources import World
from small_checkpoints import save_text_model
from small_runs import make_pictures, make_run
from small_runs import make_store as make_pictures_store
from small_store import make_store

from xret.cli import ANYWHERE, main
from xret.demo.generate import SCENES, generate_scenes
from xret.demo.pictures import random_scene
from xret.heads.model import FeatureFacts
from xret.heads.recipes.recipe import load_recipe
from xret.heads.recipes.settings import settings_of
from xret.heads.training.train import train
from xret.heads.tuning.space import make_space
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders.registry import load_visual
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import build_options
from xret.pipeline.store import FeatureCache

FIGURES = "tests/benchmarks/README.md"
MANIFEST, EXTRACTION = "docs/reference/manifest.md", "docs/reference/extraction.md"
IMPORT = "docs/how-to/import.md"
FOLDERS = ("docs", "heads", "pipeline", "skills", "tests")
FILES = [*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.md"))]
DOCUMENTS = sorted(str(file.relative_to(ROOT)) for file in FILES)
NOTEBOOKS = [str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.ipynb")]
FOR_USERS = [name for name in DOCUMENTS if name.startswith(("README", "docs/", "skills/"))]
REPOSITORY = "https://github.com/xret/xret/blob/main/"  # the README's links, which PyPI shows, too
# Links from elsewhere to files of the repository: GitHub, Colab, and pages of the site.
ELSEWHERE = {
    REPOSITORY: r"\1",
    "https://colab.research.google.com/github/xret/xret/blob/main/": r"\1",
    "https://xret.github.io/xret/": r"docs/\1.md",
}
PLACEHOLDERS = ("NAME", "VARIANT", "TABLE", "SYSTEM")  # of paths that CONTRIBUTING tells to make


def commands(document, begin):
    """Return the lines of a document's blocks that begin with a command."""
    lines = [line for block in blocks(document) for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(begin, line)]


def outside_blocks(document):
    return re.sub(r"^```.*?^```$", "", text_of(document), flags=re.DOTALL | re.MULTILINE)


def headings(document):
    return re.findall(r"^(##+) (.*)$", outside_blocks(document), re.MULTILINE)


def anchor(heading):
    """Return the name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def parse(command, words):
    """Let click read the words as the command would, and return the parameters; unknown options are refused."""
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    context = click.Context(command, **command.context_settings)
    return command.make_parser(context).parse_args(args=words)[0]


XRET = {line: document for document in FOR_USERS for line in commands(document, r"xret [a-z-]+")}
BENCHMARKS = commands(FIGURES, "python tests/benchmarks/")


@pytest.mark.parametrize(("line", "document"), XRET.items())
def test_a_command_of_a_document(line, document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(block("docs/tutorials/your-head.md", "class Between"))
    name, *words = shlex.split(line, comments=True)[1:]
    assert name in main.commands, f"{document}: there is no command {name}"
    parameters = parse(main.commands[name], [word for word in words if word not in ANYWHERE])
    settings = parameters.get("settings", [])
    if name == "train-head" and not parameters["recipe"][0].endswith("tuned/best.yaml"):  # which `xret tune` writes
        (recipe,) = parameters["recipe"]
        assert load_recipe(recipe, settings)
    if name == "tune":
        facts = (FeatureFacts("grid", 16, 16),), (FeatureFacts("words", None, None, 9),)
        (recipe,) = parameters["recipe"]
        space = dict(word.split("=") for word in parameters.get("space", []))
        assert make_space(recipe, *facts, space, settings_of(settings))


@pytest.mark.parametrize("line", [*BENCHMARKS, *re.findall(r"`(python tests/benchmarks/[^`]+)`", text_of(FIGURES))])
def test_a_benchmark_that_a_figure_names(line, monkeypatch):
    file, *words = shlex.split(line, comments=True)[1:]
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    spec = importlib.util.spec_from_file_location(f"benchmark_{Path(file).stem}", ROOT / file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    parse(module.main, words)


def test_every_benchmark_has_its_place_in_the_figures():
    told = text_of(FIGURES)
    files = [path for path in (ROOT / "tests" / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert len(files) >= 8
    assert [path.name for path in files if path.name not in told] == []


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTEBOOKS])
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)]+)\)", outside_blocks(document)):
        path, _, name = target.partition("#")
        folder = (ROOT / document).parent
        for address, place in ELSEWHERE.items():
            if path.startswith(address):
                folder, path = ROOT, re.sub(r"^(.+?)/?$", place, path.removeprefix(address))
        if path.startswith(("http://", "https://")):
            continue
        file = folder / path if path else ROOT / document
        assert file.exists(), f"{document} links to {target}"
        assert document != "README.md" or not path or REPOSITORY in target, f"PyPI cannot follow {target}"
        if name:
            there = [anchor(heading) for _, heading in headings(file.resolve().relative_to(ROOT))]
            assert name in there, f"{document} links to {target}, and there is no such heading"


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    assert f"\nversion: {version}\n" in text_of("CITATION.cff")
    assert f"version = {{{version}}}" in text_of("README.md")
    assert f"\n## {version} - 2" in text_of("CHANGELOG.md")


def test_the_container_has_all_of_the_package_and_serves_not_as_root():
    lines, project = text_of("Dockerfile"), tomllib.loads(text_of("pyproject.toml"))
    folders = {name.split(".")[1] for name in project["tool"]["setuptools"]["packages"] if "." in name}
    assert set(re.findall(r"^COPY (\w+) \1$", lines, re.MULTILINE)) == folders
    extras = re.search(r"install .*'\.\[(.*)\]'", lines)[1].split(",")
    assert {"serve", "index"} <= set(extras) <= set(project["project"]["optional-dependencies"])
    assert int(re.findall(r"^USER (\d+):\d+$", lines, re.MULTILINE)[-1]) > 0


@pytest.mark.parametrize("document", [FIGURES, "docs/how-to/own-loop.md"])
def test_a_list_of_sections_stands_on_top(document):
    top = text_of(document).partition("\n## ")[0]
    sections = [anchor(heading) for level, heading in headings(document) if level == "##"]
    assert sections
    assert [name for name in sections if f"(#{name})" not in top] == []


def test_paths_in_contributing_exist():
    named = re.findall(r"`([\w./-]+)`", outside_blocks("CONTRIBUTING.md"))
    paths = [name for name in named if "/" in name or name.endswith((".md", ".toml"))]
    assert len(paths) >= 25
    for path in paths:
        parts = Path(path).parts
        new = next((place for place, part in enumerate(parts) if any(word in part for word in PLACEHOLDERS)), None)
        there = ROOT.joinpath(*parts[:new])
        assert there.exists() and there.is_dir() == (path.endswith("/") or new is not None), path


def test_every_system_has_a_row_in_the_tables_of_recipes():
    systems = {path.stem for path in (ROOT / "heads" / "recipes" / "systems").glob("*.yaml")}
    for document in ("README.md", "docs/reference/recipes.md"):
        firsts = " ".join(re.findall(r"^\| (`[^|]*) \|", text_of(document), re.MULTILINE))
        assert {system for system in systems if f"`{system}`" not in firsts} == set(), document


def test_every_bundled_data_set_has_a_row():
    for path in (ROOT / "data_manifests").glob("*.yaml"):
        assert re.search(rf"^\| `{path.stem}` \|", text_of(MANIFEST), re.MULTILINE), path


@pytest.mark.parametrize("document", [name for name in FOR_USERS if blocks(name, "python")])
def test_python_blocks_are_python(document):
    for code in blocks(document, "python"):
        ast.parse(code)


def test_a_cache_is_read_as_the_page_of_the_store_says(tmp_path, monkeypatch, capsys):
    make_store(tmp_path / "holiday.zarr")
    name = "docs/reference/store.md"
    printed = run_block(name, tmp_path, monkeypatch, capsys, having="FeatureCache")
    assert printed.endswith("(12, 4, 16) (12, 16)\n(12, 4, 16)\n")
    found: dict = {}
    exec(compile(block(name, having="zarr.open_group"), name, "exec"), found)
    cache = FeatureCache.open("holiday.zarr")
    captions = cache.caption_set()
    expected = [captions.token(np.array([row])).tolist() for row in range(*cache.captions_of(*cache.splits["test"]))]
    assert [row.tolist() for row in found["rows"]] == expected


def test_a_split_goes_to_hdf5(tmp_path, monkeypatch, capsys):
    make_store(tmp_path / "holiday.zarr", text="tokens", broken=(17,), train=12, val=3, test=9, mark="a\0")
    run_block(IMPORT, tmp_path, monkeypatch, capsys, having="to_hdf5")
    cache = FeatureCache.open(tmp_path / "holiday.zarr")
    images, captions, (first, last) = cache.image_set(), cache.caption_set(), cache.captions_of(15, 24)
    with h5py.File("test.h5") as file:
        assert set(file["images"]) == {*images.array_names, "id"}
        for name in images.array_names:
            assert np.array_equal(file[f"images/{name}"], images.array(name, np.arange(15, 24)), equal_nan=True), name
        assert [key.decode() for key in file["images/id"]] == cache.ids(15, 24)
        assert [text.decode() for text in file["captions/text"]] == cache.caption_texts(first, last)
        assert (file["captions/image"][...] + 15).tolist() == cache.caption_image[first:last].tolist()
        parts = np.split(file["captions/local"][...], np.cumsum(file["captions/length"])[:-1])
        for row, part in zip(range(first, last), parts, strict=True):
            assert np.array_equal(part, captions.local(np.array([row])))


def test_regions_in_a_file_an_image_are_imported(tmp_path, monkeypatch, capsys):
    world = World(tmp_path / "w", ragged=True)
    (tmp_path / "butd" / "val2014").mkdir(parents=True)
    for image in world.images:
        local, boxes, (width, height) = (image["regions_of_test"][name] for name in ("local", "boxes", "size"))
        facts = {"num_bbox": len(local), "image_w": width, "image_h": height, "info": np.array(Bomb(), dtype=object)}
        np.savez(tmp_path / "butd/val2014" / f"{image['filename'][:-4]}.npz", x=local, bbox=boxes, **facts)
    run_block(IMPORT, tmp_path, monkeypatch, capsys, having="butd.h5")
    _, cache = bring(world, tmp_path / "butd.h5", "hdf5", arrays={})
    images = cache.image_set()
    for row, regions in enumerate(world.stored):
        count = images.length[row]
        assert count == len(regions["local"])
        found = {name: images.array(name, np.array([row]))[0] for name in ("local", "boxes", "size")}
        assert np.array_equal(found["local"][:count], regions["local"].astype(np.float16))
        assert np.array_equal(found["boxes"][:count], regions["boxes"])
        assert tuple(found["size"]) == regions["size"]
    assert not Path("exploded").exists()


@pytest.fixture
def videos(tmp_path):
    """A folder with a few videos as MSR-VTT and VATEX have them: their JSON, and their features of frames."""
    rng, names = np.random.default_rng(0), [f"video{number}" for number in range(16)]
    splits = ["train"] * 8 + ["validate"] * 4 + ["test"] * 4
    for name in ("msrvtt", "vatex"):
        (tmp_path / name).mkdir()
        text = (ROOT / "data_manifests" / f"{name}.yaml").read_text()
        (tmp_path / f"{name}.yaml").write_text(re.sub("^counts.*", "", text, flags=re.MULTILINE))
    for file, some in (("train_val", slice(12)), ("test", slice(12, 16))):
        rows = list(zip(names, splits, strict=True))[some]
        said = [{"caption": f"someone plays {one} take {k}", "video_id": one} for k in range(3) for one, _ in rows]
        found = {"videos": [{"video_id": one, "split": split} for one, split in rows], "sentences": said}
        (tmp_path / f"msrvtt/{file}_videodatainfo.json").write_text(json.dumps(found))
    for part, some in (("training", names[:8]), ("validation", names[8:])):
        found = [{"videoID": one, "enCap": [f"a person does {one}", "x"], "chCap": ["y"]} for one in some]
        (tmp_path / f"vatex/vatex_{part}_v1.0.json").write_text(json.dumps(found))
    np.save(tmp_path / "vatex/tst_names.npy", np.array(names[12:]))
    (tmp_path / "i3d").mkdir()
    with h5py.File(tmp_path / "frames.hdf5", "w") as file:
        for name in names:
            local = rng.standard_normal((int(rng.integers(1, 6)), 8)).astype(np.float32)
            np.save(tmp_path / "i3d" / f"{name}.npy", local[None])
            file[name] = local
    return tmp_path


@pytest.mark.parametrize(("name", "recipe"), [("msrvtt", "msrvtt-resnet152-bigru"), ("vatex", "vatex-i3d-bigru")])
def test_videos_go_from_published_files_to_a_table(videos, name, recipe, monkeypatch, capsys):
    run_block(MANIFEST, videos, monkeypatch, capsys, having=f'"{name}/captions.jsonl"')
    code = block(IMPORT, having="frames.h5")
    if name == "msrvtt":  # the other two lines, of one file
        code = re.sub(r"^names = .*\nread = .*\n# .*?: ", "", code, flags=re.MULTILINE)
    exec(compile(code, IMPORT, "exec"), {})
    manifest, words = str(videos / f"{name}.yaml"), ["--data-root", str(videos), "--store", "v.zarr", "--json"]
    found = printed(["import", manifest, *words, "--from", "hdf5", "--source", "frames.h5", "--kind", "frames"])
    assert (found["images"], found["captions"], found["sets"][0]["samples"]) == (16, 48 if name == "msrvtt" else 32, 16)
    printed(["extract", manifest, *words, "--visual", "none", "--text", "words"])
    small = [f"--set={key}" for key in ("model.dim=8", "adapter.words.word_dim=8", "schedule.epochs=1")]
    printed(["train-head", "v.zarr", "--recipe", f"vse-infty/{recipe}", "--out", "run", *small, "--json"])
    (result,) = printed(["eval", "run", "--json"])["results"]
    assert (result["images"], result["split"]) == (4, "test")
    cells = printed(["ablate", "v.zarr", "--grid", "vse-infty-table4", "--out", "cells", *small, "--json"])
    assert [(cell["row"], cell["error"]) for cell in cells] == [(name, None)] * 2


def test_an_encoder_of_ones_own_is_run_as_its_page_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "readme_encoder.py").write_text(block(EXTRACTION, "class Quarters"))
    Image.new("RGB", (30, 20), (10, 20, 30)).save("p.png")
    encoder = load_visual(EncoderSpec("readme_encoder:Quarters", "w", image_size=64, pool=(2, 1)), "cpu")
    pixels, size = encoder.decode("p.png")
    local, global_ = encoder.encode(pixels[None])
    assert (size, local.tolist(), global_.tolist()) == ((30, 20), [[[10, 20, 30]] * 2], [[10, 20, 30]])


def answers(sentence, numbers):
    """Return which of the generated scenes have an object that the sentence names."""
    scenes = {number: random_scene(Random(f"scene {SCENES} 0 {number}")) for number in numbers}
    return [number for number, scene in scenes.items() if sentence in [thing.caption for thing in scene.things]]


@pytest.mark.parametrize(
    ("document", "train", "val"),
    [
        *[(name, 800, 100) for name in ("README.md", "docs/tutorials/first-head.md", "docs/how-to/search.md")],
        ("docs/notebooks/loop.ipynb", 300, 50),
    ],
)
def test_a_query_has_its_answer_among_the_test_pictures(document, train, val):
    queries = set(re.findall(r'search[^"\n]*"(a (?:big|small) [^"\\]*)', text_of(document).replace('\\"', '"')))
    assert queries
    for query in queries:
        found = answers(query, range(train + val + 100))
        assert found and min(found) >= train + val, (query, found)  # and among these alone


def test_the_scenes_are_drawn_of_the_same_numbers(drawn):
    images = json.loads((drawn.parent / "dataset_scenes.json").read_text())["images"]
    assert all(
        int(re.search(r"\d+", image["filename"])[0]) in answers(image["sentences"][0]["raw"], range(16))
        for image in images
    )


@pytest.fixture
def drawn(tmp_path):
    """A folder with what `make demo` draws, but few pictures."""
    return generate_scenes(tmp_path / "xret-demo" / "scenes", train=8, val=4, test=4)


def test_the_example_runs_as_it_stands(drawn, tmp_path, monkeypatch, capsys):
    printed = run_block("README.md", tmp_path, monkeypatch, capsys)
    path, *shown = forms(blocks("README.md", "text")[0])
    assert path.startswith("example on ") and [line for line in shown if line not in forms(printed)] == []


@pytest.mark.slow
def test_a_search_in_python_runs_as_it_stands(drawn, tmp_path, monkeypatch, capsys):
    store = str(tmp_path / "scenes.zarr")
    options = build_options(visual="plain-ground", text="words")
    extract(load_manifest(drawn), store, options)
    settings = ["model.dim=128", "schedule.epochs=1", "data.batch_size=24"]
    train(store, load_recipe("setdiv", settings), tmp_path / "xret-demo" / "setdiv-k4")
    printed = run_block("docs/how-to/search.md", tmp_path, monkeypatch, capsys, having="encode_text")
    assert printed.startswith("torch.Size([4, 2])\n")
    assert [line[:6] for line in printed.splitlines()[-4:]] == [f"slot {slot}" for slot in range(4)]


def forms(printed):
    """Return lines without their numbers and the width of their columns."""
    return [re.sub(r"-?\d[\d,.]*", "0", " ".join(line.split())) for line in printed.splitlines()]


def run_block(document, folder, monkeypatch, capsys, having=""):
    """Run a Python block of a document in a folder and return what it prints."""
    monkeypatch.chdir(folder)
    exec(compile(block(document, having), document, "exec"), {})
    return capsys.readouterr().out


def documented_keys(document, command):
    """Return the keys that a document lists for the JSON of a command, and those of the elements of its list."""
    (row,) = re.findall(rf"^\| (?:.*, )?`{command}`(?:, .*)? \| (.*) \|$", text_of(document), re.MULTILINE)
    inner = re.search(r"`(\w+)` \[(.*?)\]", row)
    keys = set(re.findall(r"`(\w+)`", re.sub(r"\[.*?\]", "", row)))
    return keys, ({inner[1]: set(re.findall(r"`(\w+)`", inner[2]))} if inner else {})


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A folder with a small store and a run of one epoch, and the JSON that the training printed."""
    folder = tmp_path_factory.mktemp("json")
    make_store(folder / "s.zarr")
    settings = ["model.dim=16", "schedule.epochs=1", "data.batch_size=8"]
    words = ["--recipe", "vsepp", *(word for setting in settings for word in ("--set", setting))]
    train = ["train-head", str(folder / "s.zarr"), "--out", str(folder / "run"), *words, "--json"]
    ablate = ["ablate", str(folder / "s.zarr"), "--out", str(folder / "cells"), *words, "--json"]
    return folder, {"xret train-head": printed(train), "xret ablate": printed([*ablate, "--vary", "optimizer.lr=1e-3"])}


def printed(words):
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_keys_of_json_are_those_documented(small_run):
    folder, made = small_run
    run, store = (str(folder / name) for name in ("run", "pictures.zarr"))
    make_pictures_store(make_pictures(folder / "pictures"), store)
    removed = "images/" + printed(["cache", "info", store, "--json"])["sets"][0]["name"]
    made |= {
        "xret eval": printed(["eval", run, "--json"]),
        "xret recipes": printed(["recipes", "--json"]),
        "xret export": printed(["export", run, "--out", str(folder / "e.safetensors"), "--json"]),
        "xret cache info": printed(["cache", "info", store, "--json"]),
        "xret cache verify": printed(["cache", "verify", store, "--json"]),
        "xret cache rm": printed(["cache", "rm", store, removed, "--json"]),
    }
    for command, value in made.items():
        keys, inner = documented_keys("docs/reference/json.md", command)
        first = value[0] if isinstance(value, list) else value
        assert set(first) == keys, command
        for key, names in inner.items():
            assert set(first[key][0]) == names, f"{command}: {key}"


SKILL = (Path(__file__).resolve().parents[1] / "skills" / "xret" / "SKILL.md").read_text(encoding="utf-8")
SMALL = [f"--set={key}" for key in ("model.dim=16", "schedule.epochs=1", "data.batch_size=8")]


def test_it_says_what_it_is_and_when_to_take_it():
    name, description = re.match(r"---\nname: (.*)\ndescription: (.*?)\n---\n", SKILL, re.DOTALL).groups()
    assert name == "xret"
    assert "Use to" in description and len(description) < 1024


def test_its_commands_run_in_order_on_a_small_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_pictures(tmp_path, val=12).rename("holiday.yaml")
    clip = save_text_model(tmp_path / "clip", "clip")
    lines = re.findall(r"^(xret .*?) +# (\S+)$", SKILL, re.MULTILINE)
    assert len(lines) >= 12
    for line, path in lines:
        for large, small in (
            ("openai/clip-vit-base-patch32", str(clip)),
            ("--trials 20", "--trials 2"),
            ("--seeds 3", ""),
        ):
            line = line.replace(large, small)
        words = shlex.split(line)
        more = SMALL if words[1] in ("train-head", "ablate", "tune") else []
        done = CliRunner().invoke(main, [*words[1:], *more])
        assert done.exit_code == 0, f"{line}: {done.output}"
        value = json.loads(done.stdout)
        for number, key in re.findall(r"\[(\d+)\]|(\w+)", path):
            value = value[int(number) if number else key]
        assert value is not None, line


@pytest.mark.slow
def test_what_moves_is_moved_as_the_page_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page, small = "docs/how-to/moving.md", "mobilenet_v3_small --visual-weights random:0 --image-size 64 --text words"
    make_pictures(tmp_path).rename("holiday.yaml")
    make_run(make_pictures_store("holiday.yaml", tmp_path / "holiday.zarr"), tmp_path / "run")
    (tmp_path / "photos").symlink_to("images")
    said = json.loads(Path("captions.json").read_text())
    said["images"].append({**said["images"][-1], "filename": "more.png", "imgid": 99})
    Image.new("RGB", (48, 40), "red").save("images/more.png")
    Path("more.json").write_text(json.dumps(said))
    Path("more.yaml").write_text("name: pictures\nimages: images\ncaptions: more.json\n")
    (name,) = (key.partition("/")[2] for key in FeatureCache.open("holiday.zarr").set_paths("images"))
    printed = {}
    for code in blocks(page):
        if "save_to_folder" in code:
            exec(compile(code, page, "exec"), {})
        for line in code.splitlines() if "import" not in code and "push" not in code else ():
            line = line.replace("/archive", "archive").replace("--visual resnet50", f"--visual {small}")
            line = line.replace("resnet50@1f2e3d4c", name)
            if line.startswith("xret"):
                done = CliRunner().invoke(main, shlex.split(line)[1:])
                assert done.exit_code == 0, f"{line}: {done.output}"
                printed[line] = done.stdout
            else:
                Path("archive").mkdir(exist_ok=True)
                printed[line] = subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True).stdout
    tables = [text.partition("\n")[2] for line, text in printed.items() if line.startswith("xret eval")]
    assert tables[0] == tables[1] and "22 reused" in printed[next(line for line in printed if "--reuse" in line)]
    assert printed[next(line for line in printed if "grep" in line)].split() == ["my-run/run.json", "run/run.json"]
    refused = CliRunner().invoke(main, ["eval", "run"])
    assert refused.exit_code == 1 and name in refused.stderr, refused.stderr


def test_each_concept_has_one_line_and_its_name_in_the_code():
    rows = re.findall(r"^\| (.+?) \| (.+) \| `(\w+)` \|$", text_of(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    words, told, names = zip(*rows, strict=True)
    assert 40 < len(rows) <= 60 and all(len(set(column)) == len(rows) for column in (words, told, names))
    files = [file for room in ("heads", "pipeline") for file in (ROOT / room).rglob("*.py")]
    source = "\n".join(file.read_text("utf-8") for file in files)
    missing = [name for name in names if not re.search(rf"(?:class|def) {name}\b|\b{name}(?:: | = )", source)]
    assert not missing
