"""The documentation site: it builds without a warning, and no link on it is broken."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tool_modules

ROOT = Path(__file__).resolve().parents[3]
NEEDED = ("mkdocs", "material", "mkdocstrings")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

site_links = tool_modules.load("lib/site_links.py")


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    if MISSING:
        pytest.skip(f"no {', '.join(MISSING)}: pip install deep_comm[docs], or run tools/docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        capture_output=True, text=True, timeout=240, cwd=ROOT, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert len(list(tmp_path.rglob("*.html"))) > 80
    assert 'id="deep_comm.Buffer.dispatch"' in (tmp_path / "api" / "buffer.html").read_text()
    assert not site_links.broken(tmp_path)


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text('<h2 id="here"></h2>')
    (tmp_path / "index.html").write_text(
        '<a href="there.html#here"></a> <a href="there.html#gone"></a> <a href="gone.html"></a>'
        '<img src="gone.svg"> <a href="#gone"></a> <a href="https://example.org/x#y"></a>'
    )
    lost = ["there.html#gone", "gone.html", "gone.svg", "#gone"]
    assert site_links.broken(tmp_path) == [f"index.html: {target}" for target in lost]
