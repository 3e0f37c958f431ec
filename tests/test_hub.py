"""Compressed models on the hub, against a local server that speaks as much of its protocol as that takes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import diffrate

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Repositories as dictionaries of files, in server.repositories."""

    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self.path == "/api/repos/create":
            name = json.loads(body)["name"]
            self.server.repositories.setdefault(f"somebody/{name.split('/')[-1]}", {})
            self.answer({"url": f"{self.server.url}/somebody/{name.split('/')[-1]}"})
        elif self.path.endswith("/preupload/main"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.answer(
                {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]}
            )
        elif "/commit/main" in self.path:
            repository = self.path.split("/api/models/")[1].split("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.server.repositories[repository][value["path"]] = base64.b64decode(value["content"])
            url = f"{self.server.url}/{repository}/commit/{COMMIT}"
            self.answer({"commitUrl": url, "commitOid": COMMIT, "hookOutput": ""})
        else:
            self.answer({}, 200 if self.path == "/api/validate-yaml" else 404)

    def do_GET(self, head: bool = False) -> None:
        if "/resolve/" in self.path:
            repository, _, rest = self.path[1:].partition("/resolve/")
            content = self.server.repositories.get(repository, {}).get(rest.split("/", 1)[1])
            if content is None:
                self.answer({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            self.send_response(200)
            self.send_header("ETag", f'"{abs(hash(content))}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not head:
                self.wfile.write(content)
            return
        repository = self.path.partition("/api/models/")[2].split("/revision/")[0].split("/tree/")[0]
        if repository not in self.server.repositories:
            self.answer({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return
        files = self.server.repositories[repository]
        if "/tree/" in self.path:
            entries = [{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in files.items()]
            self.answer(entries)
            return
        self.answer(
            {
                "id": repository,
                "modelId": repository,
                "sha": COMMIT,
                "siblings": [{"rfilename": p} for p in files],
            }
        )

    def do_HEAD(self) -> None:
        self.do_GET(head=True)

    def answer(self, values: Any, code: int = 200, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(values).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        self.server.seen.append((self.command, self.path))


@pytest.fixture
def hub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repositories, server.seen = {}, []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


SCRIPT = """
import torch
import diffrate
from conftest import random_vit

fast = diffrate.compress(random_vit(), diffrate.Schedule((65, 60, 40, 9), (65, 50, 40, 5)))
fast.push_to_hub("somebody/small", token="hf_x")
again = diffrate.CompressedModel.from_pretrained("somebody/small")
images = torch.randn(3, 3, 32, 32)
assert torch.equal(again(images), fast(images)), "other numbers"
assert again.schedule.merge == (65, 50, 40, 5), again.schedule
try:
    diffrate.CompressedModel.from_pretrained("somebody/nothing")
except diffrate.DiffRateError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_there_and_back(hub: Any, tmp_path: Path) -> None:
    """In a process of its own, because huggingface_hub reads its address when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr + str(hub.seen)
    assert "refused: cannot load somebody/nothing" in done.stdout
    files = hub.repositories["somebody/small"]
    assert {"config.json", "model.safetensors", "README.md"} <= files.keys()
    assert b"library_name: diffrate" in files["README.md"]
    assert json.loads(files["config.json"])["format"] == "diffrate.model"


def test_a_folder_through_the_mixin(tmp_path: Path, tiny_vit: Any) -> None:
    fast = diffrate.compress(tiny_vit, diffrate.Schedule((17, 14, 10, 3), (17, 12, 8, 3)))
    fast.save_pretrained(tmp_path)
    again = diffrate.CompressedModel.from_pretrained(tmp_path)
    assert again.schedule.merge == (17, 12, 8, 3)
    for text in ("{", "[]", '{"format": "x"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(diffrate.DiffRateError, match=r"cannot load|config\.json"):
            diffrate.CompressedModel.from_pretrained(tmp_path)
