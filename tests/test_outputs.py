"""The tensor that matters in what a model returns."""

from types import SimpleNamespace

import pytest
import torch

from diffrate.errors import DiffRateError
from diffrate.outputs import main_output

LOGITS = torch.arange(3.0)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS, torch.zeros(2)),
        SimpleNamespace(loss=torch.zeros(()), logits=LOGITS, pooler_output=torch.zeros(1)),
        SimpleNamespace(logits=None, image_embeds=LOGITS, last_hidden_state=torch.zeros(1)),
        SimpleNamespace(pooler_output=LOGITS, last_hidden_state=torch.zeros(1)),
    ],
)
def test_main_output(output):
    assert main_output(output) is LOGITS


def test_nothing_to_compare():
    with pytest.raises(DiffRateError, match="SimpleNamespace without logits"):
        main_output(SimpleNamespace(last_hidden_state=LOGITS))
