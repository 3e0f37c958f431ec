"""`diffrate demo`: the main job for real, without a download: search, compare, measure, and show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffrate.cli.output import running_command, show_table
from diffrate.contenders import Contender
from diffrate.demo import IMAGES
from diffrate.demo import demo as run_demo
from diffrate.embedded import SPLITS


def demo(
    output: Annotated[
        Path, typer.Option(help="Folder for the schedule, results.json, tokens.png and report.html.")
    ] = Path("demo-out"),
    images: Annotated[
        int, typer.Option(help=f"Test images to compare on, at most {SPLITS['test']:,}.")
    ] = IMAGES,
    seed: Annotated[int, typer.Option(help="Seed of the search.", min=0, max=2**31 - 1)] = 0,
) -> None:
    """Halve the cost of a small vision transformer, and see what that does to its accuracy and speed.

    The model and its Fashion-MNIST images ship with the package. The demo searches how many tokens each block may keep
    at half the MACs, on images kept for that, and compares it with two known methods at the same cost: ToMe (as many
    tokens merged in every block) and EViT (pruning in three steps, the rest fused). Each row says
    how accuracy and loss differ from the uncompressed model on the same test images, with the standard error of that
    difference, and how fast the model ran on this machine. Takes one to two minutes on two CPU cores.

    What comes next is your own model: diffrate search --help, diffrate eval --help.

    Example: diffrate demo --images 2000 --output demo-out
    """
    contenders = run_demo(output, images, seed, command=running_command(), say=typer.echo)
    typer.echo()
    show_table(
        ["", "top-1 %", "difference, points", "loss rise", "GMACs", "images/s", "speed-up"],
        [_cells(contender) for contender in contenders],
    )
    typer.echo(
        f"\n{images:,} test images; differences to the uncompressed model ± one standard error, paired."
    )
    typer.echo(
        f"Saved to {output}: schedule.json, results.json, tokens.png with what was merged and pruned, and report.html "
        "with all of it: open that in a browser."
    )


def _cells(contender: Contender) -> list[str]:
    e, c = contender.evaluation, contender.comparison
    differs = bool(contender.settings)
    return [
        contender.name,
        f"{e.top1:.1f}",
        f"{c.top1_difference:+.1f} ± {c.top1_standard_error:.1f}" if differs else "",
        f"{c.loss_difference:+.3f} ± {c.loss_standard_error:.3f}" if differs else "",
        f"{contender.gmacs:.3f}",
        f"{e.images_per_second:.0f}",
        f"{contender.speedup:.2f}x",
    ]
