"""The paper's appendix tables whose models and images are not here, to hold a run against; page.py shows them.

Top-1 on ImageNet-1k, off the shelf and after 30 epochs of tuning. The paper is not of one mind: its Tables 1 and 2 have
78.76 for DeiT-S at 2.3 GMACs, and after tuning 81.71 for DeiT-B at 11.5, 83.25 for ViT-B (MAE) at 11.5 and 85.71 for
ViT-L (MAE) at 42.3. Nothing runs here: `off_the_shelf.py` and `diffrate finetune` are the commands.

Measured here: not run, for want of ImageNet and the checkpoints.
"""

from __future__ import annotations

# Of a model: GMACs and top-1 uncompressed; then GMACs, top-1 off the shelf and tuned.
Row = tuple[float, float, float | None]
ALL_BUDGETS: dict[str, tuple[tuple[float, float], tuple[Row, ...]]] = {
    "DeiT-T": (
        (1.3, 72.13),
        ((0.6, 70.36, 71.11), (0.7, 71.16, 71.70), (0.8, 71.74, 72.18), (0.9, 71.91, 72.39), (1.0, 72.12, 72.46)),
    ),
    "DeiT-S": (
        (4.6, 79.82),
        ((2.3, 78.74, 79.39), (2.5, 79.09, 79.61), (2.7, 79.40, 79.64), (2.9, 79.58, 79.83), (3.1, 79.71, 79.90)),
    ),
    "DeiT-B": (
        (17.6, 81.82),
        ((8.7, 78.98, 80.61), (10.0, 80.63, 81.17), (10.4, 80.97, 81.30), (11.5, 81.50, 81.59), (12.5, 81.75, 81.80)),
    ),
    "ViT-B (MAE)": (
        (17.6, 83.72),
        ((8.7, 79.96, 81.89), (10.0, 81.87, 82.65), (10.4, 82.07, 82.83), (11.5, 82.91, 83.19)),
    ),
    "ViT-L (MAE)": (
        (61.6, 85.95),
        ((31.0, 84.65, 85.31), (34.7, 85.19, 85.45), (38.5, 85.45, 85.61), (42.3, 85.56, 85.63), (46.1, 85.76, 85.84)),
    ),
    "ViT-H (MAE)": (
        (167.4, 86.88),
        ((83.7, 86.15, None), (93.2, 86.40, None), (103.4, 86.72, None), (124.5, 86.77, None)),
    ),
    "CAFormer-S36": ((8.0, 84.45), ((5.2, 83.49, 84.03), (5.6, 83.92, 84.21), (6.0, 84.21, 84.32))),
}  # fmt: skip
FROM_SCRATCH = {"DeiT-S": (4.6, 79.82), "DiffRate": ((2.3, 79.41), (2.9, 79.76))}  # GMACs and top-1
SEGMENTATION = {
    "CAFormer-S36": (77.2, 41.05, 51.50),
    "with DiffRate": (54.5, 40.88, 51.32),
}  # GMACs, mIoU, mAcc
