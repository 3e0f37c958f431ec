"""Beyond the paper: what searches in milliseconds, under two operators, and the paper's schedules have at equal time.

Merging by cost takes time that pruning does not, and every removal takes some; MACs know neither. So each schedule of a
search in MACs (`--schedule`) is timed, and for that time there are: a search in milliseconds with the default operator,
one under the paper's with weighted means that keep their norm ("by rank"), and the paper's schedules under the paper's
own, moved to the MACs at which a measured table says that they take as long. All are timed in turns in one run, in half
precision, on a GPU as CUDA graphs, and evaluated on the same images. `--speeds` adds targets that no schedule has, as
multiples of the uncompressed model's speed.

Parts of it can run by themselves: tables and what searches found are kept in `--folder` and read from there. On a GPU:
`--until tables` alone; `--until searches --only NAME` for each side by side; the rest alone again.

Cost: three profiles (84 s on an H200, with the reading of images), a search for each operator and target (35 to 93 s
beside much else), and four passes over the validation images for each target.

Measured here: results/reproduce_vit_tiny_equal_time_h200.json: asked for 8.91 ms of the 20.16 that ViT-Ti takes, a
search in milliseconds takes 9.04 and loses 0.028, the paper's schedule 8.89 and 0.080; asked for 8.02, they take 8.05
and 8.01 and lose 0.057 and 0.173. Asked for 12.41, what the search in MACs for 1.0 G took, the search removes nothing
but what the last block computes in vain: with the kernels that compressed models have, the whole one takes 13.13.

    python reproduce/equal_time.py --schedule runs/macs_*.json --speeds 2.25 --folder runs/equal_time \\
        --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors --data-dir imagenet --crop-pct 1.0 \\
        --json results/reproduce_vit_tiny_equal_time_h200.json
"""

from __future__ import annotations

import copy
import json
from collections.abc import Container, Sequence
from pathlib import Path

import setting as shared
import torch
from off_the_shelf import to_search
from setting import Setting, Table
from torch import Tensor, nn

import diffrate
from diffrate.backbones import backbone_of
from diffrate.compressed import with_kernels
from diffrate.costs import LatencyTable, TableCost
from diffrate.devices import device_name
from diffrate.errors import DiffRateError
from diffrate.evaluate import Evaluation
from diffrate.methods.schedules import published_schedule
from diffrate.operator import Operator
from diffrate.profiling import dtype_name, profile, time_models
from diffrate.schedule import write_text
from diffrate.searching import fast

PAPER = "nothing of the kind"
TITLE = "Searches in milliseconds, and the paper's schedules, at equal time"
IN_MS, IN_MACS, AS_FAST = "search in ms", "search in MACs", "the paper's, as fast"
ROWS = (IN_MS, f"{IN_MS}, by rank", IN_MACS, AS_FAST)
DEFAULT = "cost"
OPERATORS = {
    DEFAULT: fast.OPERATOR,
    "rank": Operator(mean="attention", keep_norm=True),
    "paper": Operator(),
}
SEARCHED = {DEFAULT: ROWS[0], "rank": ROWS[1]}
LEAST, CLOSE = 0.2, 1e-4  # shares of the whole model's MACs
STAGES = ("tables", "searches", "rows")


class Timed:
    """The model as it is timed, in half precision on a GPU, and a batch of images for it."""

    def __init__(self, setting: Setting, batch_size: int) -> None:
        gpu = setting.device.type == "cuda"
        self.model = copy.deepcopy(setting.model).to(torch.float16 if gpu else torch.float32)
        self.mode = "graph" if gpu else "eager"
        layout, weight = backbone_of(self.model).layout, next(self.model.parameters())
        self.images: Tensor = torch.randn(
            batch_size, layout.in_chans, *layout.img_size, device=weight.device, dtype=weight.dtype
        )

    def table(self, operator: Operator, file: Path) -> LatencyTable:
        """The times of parts under an operator, measured if the file is not there."""
        device = self.images.device
        if file.is_file():
            known = LatencyTable.load(file)
            layout, dtype = backbone_of(self.model).layout, dtype_name(self.images.dtype)
            known.check(layout, None, device_name(device), len(self.images), dtype, self.mode, operator)
            return known
        made = profile(self.model, len(self.images), device=device, operator=operator, mode=self.mode)
        made.save(file)
        return made

    def ms(self, schedules: Sequence[diffrate.Schedule]) -> list[float]:
        """Of the uncompressed model, of the same with the kernels that compressed ones have, and of these."""
        models = [diffrate.compress(self.model, schedule) for schedule in schedules]
        return time_models([self.model, with_kernels(self.model), *models], self.images, 30, self.mode)


