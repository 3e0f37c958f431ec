"""Long and large runs, with the memory they take: `make load`, or PYTHONPATH=tests python -m attack.load OUTPUT.json.

Every part runs in a process of its own, whose resident memory (with that of its workers) is read from /proc while it
works. "Flat" compares the second quarter of a run with its last one: what is set up once has been by then.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import save_file

import diffrate
from conftest import TINY_FLAGS, pixels, random_vit
from diffrate.results import write_results

ROOT = Path(__file__).parents[2]
CLASSES, DIFFERENT = 3, 300  # folders, and images of which all others are hard links
SCHEDULE = diffrate.Schedule((17, 14, 10, 6), (17, 12, 8, 4))

PASSES = """
import gc, json, os, sys
import torch, diffrate
from conftest import random_vit

def memory():
    gc.collect()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    pages = int(open("/proc/self/statm").read().split()[1])
    return {"mib": round(pages * os.sysconf("SC_PAGESIZE") / 2**20, 1), "tensors": tensors}

torch.set_num_threads(1)
passes = int(sys.argv[1])
model = random_vit(patch_size=8)
fast = diffrate.compress(model, diffrate.Schedule((17, 14, 10, 6), (17, 12, 8, 4)))
found = {}
with torch.inference_mode():
    for i in range(1, passes + 1):
        images = torch.randn(1 + i % 8, 3, 32, 32)
        fast(images, return_tokens=bool(i % 2))
        if i in (passes // 10, passes // 2, passes):
            found[str(i)] = memory()
print(json.dumps(found))
"""


def make_images(folder: Path, count: int) -> None:
    """`count` small JPEGs in class folders: a few hundred different ones, the others hard links to them."""
    originals = []
    for i in range(min(count, DIFFERENT)):
        path = folder / "originals" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(i, (36, 40))).save(path, quality=60)
        originals.append(path)
    for c in range(CLASSES):
        (folder / "val" / f"{c:03d}").mkdir(parents=True)
    for i in range(count):
        os.link(originals[i % len(originals)], folder / "val" / f"{i % CLASSES:03d}" / f"{i:07d}.jpg")


def resident(pid: int) -> int:
    """Bytes of a process and its children: proportional where pages are shared, so that none counts twice."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(child)) for child in (task / "children").read_text().split())
    except (OSError, ValueError):  # it has just ended
        pass
    return total


def watched(command: list[str], every: float = 0.5, longest: float = 3600) -> dict[str, Any]:
    """Run to the end, or kill what hangs; seconds, exit code, what it said, and its memory over time in MiB."""
    started, seen = time.monotonic(), []
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=given)
        while process.poll() is None:
            time.sleep(every)
            seen.append(resident(process.pid) / 2**20)
            if time.monotonic() - started > longest:
                process.kill()
        said.seek(0)
        text = said.read()
    return {
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - started, 1),
        "said": text,
        "memory": [mib for mib in seen if mib],
    }


