"""The list of supported models: every row is true, the documentation has it, and the command shows it."""

import json
from pathlib import Path

import pytest
import timm
import torch

from conftest import check_refused
from diffrate.backbones import backbone_of
from diffrate.cli.models import COLUMNS, markdown_table
from diffrate.models import load_model
from diffrate.supported import compressible, families

DOCS = Path(__file__).parent.parent / "docs" / "models.md"


@pytest.mark.slow
@pytest.mark.parametrize("row", families(), ids=lambda row: row.example)
def test_every_example_is_of_its_library(row):
    if row.install != "diffrate":
        pytest.importorskip(row.library, reason=f"needs {row.install}")
    with torch.device("cpu" if row.library == "open_clip" else "meta"):  # OpenCLIP moves what it builds
        backbone = backbone_of(load_model(row.example))
    assert backbone.library == row.library
    assert backbone.compresses == row.compresses


def test_the_documentation_has_the_table():
    """`diffrate models --markdown` wrote it."""
    rows = [(f.library, f.install, f.family, f.example, f.compresses) for f in families()]
    assert markdown_table(rows) in DOCS.read_text(encoding="utf-8")


def test_what_would_be_compressed():
    model = timm.create_model("deit_tiny_patch16_224")
    found = compressible(model, "deit_tiny_patch16_224")
    assert (found.depth, found.tokens, found.prefix, found.blocks) == (12, 197, 1, (2, 12))
    assert found.importance == "class-attention"
    assert (found.published, found.borrowed_from) == ([0.6, 0.7, 0.8, 0.9, 1.0], None)
    borrowed = compressible(timm.create_model("vit_tiny_patch16_224"), "vit_tiny_patch16_224")
    assert (borrowed.published, borrowed.borrowed_from) == (found.published, "ViT-T-DeiT")
    other = compressible(timm.create_model("vit_tiny_patch16_224", depth=6), "vit_tiny_patch16_224")
    assert (other.published, other.borrowed_from) == ([], None)
    assert found.gmacs == pytest.approx(1.26, abs=0.01)  # the paper: 1.3
    # Two tokens from the second block on, one after the last: what the first block costs, and little else.
    width, first = 192, 197
    block = first * 4 * width**2 + 2 * first**2 * width + first * 8 * width**2
    second = first * 4 * width**2 + 2 * first**2 * width + 2 * 8 * width**2
    later = 9 * (2 * 12 * width**2 + 2 * 4 * width) + 2 * 4 * width**2 + 2 * 4 * width + 8 * width**2
    ends = 196 * 768 * width + width * 1000
    assert found.least_gmacs == pytest.approx((block + second + later + ends) / 1e9, rel=1e-6)


def test_command(diffrate_cli, tmp_path):
    listed = diffrate_cli("models")
    assert listed.code == 0
    for column in COLUMNS:
        assert column in listed.out
    assert "diffrate[hf]" in listed.out
    assert diffrate_cli("models", "--markdown").out.startswith("| library |")
    path = tmp_path / "one.json"
    one = diffrate_cli("models", "--model", "vit_tiny_patch16_224", "--json", path)
    assert "blocks 2 to 12 of 12" in one.out
    assert "0.6, 0.7, 0.8, 0.9, 1 (of ViT-T-DeiT, a model of the same shape)" in one.out
    assert json.loads(path.read_text())["results"]["tokens"] == 197
    check_refused(diffrate_cli("models", "--model", "swin_tiny_patch4_window7_224"), "swin_tiny.*windows")
    check_refused(diffrate_cli("models", "--model", "no_such_model"), "timm knows no model")
