"""Both recipes end to end on one model of each kind: rotary positions, a restored grid, a library's dataclass."""

import pytest
import torch

import diffrate
from backbones import test_timm_eva, test_timm_metaformer
from diffrate.operator import Operator


def rotary():
    return test_timm_eva.build("vit_base_patch16_rope_224", num_classes=5)


def restored():
    return test_timm_metaformer.build()


def transformers_model():
    pytest.importorskip("transformers", reason="needs diffrate[hf]")
    from backbones import test_hf_vit

    return test_hf_vit.build("Dinov2ForImageClassification")


@pytest.mark.parametrize("recipe", ["fast", "paper"])
@pytest.mark.parametrize("build", [rotary, restored, transformers_model])
def test_search(build, recipe):
    model = build()
    layout = diffrate.compress(model).backbone.layout
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(3, *layout.img_size, generator=generator), i % 5) for i in range(20)]
    whole = diffrate.gmacs(model)
    share = 0.9 if layout.restores else 0.7  # most of a small CAFormer is not in its third stage
    operator = Operator(operation="merge") if layout.restores and recipe == "paper" else None
    found = diffrate.search(
        model, data, share * whole, recipe=recipe, operator=operator, steps=4, batch_size=8, progress=False
    )
    assert found.schedule.prefix == layout.prefix
    assert 0.95 * share * whole <= diffrate.gmacs(model, found.schedule) <= share * whole
    assert all(entry["loss"] == entry["loss"] for entry in found.history)
    with torch.no_grad():
        fast = diffrate.compress(model, found.schedule)
        assert diffrate.outputs.main_output(fast(torch.stack([data[0][0]]))).shape == (1, 5)
