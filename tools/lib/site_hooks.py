"""Hooks of mkdocs: README.md is the front page, and links out of docs/ become names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def localised(text: str, folder: str) -> str:
    """Links of a page that lies in ``folder`` of the repository, for a site made of docs/.

    What lies elsewhere in the repository is not on the site: its path stands beside the words.
    """

    def replaced(link: re.Match[str]) -> str:
        mark, words, target, anchor = link.groups()
        path = os.path.normpath(os.path.join(folder, target))
        if path == "README.md":
            path = "docs/index.md"
        if path.startswith("docs/"):
            start = folder if folder.startswith("docs") else "docs"
            return f"{mark}[{words}]({os.path.relpath(path, start)}{anchor or ''})"
        return f"`{path}`" if words == path else f"{words} (`{path}`)"

    parts = text.split("```")
    parts[::2] = [_LINK.sub(replaced, part) for part in parts[::2]]
    return "```".join(parts)


def on_files(files: Files, config: Any) -> Files:
    text = localised((ROOT / "README.md").read_text(), "")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "index.md":  # done above
        return markdown
    return localised(markdown, os.path.dirname(f"docs/{page.file.src_uri}"))
