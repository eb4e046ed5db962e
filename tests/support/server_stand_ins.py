"""What the tests of tools/servers share: a machine, and a server of a few lines that streams."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from servers import models, runs
from servers.combinations import ROWS

ROOT = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(ROOT / "tools" / "servers")]
BY_NAME = {row.name: row for row in ROWS}
TINY = models.Model(
    "tiny", "qwen", layers=1, experts=4, topk=2, hidden=256, inter=128, vocab=64
)  # fmt: skip


def machine_at(folder: Path, **others: Any) -> runs.Machine:
    for name in ("qwen", "deepseek"):  # as if they had been made
        (folder / "models" / name).mkdir(parents=True, exist_ok=True)
        config = models.config(dataclasses.replace(TINY, name=name))
        (folder / "models" / name / "config.json").write_text(json.dumps(config))
    (folder / "runs").mkdir(exist_ok=True)
    return runs.Machine(folder / "models", folder / "runs", (), **others)


class Completions(http.server.BaseHTTPRequestHandler):
    """Streams tokens that follow from the prompt: two in its first event, then one each. As
    OpenAI's API does, or as SGLang's: there each event repeats what came before.
    """

    protocol_version = "HTTP/1.1"
    ranks: list[int]

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        owner: Any = self.server
        owner.ranks.append(self.headers.get("X-data-parallel-rank"))
        is_sglang = self.path == "/generate"
        prompt = body["input_ids" if is_sglang else "prompt"]
        wanted = body["sampling_params"]["max_new_tokens"] if is_sglang else body["max_tokens"]
        if prompt == [666]:
            self.send_error(400, "no such prompt")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        made = [sum(prompt) + index for index in range(wanted)]
        try:
            for end in range(2, wanted + 1):
                if is_sglang:
                    self.send_all(made[:end])
                else:
                    self.send_event(made[:2] if end == 2 else [made[end - 1]])
                time.sleep(0.002)
                if prompt == [777]:
                    return
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            owner.aborted += 1

    def send_event(self, ids: list[int]) -> None:
        top = [{f"w{one}": -1.0, "w1": -1.5} for one in ids]
        said = dict(
            tokens=[f"w{one}" for one in ids], token_logprobs=[-1.0] * len(ids), top_logprobs=top
        )
        choice = dict(index=0, text="", logprobs=said)
        if self.server.has_ids:  # type: ignore[attr-defined]
            choice["token_ids"] = ids
        self.send_json(dict(choices=[choice]))

    def send_all(self, ids: list[int]) -> None:
        said = dict(
            output_token_logprobs=[[-1.0, one, None] for one in ids],
            output_top_logprobs=[[[-1.0, one, None], [-1.5, 1, None]] for one in ids],
        )
        self.send_json(dict(output_ids=ids, meta_info=said))

    def send_json(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


def server_at(port: int, has_ids: bool = True) -> Any:
    class Many(http.server.ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    server: Any = Many(("127.0.0.1", port), Completions)
    server.ranks, server.aborted, server.has_ids = [], 0, has_ids
    return server


@contextlib.contextmanager
def answering(has_ids: bool = True) -> Iterator[Any]:
    server = server_at(0, has_ids)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def hook_module() -> ModuleType:
    path = runs.IN_SERVER / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("servers_sitecustomize", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
