"""How long a query through a warm `xret serve` takes, and what many clients at once do to it.

Starts the server itself, on loopback, with the words behind RUN. `text` and `picture` are single queries, one behind
the other, over one connection, k 10: milliseconds as the client sees them. `clients` asks from many connections at
once, each as fast as it gets answers: every tenth request sends a picture, every fourth fetches one of the gallery.
Any status but 200 is an error. Prints one JSON line a figure; `rss_mb` is the server's resident memory.

    python tests/benchmarks/serving.py run --data-root DIR --seconds 60
"""

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import click
import numpy as np

K = 10


class Client:
    """One connection to the server."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, path: str, picture: bytes | None = None) -> tuple[int, bytes]:
        """Return status and body."""
        headers = {"Content-Type": "image/jpeg"} if picture else {}
        self.connection.request("POST" if picture else "GET", path, body=picture, headers=headers)
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def text(self, text: str) -> int:
        """Search by a text."""
        return self.ask(f"/api/search?k={K}&q={quote(text)}")[0]

    def picture(self, picture: bytes) -> int:
        """Search by a picture."""
        return self.ask(f"/api/search?k={K}", picture)[0]


@contextmanager
def served(words: tuple[str, ...]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `xret serve`; yield its process and port."""
    command = [sys.executable, "-m", "xret.cli", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r":(\d+)/$", line.strip())
        if not found:
            raise click.ClickException("the server did not start")
        yield process, int(found[1])
    finally:
        process.terminate()
        click.echo(json.dumps({"figure": "end", "exit_code": process.wait(30)}))


def memory(process: subprocess.Popen[str]) -> dict[str, int]:
    """Return the resident memory of a process and its peak so far, MB."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return {
        name: int(re.search(rf"{key}:\s+(\d+) kB", status)[1]) // 1000  # type: ignore[index]
        for name, key in (("rss_mb", "VmRSS"), ("peak_mb", "VmHWM"))
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1000
    return {"p50_ms": round(float(p50), 1), "p99_ms": round(float(p99), 1)}


def single(name: str, ask: Callable[[int], int], count: int) -> None:
    """Time queries one behind the other."""
    times = []
    for number in range(count):
        start = time.perf_counter()
        if ask(number) != 200:
            raise click.ClickException(f"a {name} query failed")
        times.append(time.perf_counter() - start)
    click.echo(json.dumps({"figure": name, "queries": count, **quantiles(times)}))


def crowd(port: int, texts: list[str], pictures: list[bytes], clients: int, seconds: float) -> dict[str, object]:
    """Ask from many threads for a while; return the figures."""
    times: dict[str, list[float]] = {"text": [], "picture": [], "thumbnail": []}
    wrong: Counter[str] = Counter()
    until = time.perf_counter() + seconds

    def work(first: int) -> None:
        client, number = Client(port), first
        while time.perf_counter() < until:
            number += 1
            kind = "picture" if number % 10 == 0 else "thumbnail" if number % 4 == 0 else "text"
            start = time.perf_counter()
            try:
                if kind == "text":
                    status = client.text(texts[number % len(texts)])
                elif kind == "picture":
                    status = client.picture(pictures[number % len(pictures)])
                else:
                    status = client.ask(f"/api/images/{number % 50}")[0]
                if status != 200:
                    wrong[str(status)] += 1
            except OSError as error:
                wrong[type(error).__name__] += 1
                client.connection.close()
            times[kind].append(time.perf_counter() - start)

    threads = [threading.Thread(target=work, args=(997 * number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    requests = sum(map(len, times.values()))
    figures = {kind: {"requests": len(each), **quantiles(each)} for kind, each in times.items() if each}
    return {"clients": clients, "seconds": seconds, "requests": requests, "errors": dict(wrong), **figures}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, required=True, metavar="RUN [OPTIONS OF xret serve]")
@click.option("--queries", default=300, show_default=True, help="Single ones of each kind.")
@click.option("--clients", default=50, show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="That the clients ask for.")
def main(words: tuple[str, ...], queries: int, clients: int, seconds: float) -> None:
    """Measure `xret serve RUN`."""
    with served(words) as (process, port):
        client = Client(port)
        about = json.loads(client.ask("/api/about")[1])
        hits = json.loads(client.ask(f"/api/search?k=100&q={quote(about['examples'][0])}")[1])["results"]
        texts = sorted({caption for hit in hits for caption in hit["captions"]})
        pictures = [client.ask(f"/api/images/{hit['row']}")[1] for hit in hits[:20]]
        size = {"images": about["images"], "captions": about["captions"], "elements": about["elements"]}
        click.echo(json.dumps({"figure": "gallery", **size, **memory(process)}))
        single("text", lambda number: client.text(texts[number % len(texts)]), queries)
        single("picture", lambda number: client.picture(pictures[number % len(pictures)]), queries)
        before = memory(process)
        figures = crowd(port, texts, pictures, clients, seconds)
        after = memory(process)
        click.echo(json.dumps({"figure": "clients", **figures, "before": before, "after": after}))


if __name__ == "__main__":
    main()
