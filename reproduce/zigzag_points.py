"""Price matrix products of DeiT-S on Gemmini designs with zigzag-dse, as a check on this package's own model.

Cost: about six minutes on one core (zigzag-dse searches the best mapping of every product). tests/costs/test_zigzag.py
compares the points with diffrate's model, and prices some of them anew.

Measured here: tests/costs/zigzag_points.json, the first of 72: 197 x 384 x 1152 in 349,274 cycles.

    python reproduce/zigzag_points.py tests/costs/zigzag_points.json
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from zigzag.api import get_hardware_performance_zigzag

from diffrate.costs.gemmini.design import Design
from diffrate.costs.gemmini.matmul import Energies

# Gemmini's own design, a smaller one, and two larger ones with the memory and the bus to go with it.
DESIGNS = (
    Design(),
    Design(mesh_rows=8, mesh_columns=8, bus_bits=64),
    Design(mesh_rows=32, mesh_columns=32, bus_bits=256, scratchpad_kb=512, accumulator_kb=256),
    Design(2, 2, 32, 32, bus_bits=512, scratchpad_kb=1024, accumulator_kb=1024),
)
COUNTS = (197, 128, 64)


def shapes(n: int) -> list[tuple[int, int, int]]:
    """I x K x J of the products of a DeiT-S block with n tokens."""
    return [(n, 384, 1152), (n, 64, n), (n, n, 64), (n, 384, 384), (n, 384, 1536), (n, 1536, 384)]


def zigzag(shape: tuple[int, int, int], design: Design, energies: Energies) -> tuple[float, float]:
    """Cycles and picojoules of a product, with the mapping that zigzag-dse finds fastest."""
    i, k, j = shape
    side = design.rows
    product: dict[str, Any] = {
        "id": 0, "name": "product", "operator_type": "Gemm", "equation": "O[i][j]+=I[i][k]*W[k][j]",
        "loop_dims": ["I", "J", "K"], "loop_sizes": [i, j, k],
        "operand_precision": {"W": 8, "I": 8, "O": 32, "O_final": 8}, "operand_source": {},
    }  # fmt: skip
    mapping = {
        "name": "default",
        "spatial_mapping": {"D1": [f"K, {side}"], "D2": [f"J, {side}"]},
        "memory_operand_links": {"O": "O", "W": "I2", "I": "I1"},
    }
    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for name, content in (("w", [product]), ("a", accelerator(design, energies)), ("m", [mapping])):
                files.append(f"{folder}/{name}.yaml")
                Path(files[-1]).write_text(yaml.safe_dump(content, sort_keys=False))
            pj, cycles, _ = get_hardware_performance_zigzag(
                *files, opt="latency", dump_folder=f"{folder}/out", lpf_limit=6, loma_show_progress_bar=False
            )
    finally:
        logging.disable(logging.NOTSET)
    return float(cycles), float(pj)


def accelerator(design: Design, energies: Energies) -> dict[str, Any]:
    """Gemmini for zigzag-dse: two weights in each unit, half of each memory (the other half is being filled), a bus.

    zigzag-dse counts energy per access of a memory's whole width.
    """
    side, bus = design.rows, design.bus_bits

    def memory(
        bits: int,
        operands: str,
        ports: list[tuple[str, int, str]],
        read: float,
        write: float,
        each: bool = False,
    ) -> dict[str, Any]:
        numbers: dict[str, int] = {}
        described = []
        for kind, width, allocation in ports:
            numbers[kind] = numbers.get(kind, 0) + 1
            name = f"{'r' if kind == 'read' else 'w'}_port_{numbers[kind]}"
            described.append(
                {
                    "name": name,
                    "type": kind,
                    "bandwidth_min": 8,
                    "bandwidth_max": width,
                    "allocation": allocation.split("; "),
                }
            )
        return {
            "size": bits, "r_cost": read, "w_cost": write, "area": 0, "latency": 1, "operands": operands.split(),
            "ports": described, "served_dimensions": [] if each else ["D1", "D2"],
        }  # fmt: skip

    scratchpad = energies.scratchpad_byte * (design.scratchpad_kb / 256) ** 0.52
    word = energies.accumulator_kb * design.accumulator_kb / side + energies.accumulator_word
    half_scratchpad, half_accumulator = design.scratchpad_kb * 4096, design.accumulator_kb * 4096
    dram = energies.dram_byte * bus / 8
    return {
        "name": "gemmini",
        "memories": {
            "weights": {
                **memory(16, "I2", [("read", 8, "I2, tl"), ("write", 8, "I2, fh")], 0, 0, each=True),
                "force_double_buffering": True,
            },
            "accumulator": memory(
                half_accumulator, "O",
                [("read", 32 * side, "O, tl; O, th"), ("write", 32 * side, "O, fh; O, fl")], word * side, word * side,
            ),
            "scratchpad": memory(
                half_scratchpad, "I1 I2",
                [("read", 8 * side, "I1, tl"), ("read", 8 * side, "I2, tl"), ("write", bus, "I1, fh; I2, fh")],
                scratchpad * side, scratchpad * bus / 8,
            ),
            "dram": memory(
                10**12, "I1 I2 O",
                [("read", bus, "I1, tl; I2, tl; O, tl; O, th"), ("write", bus, "I1, fh; I2, fh; O, fh; O, fl")],
                dram, dram,
            ),
        },
        "operational_array": {
            "input_precision": [8, 8], "unit_energy": energies.mac, "unit_area": 0,
            "dimensions": ["D1", "D2"], "sizes": [side, side],
        },
    }  # fmt: skip


def main(path: str) -> None:
    points = []
    energies = Energies(dram_byte=100.0)
    for design in DESIGNS:
        for n in COUNTS:
            for shape in shapes(n):
                started = time.perf_counter()
                cycles, pj = zigzag(shape, design, energies)
                seconds = time.perf_counter() - started
                points.append({"shape": shape, "design": asdict(design), "cycles": cycles, "pj": pj})
                print(shape, design, cycles, pj, f"{seconds:.1f} s", flush=True)
    lines = ",\n".join(json.dumps(point) for point in points)
    Path(path).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("points", help="file to write")
    main(flags.parse_args().points)
