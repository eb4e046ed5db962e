"""The documentation site: it builds without a warning, no link on it is broken, and a browser shows
its pages."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tool_modules

ROOT = Path(__file__).resolve().parents[3]
SHOTS = ROOT / "build" / "screenshots"
NEEDED = ("mkdocs", "material", "mkdocstrings")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

site_links = tool_modules.load("lib/site_links.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MISSING:
        pytest.skip(f"no {', '.join(MISSING)}: pip install deep_comm[docs], or run tools/docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True, text=True, timeout=280, cwd=ROOT, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 80
    assert 'id="deep_comm.Buffer.dispatch"' in (site / "api" / "buffer.html").read_text()
    assert not site_links.broken(site)


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text('<h2 id="here"></h2>')
    (tmp_path / "index.html").write_text(
        '<a href="there.html#here"></a> <a href="there.html#gone"></a> <a href="gone.html"></a>'
        '<img src="gone.svg"> <a href="#gone"></a> <a href="https://example.org/x#y"></a>'
    )
    lost = ["there.html#gone", "gone.html", "gone.svg", "#gone"]
    assert site_links.broken(tmp_path) == [f"index.html: {target}" for target in lost]


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_a_browser_shows_every_page(site: Path, address: str) -> None:
    """Optional: with playwright, and a Chromium of its own or of the machine. Screenshots stay in
    build/screenshots.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as started:
        browser = shutil.which("chromium") or started.chromium.executable_path
        if not Path(browser).exists():
            pytest.skip("no Chromium: playwright install chromium, or apt-get install chromium")
        page = started.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(f"{page.url}: {error}"))
        page.on(
            "response",
            lambda answer: troubles.append(answer.url) if answer.status >= 400 else None,
        )
        page.on(  # leaving a page aborts what it still loads
            "requestfailed",
            lambda request: (
                troubles.append(f"{request.url}: {request.failure}")
                if request.failure != "net::ERR_ABORTED"
                else None
            ),
        )
        page.set_viewport_size({"width": 390, "height": 844})  # of a phone
        for file in sorted(site.rglob("*.html")):
            name = str(file.relative_to(site))
            if name == "404.html":
                continue
            page.goto(f"{address}/{name}")
            unseen = page.evaluate(
                "[...document.images].filter(it => it.naturalWidth == 0).map(it => it.src)"
            )
            troubles += [f"{name}: {image}" for image in unseen]
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                troubles.append(f"{name}: wider than a phone; what is wide must scroll by itself")
        page.set_viewport_size({"width": 1280, "height": 1000})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for name in ("index", "guide/expert-parallelism", "api/buffer"):
                page.goto(f"{address}/{name}.html")
                SHOTS.mkdir(parents=True, exist_ok=True)
                page.screenshot(path=SHOTS / f"{name.replace('/', '-')}-{scheme}.png")
    assert not troubles, troubles
