"""Drawings as SVG that are readable on light and on dark pages. Nothing beyond the standard
library."""

from __future__ import annotations

import math
from html import escape

# name: (fill, stroke) on light pages, (fill, stroke) on dark ones.
COLOURS = {
    "blue": (("#ddf4ff", "#0969da"), ("#0c2d6b", "#79c0ff")),
    "green": (("#dafbe1", "#1a7f37"), ("#033a16", "#56d364")),
    "orange": (("#fff1e5", "#bc4c00"), ("#5a1e02", "#ffa657")),
    "purple": (("#fbefff", "#8250df"), ("#3c1e70", "#d2a8ff")),
    "grey": (("#f6f8fa", "#8c959f"), ("#21262d", "#8b949e")),
    "page": (("#ffffff", "#d0d7de"), ("#0d1117", "#30363d")),
}
INK, DIM = ("#1f2328", "#f0f6fc"), ("#59636e", "#9198a1")


def _style() -> str:
    def rules(dark: int) -> str:
        lines = [f".ink{{fill:{INK[dark]}}}.dim{{fill:{DIM[dark]}}}"]
        for name, themes in COLOURS.items():
            fill, stroke = themes[dark]
            lines.append(
                f".{name}{{fill:{fill};stroke:{stroke}}}.{name}-line{{stroke:{stroke};fill:none}}"
                f".{name}-head{{fill:{stroke}}}"
            )
        return "\n".join(lines)

    return (
        "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;"
        "font-size:13px}\n.bold{font-weight:600}.small{font-size:11.5px}.title{font-size:15px}\n"
        f"{rules(0)}\n@media (prefers-color-scheme:dark){{\n{rules(1)}\n}}"
    )


class Drawing:
    """Shapes on a page of ``width`` x ``height``; ``title`` is what screen readers say."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, *, look: str = "ink", at: str = "start") -> None:
        """``at``: start, middle or end of the words lies at x."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{look}" text-anchor="{at}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, *lines: str,
        look: str = "ink", dashed: bool = False,
    ) -> None:  # fmt: skip
        """A box with lines of text in its middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
            f'class="{colour}"{dash}/>'
        )
        first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 16 * number, line, look=look, at="middle")

    def line(self, points: list[tuple[float, float]], colour: str = "grey", *, width: float = 1.5,
             dashed: bool = False) -> None:  # fmt: skip
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" class="{colour}-line" stroke-width="{width:g}"{dash}/>'
        )

    def arrow(self, points: list[tuple[float, float]], colour: str = "grey", *, width: float = 1.5,
              dashed: bool = False) -> None:  # fmt: skip
        """A line through the points that ends in a head."""
        (x0, y0), (x1, y1) = points[-2:]
        angle = math.atan2(y1 - y0, x1 - x0)
        back = (x1 - 6 * math.cos(angle), y1 - 6 * math.sin(angle))
        self.line([*points[:-1], back], colour, width=width, dashed=dashed)
        head = [(x1, y1)]
        for turn in (2.7, -2.7):
            head.append((x1 + 9 * math.cos(angle + turn), y1 + 9 * math.sin(angle + turn)))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in head)
        self._parts.append(f'<polygon points="{path}" class="{colour}-head"/>')

    def svg(self) -> str:
        size = f"{self.width} {self.height}"
        page = f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" '
                f'width="{self.width}" height="{self.height}">',
                f"<title>{escape(self.title)}</title>",
                f"<style>\n{_style()}\n</style>",
                f'{page} class="page"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
