"""The page on a run: what it says without a browser, and how it works in one."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import tacit
from command import GOOD
from command import tacit as cli
from tacit.report import compare
from tacit.report.board import Board
from tacit.report.chart import Chart, Series, ticks
from tacit.report.curves import charts
from tacit.report.page import LARGEST, page

CLIENT = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3, "epsilon": 50.0}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    f"--{flag}"
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync",
        "disable-dev-shm-usage", "enable-logging=stderr", "v=0",
    )
]  # fmt: skip
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)


class Tree(HTMLParser):
    """The elements of a page, and whether they are closed in order."""

    VOID = ("meta", "link", "path", "circle", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.found if found == tag]


@pytest.fixture
def private(config, dataset) -> compare.Run:
    settings = config(rounds=3, privacy=CLIENT, name="mine")
    tacit.run(settings, "runs/one", dataset=dataset)
    return compare.read_run(Path("runs/one"))


def test_every_run_ends_with_its_page(private) -> None:
    text = Path("runs/one/report.html").read_text()
    tree = Tree(text)
    assert not tree.wrong and not tree.open, (tree.wrong, tree.open)
    ids = [a["id"] for _, a in tree.found if "id" in a]
    assert len(ids) == len(set(ids))
    statement = tacit.statement("runs/one")
    shown = re.sub("<[^>]+>", "", text)
    assert statement.summary() in shown, "the guarantee in two sentences"
    first = text.index("Guarantee"), text.index("Over the rounds")
    assert first[0] < first[1], "the guarantee comes first"
    from tacit.privacy.rounding import rounded_up

    assert f"ε = {rounded_up(statement.epsilon)}" in shown
    assert all(item in shown for item in ("Against whom", "Not covered", "budget 50"))
    accuracy = private.metrics[-1]["accuracy"]
    assert f"{accuracy:.1%}" in shown
    drawn = [a["aria-label"] for a in tree.all("figure")]
    wanted = ("Privacy budget", "Accuracy", "Loss", "Norm of", "clipped", "Clients in", "Traffic", "Seconds")
    assert all(any(word in str(title) for title in drawn) for word in wanted), drawn


def test_classes_and_clients_have_their_names(config) -> None:
    rows = [
        {"x": 3e38 if n % 4 == 3 else 0.1, "job": "cook" if n % 2 else "<vet>", "who": f"p{n % 4}"}
        for n in range(40)
    ]
    data = tacit.dataset(rows, features=["x"], label="job", user="who")
    settings = config(rounds=2, data__partition={"kind": "natural"}, cohort=4)
    tacit.run(settings, "runs/named", dataset=data)
    text = Path("runs/named/report.html").read_text()
    assert "&lt;vet&gt;, cook" in text and "<vet>" not in text
    assert re.search(r"no number \(rounds\):</b> p3 \(2\)<", text), "clients by their names"
    private = config(rounds=1, data__partition={"kind": "natural"}, cohort=4, privacy=CLIENT)
    tacit.run(private, "runs/private", dataset=data)
    assert not Path("runs/private/clients.json").exists(), "who took part is nobody's business"


def test_nothing_on_the_page_asks_the_network(private) -> None:
    text = page(compare.rows([private]))
    tree = Tree(text)
    policy = next(a["content"] for a in tree.all("meta") if a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none';") and "connect-src" not in policy
    addresses = [
        a.get(key) for _, a in tree.found for key in ("src", "href", "action", "srcset") if a.get(key)
    ]
    assert set(addresses) <= {"data:,", "#main"}
    assert "@import" not in text and "url(" not in text and "http://" not in text and "https://" not in text


def test_who_cannot_see_or_point_is_served(private) -> None:
    tree = Tree(page(compare.rows([private])))
    assert tree.all("html")[0]["lang"] == "en"
    for svg in tree.all("svg"):
        title, desc = str(svg["aria-labelledby"]).split()
        assert svg["role"] == "img"
        assert {title, desc} <= {a.get("id") for _, a in tree.found}
    assert all(figure["tabindex"] == "0" for figure in tree.all("figure"))
    assert all(cell.get("scope") == "col" for cell in tree.all("th"))
    chart = next(c for c in charts(compare.rows([private])) if c.title.startswith("Accuracy"))
    assert f"to {private.metrics[-1]['accuracy']:.1%} in round 3" in chart.sentence()


def test_what_a_run_is_called_cannot_become_code(private) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    config = {**private.config, "name": evil, "data": {**private.config["data"], "name": evil}}
    other = {**private.config, "seed": 5, "local": {**private.config["local"], "lr": evil}}
    for table in (
        compare.rows([compare.Run(Path(evil), config, private.metrics)]),
        compare.rows([private, compare.Run(Path(evil), other, private.metrics)]),
    ):
        text = page(table)
        assert "<img" not in text and not Tree(text).all("img")
        assert text.count("</script>") == text.count("<script")


def made(name: str, seed: int, rounds: int, lr: float = 0.1) -> compare.Run:
    metrics = [
        {"round": n + 1, "accuracy": 0.5 + seed / 100 + n / 1e5, "loss": 1.0, "train_loss": 1.0, "clients": 5,
         "update_norm": 0.4, "bytes_up": 10, "bytes_down": 10, "seconds": 0.1, "lr": lr, "examples": 50}
        for n in range(rounds)
    ]  # fmt: skip
    config = {"seed": seed, "rounds": rounds, "local": {"lr": lr}, "method": {"name": "fedavg"}}
    return compare.Run(Path(f"runs/{name}"), config, metrics)


def test_seeds_are_bands_and_every_curve_has_a_name() -> None:
    runs = [made(f"{lr}-{seed}", seed, 4, lr) for lr in (0.1, 0.2, 0.3) for seed in (0, 2)]
    table = compare.rows(runs)
    (chart,) = (c for c in charts(table) if c.title.startswith("Accuracy"))
    assert [series.letter for series in chart.series] == ["A", "B", "C"]
    n, mean, std = chart.series[0].points[-1]
    assert (n, mean, std) == (4, pytest.approx(0.51 + 3e-5), pytest.approx(0.02 / 2**0.5))
    svg = chart.svg()
    assert svg.count('class="band') == 3
    assert [letter in svg for letter in (">A<", ">B<", ">C<")] == [True] * 3
    text = page(table)
    assert text.count("lr 0.2") >= 3, "in the guarantees, in the table and in the key"


def test_a_page_stays_small() -> None:
    many = [made(str(n), 0, 1000, lr=n + 1.0) for n in range(40)]
    text = page(compare.rows(many))
    assert len(text.encode()) < LARGEST
    assert not Tree(text).wrong
    one = page(compare.rows([made("long", 0, 20_000)]))
    assert len(one.encode()) < LARGEST
    assert f"{0.5 + 19_999 / 1e5:.1%}" in one, "the last round is there, whatever is left out"


def test_odd_numbers_are_drawn(private) -> None:
    points = ((1, float("inf"), 0.0), (2, float("nan"), 0.0))
    assert "<svg" in Chart("ε", (Series("a", points),)).svg()
    assert "circle" in Chart("one", (Series("a", ((1, 0.0, 0.0),)),)).svg()
    for value in (-0.05, 1.2):  # a correlation below zero is drawn, too
        assert "circle" in Chart("matthews", (Series("a", ((1, value, 0.1),)),), share=True).svg()
    assert ticks(5, 5, 4) == [5]
    for low, high in ((0, 1e-9), (-3, 1e12), (0.99999, 1.0)):
        found = ticks(low, high, 5)
        assert 2 <= len(found) <= 12 and all(low - 1e-9 <= t <= high * (1 + 1e-9) for t in found)


def test_a_ledger_that_does_not_hold_is_told_of(private) -> None:
    ledger = Path("runs/one/ledger.jsonl")
    lines = ledger.read_text().splitlines(True)
    ledger.write_text("".join(lines[:-1]))
    text = page(compare.rows([compare.read_run(Path("runs/one"))]))
    assert "cannot be said" in text and "holds 2 charges" in text


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: cli(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_the_command_writes_it_and_a_run_ends_within_15_lines(command, tmp_path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD + "privacy: {unit: client, clip: 0.2, noise: 1.0, delta: 1.0e-3}\n")
    code, out, _ = command("run", file, "--out", "runs/a")
    end = out[out.index("Done:") :].strip().splitlines()
    assert code == 0 and len(end) <= 15
    assert end[-1] == "Page: runs/a/report.html" and "must be trusted" in out
    command("run", file, "--set", "seed=1", "--out", "runs/b")
    code, out, _ = command("report", "runs", "--out", "both.html")
    assert code == 0 and "both.html" in out
    assert "2 seeds" in Path("both.html").read_text()
    assert command("report", "nowhere")[0] == 2
    code, _, err = command("report", "runs", "--out", "no/such/folder.html")
    assert code == 2 and "cannot be written" in err


# --- the board ----------------------------------------------------------------------------------------------


@pytest.fixture
def board(private) -> Iterator[Board]:
    with Board(Path("runs")) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


def ask(board: Board, path: str, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", board.server_port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_the_board_shows_runs_to_who_has_the_token_and_nothing_to_others(board) -> None:
    assert board.server_address[0] == "127.0.0.1"
    good = f"/?token={board.token}"
    status, text, headers = ask(board, good)
    assert status == 200 and "Guarantee" in text and headers["Cache-Control"] == "no-store"
    assert ask(board, f"{good}&run=one")[0] == 200
    for path in ("/", "/?token=", "/?token=x", f"/?token={board.token[:-1]}", f"/x?tokens={board.token}"):
        status, text, _ = ask(board, path)
        assert status == 403 and "Guarantee" not in text
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "PROPFIND", "X"):
        assert ask(board, good, method)[0] == 405, method
    for host in ("evil.example", f"evil.example:{board.server_port}", "127.0.0.1", ""):
        assert ask(board, good, Host=host)[0] == 403, "another name for this machine is another page's trick"


def test_the_board_reads_nothing_outside_its_folder(board, config, dataset) -> None:
    good = f"/?token={board.token}"
    tacit.run(config(rounds=1), "secret", dataset=dataset)
    Path("runs/link").symlink_to(Path("secret").resolve())
    shutil.copytree("runs/one", "runs/two")
    Path("runs/two/metrics.jsonl").unlink()
    Path("runs/two/metrics.jsonl").symlink_to(Path("secret/metrics.jsonl").resolve())
    runs, _ = board.runs()
    assert [run.folder.name for run in runs] == ["one"]
    for name in (
        "link",
        "two",
        "../secret",
        "%2e%2e/secret",
        str(Path("secret").resolve()),
        ".",
        "one/../one",
        "\0",
    ):
        assert ask(board, f"{good}&run={name.replace(chr(0), '%00')}")[0] == 404, name
    for path in ("/etc/passwd", "/../../etc/passwd", "/runs/one/config.yaml", "//etc/passwd"):
        assert ask(board, f"{path}?token={board.token}")[0] == 404


def test_the_board_tells_what_is_new_and_survives_a_broken_run(board) -> None:
    good = f"/?token={board.token}"
    _, before, headers = ask(board, good, **{"X-Part": "main"})
    tag = headers["ETag"]
    assert ask(board, good, **{"X-Part": "main", "If-None-Match": tag})[0] == 304
    with Path("runs/one/metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"round": 4, "accuracy": 0.987, "clients": 5, "seconds": 1.0}) + "\n")
    status, after, _ = ask(board, good, **{"X-Part": "main", "If-None-Match": tag})
    assert status == 200 and "98.7%" in after and "98.7%" not in before
    Path("runs/bad").mkdir()
    Path("runs/bad/config.yaml").write_text("{")
    status, text, _ = ask(board, good)
    assert status == 200 and "98.7%" in text and "runs/bad" in text and "restore" in text


def test_the_board_answers_whatever_is_sent_and_says_nothing_of_it(board, capfd) -> None:
    here = f"Host: 127.0.0.1:{board.server_port}\r\n"
    for request, answer in (
        (f"GET http://[ HTTP/1.1\r\n{here}\r\n", b" 400 "),
        (f"GET /?{'a=b&' * 5000} HTTP/1.1\r\n{here}\r\n", b" 400 "),
        (f"GET /?token=%ff%00 HTTP/1.1\r\n{here}\r\n", b" 403 "),
        (f"GET /{'x' * 70_000} HTTP/1.1\r\n{here}\r\n", b" 414 "),
        (f"GET / HTTP/1.1\r\n{'A: b' * 20_000}\r\n\r\n", b" 431 "),
        (f"GET / HTTP/9.9\r\n{here}\r\n", b" 505 "),
        ("\0\x01\x02\r\n\r\n", b"400"),
        (f"GET /?token={board.token} HTTP/1.1\r\n{here}\r\n", None),  # and does not wait for the page
    ):
        with socket.create_connection(("127.0.0.1", board.server_port), timeout=60) as client:
            client.sendall(request.encode())
            if answer is None:
                reset = struct.pack("ii", 1, 0)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            else:
                assert answer in client.recv(4096), request[:60]
    assert ask(board, f"/?token={board.token}")[0] == 200, "it is still there"
    assert capfd.readouterr().err == ""


def test_a_board_of_nothing_says_so(tmp_path) -> None:
    with pytest.raises(tacit.UserError, match="no such folder"):
        Board(tmp_path / "nowhere")


# --- in a browser -------------------------------------------------------------------------------------------


def browse(address: str, *more: str) -> tuple[str, list[str]]:
    """The page after its scripts have run, and what they complained about."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        arguments = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *more, "--dump-dom", address]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


