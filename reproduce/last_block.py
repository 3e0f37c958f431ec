"""Beyond the paper: Table 1 where no method pays for tokens that leave its last block in vain.

The head of a class-token model reads the class token alone, so that the MLP of the last block need run for no other
token. Searched and published schedules remove the others there. ToMe, EViT and the like carry them to the end, as in
their papers, and so do our own baselines: constant-rate, random and lower resolution. Table 1 charges them for what
they run: at 1.0 GMACs of ViT-Ti that is 3 to 4 %. Any of them could do without. So here they may spend that much
before, and cost the budget without it. Rows are paired with the search of Table 1 at its budget; ATS, whose tokens
differ from image to image, is left out.

Cost: a pass over the validation images for each of a dozen methods and the search at each budget; no search.

Measured here: results/reproduce_vit_tiny_last_block_cpu.json, ViT-Ti at 0.655 GMACs: the loss rises by 0.039 with the
search's schedule, by 0.196 by ToMe, by 0.475 by EViT and by 0.240 at lower resolution.
results/reproduce_embedded_last_block_cpu.json, the embedded model at 0.182: 0.002, 0.011, 0.079 and 0.046.

    python reproduce/last_block.py --searches results/reproduce_embedded_off_the_shelf_h200.json \\
        --json results/reproduce_embedded_last_block_cpu.json
    python reproduce/last_block.py --searches results/reproduce_vit_tiny_off_the_shelf_h200.json \\
        --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors --data-dir imagenet --crop-pct 1.0 \\
        --budgets 1.0G,0.81G,0.655G --json results/reproduce_vit_tiny_last_block_cpu.json
"""

from __future__ import annotations

from pathlib import Path

import setting as shared
from off_the_shelf import to_search, twins
from setting import Setting, Table
from torch import nn

import diffrate
from diffrate.backbones import backbone_of
from diffrate.costs.macs import MacCost
from diffrate.errors import DiffRateError
from diffrate.methods import METHODS, build, cost_of
from diffrate.methods.resolution import LowerResolution

PAPER = "nothing of the kind"
TITLE = "Table 1, no method charged for what leaves its last block in vain"
RIVALS = tuple(m.name for m in METHODS.values() if m.name not in ("search", "ats") and not m.trained)
ROUNDS = 4  # of finding what a method spends in vain where it may spend as much more


def run(setting: Setting, searches: Path) -> None:
    if not backbone_of(setting.model).layout.compresses_last_block:
        raise DiffRateError("the head of this model reads every token")
    rows = shared.rows_in(searches, "tables", "off_the_shelf")
    schedules = {budget: shared.searched_at(searches, rows, budget) for budget in setting.budgets}
    table = Table(setting, "last_block", TITLE, PAPER)
    for budget, schedule in schedules.items():
        searched = table.measure("search", schedule, budget=budget)
        for rival in RIVALS:
            try:
                made, vain = at(rival, setting.model, budget)
            except DiffRateError as error:
                table.add(rival, budget=budget, left_out=str(error))
                continue
            for name, model in twins(rival, made, schedule):
                result = table.measure(name, model, cost_of(model) - vain, budget=budget, in_vain=vain)
                table.rows[-1]["to_search"] = to_search(result, searched)
                shared.save(setting)


def at(name: str, model: nn.Module, budget: float) -> tuple[nn.Module, float]:
    """A method that costs the budget without what its last block spends in vain, and that in GMACs."""
    vain = 0.0
    for _ in range(ROUNDS):
        vain = in_vain(build(name, model, budget + vain))
    return build(name, model, budget + vain), vain


def in_vain(model: nn.Module) -> float:
    """GMACs of the last block's MLP for all but the prefix."""
    if isinstance(model, LowerResolution):
        return model.share * in_vain(model.larger) + (1 - model.share) * in_vain(model.smaller)
    compressed = isinstance(model, diffrate.CompressedModel)
    backbone = model.backbone if compressed else backbone_of(model)
    layout, cost = backbone.layout, MacCost.of_backbone(backbone)
    kept = model.kept if compressed else (layout.tokens,) * layout.depth
    attended = model.attended if compressed else None
    return float(cost.gmacs(kept, attended) - cost.gmacs((*kept[:-1], layout.prefix), attended))


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument(
        "--searches",
        type=Path,
        required=True,
        help="what off_the_shelf.py wrote for this model and these budgets",
    )
    arguments = flags.parse_args()
    with shared.ended_in_a_sentence():
        run(shared.setting(arguments), arguments.searches)


if __name__ == "__main__":
    main()
