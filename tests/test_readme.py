"""The documents hold: commands parse, links and paths resolve, examples run, and a README of one screen a topic."""

import ast
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import click
import pytest

from xret.cli import main
from xret.heads.recipes.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("pipeline/README.md", "heads/README.md", "tests/benchmarks/README.md")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *ROOMS, "tests/golden/README.md")
PLACEHOLDERS = ("NAME", "VARIANT", "TABLE")  # of paths that CONTRIBUTING tells to make


def text_of(document):
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document, language=r"\w*"):
    """Return the fenced blocks of a document."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(document), re.DOTALL | re.MULTILINE)


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


XRET = [
    (document, line) for document in ("README.md", "pipeline/README.md", "heads/README.md")
    for line in commands(document, r"xret [a-z-]+")
]  # fmt: skip
BENCHMARKS = commands("tests/benchmarks/README.md", "python tests/benchmarks/")


def test_there_are_commands():
    assert len(XRET) >= 35
    assert {document for document, _ in XRET} == {"README.md", "pipeline/README.md", "heads/README.md"}
    assert len(BENCHMARKS) >= 20


@pytest.mark.parametrize(("document", "line"), XRET)
def test_a_command_of_a_document(document, line):
    name, *words = shlex.split(line, comments=True)[1:]
    assert name in main.commands, f"{document}: there is no command {name}"
    parameters = parse(main.commands[name], words)
    if name == "train-head":
        assert load_recipe(parameters["recipe"], parameters.get("settings", []))


@pytest.mark.parametrize("line", [*BENCHMARKS, *re.findall(r"`(python tests/benchmarks/[^`]+)`", text_of(ROOMS[2]))])
def test_a_benchmark_that_a_figure_names(line, monkeypatch):
    file, *words = shlex.split(line, comments=True)[1:]
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    spec = importlib.util.spec_from_file_location(f"benchmark_{Path(file).stem}", ROOT / file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    parse(module.main, words)


def test_every_benchmark_has_its_place_in_the_figures():
    told = text_of("tests/benchmarks/README.md")
    files = [path for path in (ROOT / "tests" / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert len(files) >= 15
    assert [path.name for path in files if path.name not in told] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)]+)\)", outside_blocks(document)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, name = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document} links to {target}"
        if name:
            there = [anchor(heading) for _, heading in headings(file.resolve().relative_to(ROOT))]
            assert name in there, f"{document} links to {target}, and there is no such heading"


@pytest.mark.parametrize("document", ROOMS)
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


def test_names_of_parts_in_the_heads_readme_are_those_of_the_registries():
    from xret.heads.modules.adapters import ADAPTERS
    from xret.heads.modules.aggregators import AGGREGATORS
    from xret.heads.modules.losses import LOSSES
    from xret.heads.modules.similarity import SIMILARITIES

    section = text_of("heads/README.md").partition("\n### Parts\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .*`.*$", section, re.MULTILINE)
    for row, registry in zip(rows, (AGGREGATORS, SIMILARITIES, LOSSES, ADAPTERS), strict=True):
        assert set(re.findall(r"`([\w-]+)`", row.split("|")[2])) == set(registry)


def test_every_system_has_a_row_in_the_tables_of_recipes():
    systems = {path.stem for path in (ROOT / "heads" / "recipes" / "systems").glob("*.yaml")}
    for document in ("README.md", "heads/README.md"):
        firsts = " ".join(re.findall(r"^\| (`[^|]*) \|", text_of(document), re.MULTILINE))
        assert {system for system in systems if f"`{system}`" not in firsts} == set(), document


def test_every_bundled_data_set_has_a_row():
    for path in (ROOT / "data_manifests").glob("*.yaml"):
        assert re.search(rf"^\| `{path.stem}` \|", text_of("pipeline/README.md"), re.MULTILINE), path


def test_the_readme_is_short():
    assert len(text_of("README.md").splitlines()) <= 170


@pytest.mark.parametrize("document", ["README.md", *ROOMS[:2]])
def test_python_blocks_are_python(document):
    found = blocks(document, "python")
    assert found
    for block in found:
        ast.parse(block)


@pytest.mark.parametrize("target", ["demo", "test", "check", "format"])
def test_a_target_of_make(target):
    assert re.search(rf"^{target}:", text_of("Makefile"), re.MULTILINE)


def test_the_makefile_runs_what_ci_runs():
    assert "make test" in text_of(".ci/run")
    assert "make test" in text_of("README.md")
