"""`diffrate demo`: a model compressed before your eyes, without a download."""

from __future__ import annotations

import timm
import torch
import typer

import diffrate
from diffrate.cli import options as o
from diffrate.cli.output import save_json
from diffrate.results import check_target


def demo(json: o.JsonFile = None) -> None:
    """Compress a tiny vision transformer with random weights and show what it saves.

    Example: diffrate demo
    """
    check_target(json)
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, depth=6, embed_dim=64, num_heads=2, num_classes=10
    ).eval()
    schedule = diffrate.Schedule(prune=(65, 56, 46, 36, 26, 5), merge=(65, 50, 40, 30, 20, 5))
    fast = diffrate.compress(model, schedule)
    images = torch.randn(4, 3, 64, 64)
    with torch.inference_mode():
        logits = fast(images)
        same = torch.equal(diffrate.compress(model)(images), model(images))
    before, after = diffrate.gmacs(model), diffrate.gmacs(model, schedule)
    typer.echo("A vision transformer of 6 blocks and 65 tokens, random weights:")
    typer.echo(f"  tokens kept by each block   {' '.join(map(str, schedule.effective.merge))}")
    typer.echo(
        f"  MACs                        {before * 1e3:.1f} M -> {after * 1e3:.1f} M ({after / before:.0%})"
    )
    typer.echo(f"  logits                      {tuple(logits.shape)}, as from the whole model")
    typer.echo(
        f"  without a schedule          logits bit for bit those of the original: {'yes' if same else 'NO'}"
    )
    save_json(
        json, {"gmacs": {"uncompressed": before, "compressed": after}, "identical_without_schedule": same}
    )
