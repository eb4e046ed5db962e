"""DeepEP's tests and their helper modules, at two commits, as they were published.

A folder holds them as <commit, seven digits>/<path>. Every file is checked against its SHA-256 hash
here, wherever the folder came from.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = "https://github.com/deepseek-ai/DeepEP"
_GIT_S = 300


class NotFetched(Exception):
    """A file is not obtainable, or is not what was published."""


@dataclass(frozen=True)
class Release:
    commit: str
    hashes: dict[str, str]

    @property
    def short(self) -> str:
        return self.commit[:7]


V1 = Release(
    "29d31c095796f3c8ece47ee9cdcc167051bbeed9",
    {
        "tests/test_intranode.py": (
            "7f3a54d3a4320f8dbf24caab14d9b011f41f6dc1b40d0a2c72fbc7b74563ce2a"
        ),
        "tests/test_internode.py": (
            "4a19c950550173d228e45c1f5257478dbe47b99b19dbc5cb40ae39ab090d2f49"
        ),
        "tests/test_low_latency.py": (
            "8b75bc7bcf0ec9dc39012ec3cde69163e764ab73678a2a4fde064f2d72d9691c"
        ),
        "tests/utils.py": "832af84e59c45da419f209d970fea615b16d69e8602d121d65be3b3e788305d1",
    },
)
V2 = Release(
    "dd758caf451848bd150e1046af3d0a73e5fff38d",
    {
        "tests/elastic/test_ep.py": (
            "9d832494cbdd88a549c9411d24f99874ec329c7183ca3776c6d654554f41c706"
        ),
        "tests/elastic/test_barrier.py": (
            "eceb673e28311c72a2da32778aeac354f450ad17e726e7d01a4e6deb1b900c82"
        ),
        "tests/legacy/test_intranode.py": (
            "ebd1c7f1513827d0c44debb4efdd3efe289cce7e32153c90aada5e963178caf7"
        ),
        "tests/legacy/test_internode.py": (
            "e5d6c529a605b577ddae5b6d63e9de4fe87cb25760c55cb96e50c96cb995298f"
        ),
        "tests/legacy/test_low_latency.py": (
            "a22c180857672cf917c80b64014d3e53c4cb8f54e6e2ad17773fc5984c2a6caa"
        ),
        "deep_ep/utils/comm.py": "7b52a2b8cbd5da4e7fe58e0fc9e460db0ebe8ad29e436c7c59008908a5ffa977",
        "deep_ep/utils/envs.py": "fd79c48188857d1490f7e5593bde76574eb0deb57a1a841b216b67fb33fb6894",
        "deep_ep/utils/gate.py": "5372e45604c53b0b347c14d4e56effa184c31185558a8fde502a7b592b23cc6e",
        "deep_ep/utils/math.py": "ed0dfb4bf98937694a04c162fa1e19fa42df4cd0f92fcb25cb1ec09511eded1f",
        "deep_ep/utils/refs.py": "c5f551b49e55b4481b68ba14d83fd5362a49e43e4ddf779a2c3c471482ff2fef",
        "deep_ep/utils/testing.py": (
            "b1c3169dc3e2a0a8a72804f9ac29f15926545b766b56b4dfba86eb4a8f97738c"
        ),
    },
)
RELEASES = (V1, V2)


def _git(*command: str, cwd: Path | None = None) -> bytes:
    try:
        done = subprocess.run(
            ["git", *command], capture_output=True, timeout=_GIT_S, check=False, cwd=cwd
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFetched(f"git {command[0]}: {error}") from error
    if done.returncode != 0:
        raise NotFetched(f"git {command[0]}: {done.stderr.decode().strip()[-300:]}")
    return done.stdout


def fetch(release: Release, folder: Path, repository: str = REPOSITORY) -> None:
    """Put the files into ``folder``, from a URL or a checkout. Raises NotFetched."""
    with tempfile.TemporaryDirectory() as temporary:
        store = Path(repository)
        if not store.exists():
            store = Path(temporary)
            _git("init", "--quiet", "--bare", cwd=store)
            _git("fetch", "--quiet", "--depth", "1", repository, release.commit, cwd=store)
        for path in release.hashes:
            file = folder / release.short / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(_git("show", f"{release.commit}:{path}", cwd=store))
    files_of(release, folder)


def files_of(release: Release, folder: Path) -> Path:
    """The folder of a release, whose files are as published. Raises NotFetched."""
    place = folder / release.short
    for path, wanted in release.hashes.items():
        try:
            found = hashlib.sha256((place / path).read_bytes()).hexdigest()
        except OSError as error:
            raise NotFetched(f"{release.short}: {path} is not in {folder}") from error
        if found != wanted:
            raise NotFetched(f"{release.short}: {path} is not what was published")
    return place
