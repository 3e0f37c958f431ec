"""All attacks in full: `make attack`, or PYTHONPATH=tests python -m attack OUTPUT.json [--files N] […].

Parts that are not asked for stay in the file as they were; each says with which commit it ran.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from attack import disk, files, flags, images, interruptions, kill
from conftest import random_vit
from diffrate.results import commit, write_results


def known(file: Path) -> dict[str, Any]:
    """The parts in a file that an earlier attack has written."""
    if not file.exists():
        return {}
    record = json.loads(file.read_text())
    return {part: {"commit": record["commit"], **counts} for part, counts in record["results"].items()}


def main() -> None:
    """Run what has a number above 0, and write the counts after each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--files", type=int, default=150, help="of each kind")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--kills", type=int, default=25, help="of each job, on one process and on two")
    parser.add_argument("--jobs", nargs="*", default=list(kill.JOBS), help="to be killed")
    parser.add_argument("--interruptions", type=int, default=10, help="of each command by Ctrl-C")
    parser.add_argument(
        "--values", type=int, default=8, help="for each flag; 0 leaves out what attacks commands"
    )
    parser.add_argument("--every", type=int, default=1, help="of the flags' attacks only every so many")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    command = shlex.join(["python", "-m", "attack", *sys.argv[1:]])

    def keep(part: str, counts: dict[str, Any]) -> None:
        found = known(asked.output)
        found[part] = {**counts, "seconds": round(time.monotonic() - started, 1), "commit": commit()}
        print(part, json.dumps(found[part]), flush=True)
        write_results(asked.output, command, found)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.monotonic()
        if asked.images:
            keep(
                "images, by two readers",
                images.attack(folder / "images", random_vit(), asked.images).to_dict(),
            )
        if asked.files:
            targets = files.Targets(folder / "files")
            for kind in targets.uses:
                started = time.monotonic()
                keep(f"files: {kind}", targets.attack(kind, asked.files).to_dict())
        for job in asked.jobs if asked.kills else ():
            for processes in (1, 2):
                started = time.monotonic()
                found_here = kill.attack(job, folder / f"{job} {processes}", asked.kills, processes)
                keep(f"kills: {job}, {processes} process{'es' * (processes > 1)}", found_here)
        if asked.values:
            inputs = flags.ready(folder / "inputs")
            gc.collect()
            gc.freeze()  # a collection would copy all that is there in every process that is forked
            started = time.monotonic()
            keep("dead workers", interruptions.dead_workers(inputs, folder).to_dict())
            started = time.monotonic()
            keep("Ctrl-C", interruptions.ctrl_c(inputs, folder, asked.interruptions).to_dict())
            started = time.monotonic()
            keep("read-only folders", disk.read_only(inputs, folder).to_dict())
            if disk.can_mount():
                started = time.monotonic()
                keep("full disks", disk.full(inputs, folder).to_dict())
            started = time.monotonic()
            keep("flags", flags.attack(inputs, folder, asked.values, every=asked.every).to_dict())


if __name__ == "__main__":
    main()
