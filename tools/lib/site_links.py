"""Links, images and anchors of a built site that lead nowhere. Nothing beyond the standard
library."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value:
                self.targets.append(value)


def broken(site: Path) -> list[str]:
    """Lines "page: link", one for each link inside ``site`` that leads nowhere, or out of it."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    return [
        f"{path.relative_to(site)}: {target}"
        for path, page in pages.items()
        if path.name != "404.html"  # its links are of wherever it is shown
        for target in _lost(page, path, pages)
    ]


def _lost(page: _Page, path: Path, pages: dict[Path, _Page]) -> Iterator[str]:
    for target in page.targets:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        found = path.parent / unquote(parts.path) if parts.path else path
        found = found.resolve()
        if found.is_dir():
            found /= "index.html"
        anchor = unquote(parts.fragment)
        there = pages.get(found)
        has_anchor = not anchor or there is None or anchor in there.anchors
        if not found.exists() or not has_anchor:
            yield target
