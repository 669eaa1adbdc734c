"""The page on vector databases: each of its snippets finds what `xret search` finds."""

import re
from pathlib import Path

import pytest
from documents import blocks
from foreign import needed, of_others

from xret.heads.retrieval.export import export_embeddings
from xret.heads.retrieval.retriever import Retriever

pytestmark = of_others
FIRST, *SNIPPETS, RANK = blocks("docs/how-to/databases.md", "python")
TEXT = "grey beside red"


def test_snippets_are_short():
    assert len(SNIPPETS) == 10
    assert max(len(snippet.splitlines()) for snippet in SNIPPETS) <= 15


@pytest.fixture
def postgres():
    """An empty schema of the database that PGHOST, PGUSER and the like name."""
    psycopg = needed("psycopg")
    try:
        database = psycopg.connect(autocommit=True, connect_timeout=5)
    except psycopg.OperationalError:
        pytest.skip("no PostgreSQL answers; PGHOST, PGUSER and PGDATABASE name one with pgvector")
    with database:
        if not database.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchone():
            pytest.skip("PostgreSQL is here without pgvector")
        database.execute(
            "CREATE EXTENSION IF NOT EXISTS vector; DROP SCHEMA IF EXISTS xret CASCADE; CREATE SCHEMA xret"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PGOPTIONS", "-c search_path=xret,public")
            yield
        database.execute("DROP SCHEMA xret CASCADE")


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_finds_what_a_search_finds(made, tmp_path, monkeypatch, request, number):
    snippet, is_set = SNIPPETS[number], number >= len(SNIPPETS) // 2
    for package in re.findall(r"^(?:import|from) (\w+)|, (\w+)(?=.*\n.*import)", snippet, re.MULTILINE):
        needed(next(filter(None, package)))
    if "psycopg" in snippet:
        request.getfixturevalue("postgres")
    run = made.run("setdiv" if is_set else "vsepp")
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(run)
    retriever = Retriever("run", device="cpu")
    for name in ("all.parquet", "all"):
        export_embeddings(retriever, name)
    names = {}
    for code in (FIRST.replace("two dogs in the snow", TEXT), snippet, *([RANK] if is_set else [])):
        exec(code, names)
    hits, expected = dict(names["hits"]), {hit.id: hit.score for hit in retriever.search(TEXT, 22)}
    assert len(hits) == 10
    assert hits == pytest.approx({id_: expected[id_] for id_ in hits}, abs=1e-5)
    assert list(hits.values()) == pytest.approx(sorted(expected.values(), reverse=True)[:10], abs=1e-5)