def flatness(mib: list[float]) -> dict[str, Any]:
    """The medians of a run's second and last quarter, and its peak."""
    quarter = max(1, len(mib) // 4)
    early, late = mib[quarter : 2 * quarter] or mib, mib[-quarter:]
    second, last = statistics.median(early), statistics.median(late)
    return {
        "second_quarter_mib": round(second, 1),
        "last_quarter_mib": round(last, 1),
        "growth_mib": round(last - second, 1),
        "peak_mib": round(max(mib), 1),
    }


def command_over_images(
    folder: Path, count: int, arguments: list[str], descriptors: int = 1024
) -> dict[str, Any]:
    """`diffrate ARGUMENTS` on the tiny model and the generated images, with as many open files as Linux usually allows.

    Every tensor that a worker process sends takes one of them, until it is copied or thrown away.
    """
    weights = folder / "weights.safetensors"
    if not weights.exists():
        model = random_vit(patch_size=8, num_classes=CLASSES)
        save_file(model.state_dict(), weights)
        SCHEDULE.save(folder / "schedule.json")
    words = [
        "sh", "-c", 'ulimit -n "$0" && exec "$@"', str(descriptors),
        sys.executable, "-m", "diffrate", arguments[0], *TINY_FLAGS, "--checkpoint", str(weights),
        "--data-dir", str(folder), "--split", "val", "--device", "cpu", *arguments[1:],
    ]  # fmt: skip
    ran = watched(words, longest=300 + count / 20)
    if ran["exit_code"]:
        raise RuntimeError(ran["said"][-2000:])
    return {"images": count, "seconds": ran["seconds"], **flatness(ran["memory"])}


def evaluate(folder: Path, count: int, batch_size: int = 64, descriptors: int = 1024) -> dict[str, Any]:
    out = folder / "eval.json"
    found = command_over_images(
        folder, count,
        ["eval", "--batch-size", str(batch_size), "--workers", "1", "--schedule", str(folder / "schedule.json"),
         "--compare", "--json", str(out)],
        descriptors,
    )  # fmt: skip
    evaluated = json.loads(out.read_text())["results"]["compressed"]
    assert evaluated["images"] == count, evaluated
    return found


def search(folder: Path, count: int, steps: int, descriptors: int = 1024) -> dict[str, Any]:
    found = command_over_images(
        folder, count,
        ["search", "--budget", "60%", "--steps", str(steps), "--batch-size", "64", "--workers", "1",
         "--output", str(folder / "run")],
        descriptors,
    )  # fmt: skip
    assert diffrate.Schedule.load(folder / "run" / "schedule.json").tokens == SCHEDULE.tokens
    return {**found, "steps": steps}


def forward_passes(passes: int) -> dict[str, Any]:
    """Memory and live tensors after a tenth, a half and all of the passes."""
    ran = watched([sys.executable, "-c", PASSES, str(passes)])
    if ran["exit_code"]:
        raise RuntimeError(ran["said"][-2000:])
    return {"passes": passes, "seconds": ran["seconds"], "after": json.loads(ran["said"].splitlines()[-1])}


def serve(folder: Path, seconds: float, clients: int) -> dict[str, Any]:
    """The serving example under uvicorn, asked by `clients` at once: throughput over time, errors, and memory."""
    diffrate.save(diffrate.compress(random_vit(patch_size=8), SCHEDULE), folder / "saved")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        sys.executable,
        "-m",
        "uvicorn",
        "examples.serve:app",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    given = {
        **os.environ, "DIFFRATE_MODEL": str(folder / "saved"), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }  # fmt: skip
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen(words, cwd=ROOT, env=given, stdout=said, stderr=subprocess.STDOUT)
        try:
            _wait_for(port, server)
            answers, errors, memory = _ask(server.pid, port, seconds, clients)
        finally:
            server.terminate()
            server.wait(30)
        said.seek(0)
        log = said.read()
    windows = np.histogram([end for end, _ in answers], bins=12, range=(0, seconds))[0] / (seconds / 12)
    taken = np.array([took for _, took in answers])
    return {
        "seconds": seconds,
        "clients": clients,
        "answers": len(answers),
        "errors": len(errors),
        "first_errors": errors[:5],
        "server_said": log[-500:],
        "answers_per_second": [round(float(window), 1) for window in windows],
        "last_third_over_first_third": round(float(windows[8:].mean() / windows[:4].mean()), 3),
        "milliseconds": {
            name: round(1e3 * float(np.quantile(taken, q)), 1)
            for name, q in (("median", 0.5), ("99 %", 0.99), ("longest", 1.0))
        },
        **flatness(memory),
    }


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server did not start")


def _ask(
    pid: int, port: int, seconds: float, clients: int
) -> tuple[list[tuple[float, float]], list[str], list[float]]:
    """(when it ended, how long it took) of every answer, what went wrong, and the server's memory."""
    answers: list[tuple[float, float]] = []
    errors: list[str] = []
    started = time.monotonic()

    def client(number: int) -> None:
        body, kind = _form(pixels(number, (40, 40)))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while (begun := time.monotonic()) < started + seconds:
            try:
                connection.request("POST", "/predict", body, {"Content-Type": kind})
                response = connection.getresponse()
                content = response.read()
                if response.status != 200 or len(json.loads(content)["classes"]) != 5:
                    errors.append(f"{response.status}: {content[:100]!r}")
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                errors.append(repr(error))
                connection.close()
            now = time.monotonic()
            answers.append((now - started, now - begun))
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    memory = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        memory.append(resident(pid) / 2**20)
    return answers, errors, memory


def _form(image: np.ndarray) -> tuple[bytes, str]:
    """An upload of one JPEG as a browser sends it, and its content type."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG")
    head = b'--border\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'
    return head + buffer.getvalue() + b"\r\n--border--\r\n", "multipart/form-data; boundary=border"


def main() -> None:
    """Run what has a number above 0, and write the figures after each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=1000, help="of the search, 64 images each")
    parser.add_argument("--passes", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=120, help="of requests")
    parser.add_argument("--clients", type=int, default=8)
    asked = parser.parse_args()
    found: dict[str, Any] = {}

    def keep(part: str, figures: dict[str, Any]) -> None:
        found[part] = figures
        print(part, json.dumps(figures), flush=True)
        write_results(asked.output, shlex.join(["python", "-m", "attack.load", *sys.argv[1:]]), found)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.passes:
            keep("forward passes", forward_passes(asked.passes))
        if asked.seconds:
            keep("serving", serve(folder, asked.seconds, asked.clients))
        if asked.images:
            make_images(folder, asked.images)
            keep("search", search(folder, asked.images, asked.steps))
            keep("eval", evaluate(folder, asked.images))


if __name__ == "__main__":
    main()
