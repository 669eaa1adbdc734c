"""Break lines on purpose, one after another in a copy, and say which of them the tests of their room do not notice.

    python tests/support/mutate.py --lines 40 --seed 0

A line that survives is not tested there, or the change means nothing. A change takes about a minute. Left out are
annotations, the keywords of `GUARDS` and the constants of `SIZES`.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("heads/evaluation", "heads/modules", "pipeline/store", "pipeline/extraction")
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
# What is right without them does the same with them; a sort on a CPU is always stable.
GUARDS = {"frozen", "stable", "strict"}
# How much is read or computed at a time: they bound memory or keep threads busy, and results do not depend on them.
SIZES = {
    "BATCH", "BLOCK", "CELLS", "CHUNK_BYTES", "GLOBAL_CHUNK_BYTES", "KEPT", "PAIRS", "SIDE", "SUMS", "WHOLE",
    "_AT_ONCE", "_BLOCK", "_EACH", "_IMAGES", "_KEPT", "_LOOKED_UP", "_PARTS", "_SAMPLES_BYTES", "_TASKS", "_THREADS",
}  # fmt: skip


def broken(node):
    """Break an expression in place; return whether that can be."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            node.ops = [SWAPPED[type(operator)]()]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPPED:
            node.op = SWAPPED[type(operator)]()
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int()):
            node.value += 1
        case ast.IfExp():
            node.body, node.orelse = node.orelse, node.body
        case _:
            return False
    return True


def candidates(file):
    """Yield the broken lines of a file: number, the line and what becomes of it."""
    text = file.read_text(encoding="utf-8")
    lines, left_out = text.splitlines(keepends=True), set()
    for node in ast.walk(ast.parse(text)):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            left_out |= set(map(id, ast.walk(part))) if part else set()
        match node:  # of an f-string it is not known on every Python where its values stand
            case ast.JoinedStr():
                left_out |= set(map(id, ast.walk(node)))
            case ast.keyword(arg=name) if name in GUARDS:
                left_out |= set(map(id, ast.walk(node)))
            case ast.Assign(targets=[target]) if SIZES & {
                name.id for name in ast.walk(target) if isinstance(name, ast.Name)
            }:
                left_out |= set(map(id, ast.walk(node)))
        same_line = isinstance(node, ast.expr) and node.lineno == node.end_lineno
        if same_line and id(node) not in left_out and broken(node):
            line = lines[node.lineno - 1].encode()
            new = line[: node.col_offset] + f"({ast.unparse(node)})".encode() + line[node.end_col_offset :]
            yield node.lineno, line.decode(), new.decode()


def survives(copy, path, number, line):
    """Whether the tests of a file's room pass with a line of it broken; those of the file itself run first."""
    file, whole = copy / path, (copy / path).read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    file.write_text("".join([*lines[: number - 1], line, *lines[number:]]), encoding="utf-8")
    own = copy / "tests" / path.parent / f"test_{path.stem}.py"
    room = copy / "tests" / next(room for room in ROOMS if path.is_relative_to(room))
    try:
        for what in ([own] if own.exists() else []) + [room]:
            words = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", str(what)]
            environment = {**os.environ, "PYTHONPATH": str(copy.parent), "OMP_NUM_THREADS": "1"}
            if subprocess.run(words, cwd=copy, env=environment, capture_output=True, timeout=900).returncode:
                return False
    except subprocess.TimeoutExpired:
        return False
    finally:
        file.write_text(whole, encoding="utf-8")
    return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    all_ = {(file.relative_to(ROOT), number): (line, new) for file in files for number, line, new in candidates(file)}
    chosen = Random(asked.seed).sample(list(all_.items()), asked.lines)
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "xret")
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in tracked.splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        for done, ((path, number), (line, new)) in enumerate(chosen, 1):
            lives = survives(copy, path, number, new)
            alive += lives
            print(
                f"{done:2} {'SURVIVES' if lives else 'noticed '} {path}:{number}: {line.strip()} -> {new.strip()}",
                flush=True,
            )
    print(f"{len(chosen) - alive} of {len(chosen)} were noticed")


if __name__ == "__main__":
    main()