def run(
    setting: Setting,
    given: Sequence[diffrate.Schedule],
    speeds: Sequence[float],
    batch_size: int,
    folder: Path,
    until: str = STAGES[-1],
    only: Container[str] = SEARCHED,
) -> None:
    """All of it, or the stages `until` one; `only` some of the searches.

    given   what searches in MACs found, whose times are targets.
    speeds  further ones.
    folder  for tables, targets and searches, which are not made anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    timed = Timed(setting, batch_size)
    tables = {
        name: timed.table(operator, folder / f"table_{name}.json") for name, operator in OPERATORS.items()
    }
    targets = targets_of(timed, given, speeds, folder / "targets.json")
    if until == "tables":
        return
    found = {
        name: searched(setting, name, tables[name], targets, folder) for name in SEARCHED if name in only
    }
    if until == "searches":
        return
    rows: list[tuple[str, float, diffrate.Schedule]] = []
    for i, target in enumerate(targets):
        rows += [(SEARCHED[name], target, each[i]) for name, each in found.items()]
        rows += [(IN_MACS, target, each) for each in given[i : i + 1]]
        rows.append((AS_FAST, target, as_fast(setting.model, tables["paper"], target)))
    whole, lean, *times = timed.ms([schedule for _, _, schedule in rows])
    table = Table(setting, "equal_time", TITLE, PAPER)
    table.add("uncompressed", ms=whole, ms_with_kernels=lean, batch_size=batch_size, mode=timed.mode)
    for name, each in tables.items():
        table.add(f"table, {name}", **errors(each))
    first: dict[float, Evaluation] = {}
    for (name, target, schedule), ms in zip(rows, times, strict=True):
        result = table.measure(name, schedule, target_ms=target, ms=ms, speed=whole / ms)
        if target in first:
            table.rows[-1]["to_search"] = to_search(result, first[target])
        first.setdefault(target, result)
        shared.save(setting)


def targets_of(
    timed: Timed, given: Sequence[diffrate.Schedule], speeds: Sequence[float], file: Path
) -> list[float]:
    """Milliseconds of a batch: of the schedules, and of the speeds."""
    wanted = {"kept": [list(each.effective.merge) for each in given], "speeds": list(speeds)}
    if not file.is_file():
        whole, _, *times = timed.ms(given)
        ms = [round(each, 4) for each in (*times, *(whole / speed for speed in speeds))]
        write_text(file, json.dumps({**wanted, "ms": ms}) + "\n")
    found = json.loads(file.read_text(encoding="utf-8"))
    targets: list[float] = found.pop("ms")
    if found != wanted:
        raise DiffRateError(f"{file} has the times of other schedules or speeds: take another --folder")
    return targets


def searched(
    setting: Setting, name: str, table: LatencyTable, targets: Sequence[float], folder: Path
) -> list[diffrate.Schedule]:
    """What searches in milliseconds find for the targets, each by itself."""
    found = []
    for target in targets:
        file = folder / f"searched_{name}_{target}.json"
        if not file.is_file():
            setting.check_time()
            operator = None if name == DEFAULT else OPERATORS[name]
            result = diffrate.search(
                setting.model, setting.search_data, f"{target}ms", costs=[TableCost(table)], operator=operator,
                steps=setting.steps, batch_size=setting.search_batch, workers=setting.workers,
                accelerator=setting.accelerator, progress=False,
            )  # fmt: skip
            result.schedule.save(file)
            print(f"{name}, {target} ms: {result.seconds:.0f} s, {list(result.schedule.merge)}", flush=True)
        found.append(diffrate.Schedule.load(file))
    return found


def as_fast(model: nn.Module, table: LatencyTable, target: float) -> diffrate.Schedule:
    """The paper's schedule for a model of this shape with the most MACs that the table says take no longer."""
    cost, whole = TableCost(table), diffrate.gmacs(model)

    def at(share: float) -> diffrate.Schedule:
        return published_schedule(model, share * whole)

    low, high = LEAST, 1.0
    if cost.price_of(at(low))["latency_ms"] > target:
        raise DiffRateError(f"the paper's schedules do not reach {target:g} ms here")
    while high - low > CLOSE:
        middle = (low + high) / 2
        low, high = (low, middle) if cost.price_of(at(middle))["latency_ms"] > target else (middle, high)
    return at(low)


def errors(table: LatencyTable) -> dict[str, float]:
    """By how much a table is off, in percent of the measured times of the schedules that it was checked on."""
    off = [100 * abs(check["predicted_ms"] / check["measured_ms"] - 1) for check in table.checks]
    return {"off_by_percent": sum(off) / len(off), "at_most_percent": max(off)}


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument("--schedule", type=Path, nargs="*", default=[], help="files of searches in MACs")
    flags.add_argument("--speeds", default="", help="further targets: multiples of the uncompressed speed")
    flags.add_argument("--batch-size", type=int, default=1000, help="images that are timed at once")
    flags.add_argument("--folder", type=Path, required=True, help="keeps tables, targets and searches")
    flags.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage to run")
    flags.add_argument("--only", nargs="+", choices=SEARCHED, default=list(SEARCHED), help="searches to run")
    arguments = flags.parse_args()
    with shared.ended_in_a_sentence():
        given = [diffrate.Schedule.load(file) for file in arguments.schedule]
        speeds = [float(speed) for speed in arguments.speeds.split(",") if speed]
        setting = shared.setting(arguments)
        run(setting, given, speeds, arguments.batch_size, arguments.folder, arguments.until, arguments.only)


if __name__ == "__main__":
    main()