DRIVE = """
<script>
const said = [];
try {
  const sort = document.getElementById("runs-4");
  sort.click();
  said.push([...document.querySelectorAll("#runs-4")].length, sort.closest("th").getAttribute("aria-sort"));
  said.push(sort.closest("table").tBodies[0].rows[0].cells[0].textContent);
  sort.click();
  said.push(sort.closest("table").tBodies[0].rows[0].cells[0].textContent);
  const figure = document.querySelector('figure[aria-label^="Accuracy"]');
  figure.focus();
  const press = key => figure.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  press("End");
  said.push(figure.querySelector(".tip").innerText.replace(/\\n+/g, " | "));
  press("Home"); press("ArrowRight");
  said.push(figure.querySelector(".tip").innerText.replace(/\\n+/g, " | "));
  press("Escape");
  said.push(figure.querySelector(".tip") === null);
  const colour = () => getComputedStyle(document.body).backgroundColor;
  const before = colour(); document.getElementById("theme").click();
  said.push(before !== colour());
  dispatchEvent(new Event("beforeprint"));
  said.push([...document.querySelectorAll("details")].every(d => d.open));
  said.push(document.documentElement.scrollWidth <= innerWidth);
} catch (error) { said.push(String(error)); }
document.title = JSON.stringify(said);
</script>
"""


