"""Ablations (a) and (b) as the paper has them: counts searched for each metric and each operation, by the fast recipe.

`sorting_metric.py` and `operation_order.py` keep the counts and change the operator, which is cheap and says what the
operator alone is worth. Here every operator has counts of its own: a search under it, and where it prunes and merges
the search learns how much of each. The recipe is the same for all, so that a row differs by the operator alone; the
last row of both is the same search. DeiT-B at 11.5 GMACs there.

Cost: seven searches at each of `--budgets`, the tightest first.

Measured here: results/reproduce_vit_tiny_ablations_searched_cpu.json, ViT-Ti at 0.655 GMACs: the loss rises by 0.258
where searches prune, by 0.102 where they merge, and by 0.097 and 0.099 where they do both, merging or pruning first; by
0.230 where tokens are ranked at random, and by 0.098 to 0.099 by the other metrics.
results/reproduce_embedded_ablations_searched_cpu.json, the embedded model: 0.071, 0.023, 0.027, 0.028; 0.019 at random.

    python reproduce/ablations_searched.py --budgets 52% --json results/reproduce_embedded_ablations_searched_cpu.json
    python reproduce/ablations_searched.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 0.655G \\
        --json results/reproduce_vit_tiny_ablations_searched_cpu.json
"""

from __future__ import annotations

import operation_order
import sorting_metric
from setting import Setting, Table, main

from diffrate.operator import Operator

PUBLISHED = Operator("class-attention")  # the last of either table
METRICS = {name: PUBLISHED.changed(importance=name) for name in sorting_metric.PAPER}
OPERATIONS = {name: PUBLISHED.changed(operation=name) for name in operation_order.PAPER}


def run(setting: Setting) -> None:
    metrics = Table(
        setting,
        "sorting_metric_searched",
        "Ablation, sorting metric, searched for each",
        sorting_metric.PAPER,
    )
    operations = Table(
        setting,
        "operation_order_searched",
        "Ablation, compression module, searched for each",
        operation_order.PAPER,
    )
    for budget in sorted(setting.budgets):
        for table, operators in ((operations, OPERATIONS), (metrics, METRICS)):
            for name, operator in operators.items():
                schedule, seconds = setting.search(budget, operator=operator)
                table.measure(name, schedule, budget=budget, search_seconds=seconds)


if __name__ == "__main__":
    main(__doc__, run)
