"""What modules keep for the whole process is bounded."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# By module what is filled while the program runs; each empties itself or has a bound, which a test of its own sees.
KNOWN = {
    "pipeline/extraction/tasks.py": ["_stations"],
    "pipeline/encoders/threads.py": ["_encoding"],
}
MAKERS = ("dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter")


def trees():
    for room in ("pipeline", "heads", "cli"):
        for path in sorted((ROOT / room).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_is_kept_without_a_bound():
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "functools":
                assert "cache" not in [alias.name for alias in node.names], f"{name}: lru_cache(N) says how many"
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("lru_cache"):
                assert "None" not in ast.unparse(node), name


def test_no_module_has_another_collection_to_fill():
    found = {name: [ast.unparse(target) for target in empty_at_first(tree)] for name, tree in trees()}
    assert {name: targets for name, targets in found.items() if targets} == KNOWN


def empty_at_first(tree):
    """Yield what a module assigns an empty collection to, so that it must be there to be filled."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = node.value
            made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in MAKERS
            if made or ast.unparse(value) in ("{}", "[]"):
                yield from node.targets if isinstance(node, ast.Assign) else [node.target]