@in_a_browser
def test_in_a_browser_it_sorts_reads_out_and_changes_its_colours() -> None:
    table = compare.rows([made(f"{lr}", 3 * n, 3, lr) for n, lr in enumerate((0.1, 0.2, 0.3))])
    file = Path("page.html").absolute()
    file.write_text(page(table).replace("</body>", DRIVE + "</body>"))
    text, complaints = browse(file.as_uri(), "--window-size=1280,900")
    assert not complaints
    title = re.search(r"<title>(.*?)</title>", text, re.S)
    assert title is not None
    said = json.loads(title[1].replace("&quot;", '"').replace("&amp;", "&"))
    assert said == [
        1, "descending", "C", "A",
        "round 3 | A: 50.0% | B: 53.0% | C: 56.0%",
        "round 2 | A: 50.0% | B: 53.0% | C: 56.0%",
        True, True, True, True,
    ]  # fmt: skip


@in_a_browser
def test_in_a_browser_a_real_run_loads_without_a_complaint(private) -> None:
    text, complaints = browse(Path("runs/one/report.html").absolute().as_uri(), "--window-size=390,800")
    assert not complaints
    assert f"{private.metrics[-1]['accuracy']:.1%}" in text


@in_a_browser
def test_in_a_browser_the_board_follows_a_run(board, monkeypatch) -> None:
    found, _ = board.runs()
    run = found[0]
    newer = compare.Run(
        run.folder, run.config, [*run.metrics, {**run.metrics[-1], "round": 4, "accuracy": 0.987}]
    )
    answers = iter([([run], [])])
    monkeypatch.setattr(board, "runs", lambda: next(answers, ([newer], [])))
    text, complaints = browse(board.address, "--virtual-time-budget=7000")
    assert not complaints
    assert "98.7%" in text, "a round that ended after the page was loaded"
