"""Beyond the paper: how right the whole model's probabilities are, which says what a divergence from them is worth.

Schedules are ranked by the divergence from the whole model's answers as well as by the loss. Where its probabilities
are right, the divergence is the rise of the loss that is to be expected over all labels that the images might have had.
Two checks on the validation images: the loss that the model expects of itself, which is the mean entropy of its
answers, beside the one that it has; and the temperature by which its answers would have to be softened for the least
loss, which is 1 where they are right. Below, tenths of the images from the least sure on: the probability that the
model gives its first class, and how often that class is right.

Cost: one pass over the validation images; no search.

Measured here: results/reproduce_vit_tiny_calibration_cpu.json, ViT-Ti expects a loss of 0.913 of itself and has 0.933
± 0.032, the best temperature is 1.01. results/reproduce_embedded_calibration_cpu.json, the embedded model: 0.629, 0.314
and 0.75: it was trained with smoothed labels, and is right more often than it is sure.

    python reproduce/calibration.py --json results/reproduce_embedded_calibration_cpu.json
    python reproduce/calibration.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --json results/reproduce_vit_tiny_calibration_cpu.json
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from setting import Setting, Table, main
from torch import Tensor

from diffrate.outputs import main_output

PAPER = "nothing of the kind"
TITLE = "How right the whole model's probabilities are"
TEMPERATURES = tuple(t / 100 for t in range(50, 201))
ROWS = ("as they are", "at the best temperature")
PARTS = 10


@torch.no_grad()
def run(setting: Setting) -> None:
    table = Table(setting, "calibration", TITLE, PAPER)
    answers = torch.cat([main_output(setting.model(images)).double().cpu() for images, _ in setting.val])
    labels = torch.cat([labels.cpu() for _, labels in setting.val])
    best = min(TEMPERATURES, key=lambda t: float(F.cross_entropy(answers / t, labels)))
    for name, temperature in zip(ROWS, (1.0, best), strict=True):
        table.add(name, temperature=temperature, **expected_and_had(answers / temperature, labels))
    sure, first = answers.softmax(dim=-1).max(dim=-1)
    order = sure.argsort(stable=True)
    for i, some in enumerate(order.tensor_split(PARTS), 1):
        right = (first[some] == labels[some]).double()
        table.add(f"tenth {i}", probability=float(sure[some].mean()), right=float(right.mean()))


def expected_and_had(answers: Tensor, labels: Tensor) -> dict[str, float]:
    """The loss that answers (B, classes) expect of themselves, the one they have, and the error of the difference."""
    logs = answers.log_softmax(dim=-1)
    expected = -(logs.exp() * logs).sum(dim=-1)
    had = F.nll_loss(logs, labels, reduction="none")
    error = (had - expected).std() / len(labels) ** 0.5
    return {
        "expected_loss": float(expected.mean()),
        "loss": float(had.mean()),
        "standard_error": float(error),
    }


if __name__ == "__main__":
    main(__doc__, run)
