"""What the commands share: one look of ``--help``, values refused early, lines of progress.

Nothing here needs torch, so that a command answers ``--help`` and refuses bad values at once.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")

PROGRESS_S = 2.0
"""What takes longer says so."""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Texts as they are, and the defaults of options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # None and False say nothing.
        if action.default in (None, False, argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An error is two lines: of some commands the usage fills a screen."""

    chosen = ""  # options that change what --help says

    def error(self, message: str) -> NoReturn:
        help_ = f"{self.prog}{self.chosen} --help"
        self.exit(2, f"{self.prog}: error: {message}\n`{help_}` says what it takes.\n")


def parser(name: str, what: str, *examples: str, more: str = "") -> Parser:
    """Of the command ``deep_comm NAME``. Every example is a line that can be run."""
    shown = "\n".join(["examples:", *(f"  {example}" for example in examples)]) if examples else ""
    return Parser(
        prog=f"deep_comm {name}",
        description=textwrap.fill(" ".join(what.replace("``", "`").split()), 88),
        epilog="\n\n".join(filter(None, (more, shown))),
        formatter_class=_Formatter,
        allow_abbrev=False,
    )


def refuse(name: str, problem: str) -> NoReturn:
    """End the command, as its parser does."""
    parser(name, "").error(problem)


def at_least(smallest: int, most: int | None = None, multiple: int = 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer; got {text!r}") from None
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}; got {value}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}; got {value}")
        if value % multiple:
            raise argparse.ArgumentTypeError(f"must be a multiple of {multiple}; got {value}")
        return value

    return parse


def above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number; got {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0; got {text}")
    return value


def file_to_read(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return Path(text)


def file_to_write(text: str) -> Path:
    """In a folder that exists: hours of work must not end at a path."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
        raise argparse.ArgumentTypeError(f"{text} {what}")
    return path


class Progress:
    """A line on stderr for every two seconds in which a command has printed nothing else."""

    def __init__(self, is_on: bool = True) -> None:
        self._is_on = is_on
        self._started = self._said = time.monotonic()

    def reset(self) -> None:
        """Something else was printed."""
        self._said = time.monotonic()

    def step(self, text: str) -> None:
        now = time.monotonic()
        if self._is_on and now - self._said >= PROGRESS_S:
            self._said = now
            print(f"... {text} ({now - self._started:.0f} s)", file=sys.stderr, flush=True)

    def over(self, items: Iterable[T], what: str) -> Iterator[T]:
        """The items, with a line on how many are done."""
        for number, item in enumerate(items):
            self.step(f"{number} {what}")
            yield item
