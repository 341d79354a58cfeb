"""Writes configs/<op>.json of the row-wise operators: python -m benchmarks.row_configs [RESULTS.jsonl]

An operator's rows are what the function `configs(target)` beside its program says, in order of preference. The first three
operators share the tiles below, chosen by `benchmarks.sweep` on an H200 (configs/README.md says how). With a results file, the
rows that its workloads ran on get the label, the time and the time of a copy of the same bytes; others keep what they have.
"""

import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

from tileops_dsl.configs import CONFIGS
from tileops_dsl.kernels import MODULES
from tileops_dsl.kernels.row_config import RowConfig

SHARED = ("softmax", "rms_norm", "rms_norm_silu")
OPS = (*SHARED, *(op for op, module in MODULES.items() if hasattr(module, "configs")))
MEASURED = ("workload", "us", "baseline_us")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# (threads, threads_per_row, chunks, passes); a row's capacity is threads_per_row * chunks vectors of 16 bytes.
ALIGNED = [
    (128, 1, 1, 4), (128, 2, 1, 4), (128, 4, 1, 4), (128, 4, 2, 2), (128, 4, 3, 1), (128, 8, 2, 1), (128, 4, 5, 1),
    (128, 8, 3, 1), (128, 16, 2, 1), (128, 8, 5, 1), (128, 16, 3, 1), (128, 32, 2, 1), (128, 16, 5, 1), (128, 32, 3, 1),
    (64, 32, 4, 1), (128, 64, 3, 1), (64, 64, 4, 1), (128, 128, 3, 1), (128, 128, 4, 1), (256, 256, 3, 1),
    (256, 256, 4, 1), (512, 512, 3, 1), (512, 512, 4, 1), (512, 512, 8, 1),
]  # fmt: skip
# softmax has no weight to keep: 128 vectors are best spread over 64 threads, and 2048 over 256
SOFTMAX = {(64, 32, 4, 1): (64, 64, 2, 1), (512, 512, 3, 1): (256, 256, 6, 1), (512, 512, 4, 1): (256, 256, 8, 1)}
# of 16 bits: 2 rows a thread in CTAs of 64 threads read 512 columns faster (tileops_dsl/kernels/NOTES.md)
RMS_NORM_16 = {(128, 32, 2, 1): (64, 32, 2, 2)}
# of 16 bits: in pace with memory (tileops_dsl/kernels/NOTES.md), which 1024 columns want in CTAs of 128 threads
RMS_NORM_SILU_PACED = {tile: tile for tile in [(128, 4, 5, 1), (128, 8, 5, 1), (128, 16, 5, 1)]}
RMS_NORM_SILU_PACED[64, 32, 4, 1] = (128, 32, 4, 1)
# of 16 bits: a CTA fewer than the rule says, or they spill 4 bytes
RMS_NORM_SILU_FEWER = {(128, 1, 1, 4), (128, 128, 3, 1)}
ALIGNED_PORTABLE = [
    (128, 2, 1, 4), (128, 4, 2, 2), (128, 4, 3, 1), (128, 8, 2, 1), (128, 4, 5, 1), (128, 8, 3, 1), (128, 8, 5, 1),
    (128, 16, 3, 1), (128, 16, 5, 1), (128, 32, 4, 1), (64, 64, 4, 1), (128, 128, 4, 1), (256, 256, 4, 1), (512, 512, 4, 1),
]  # fmt: skip
MIXED = [(128, 8, 2, 1), (128, 32, 2, 1), (128, 32, 4, 1), (64, 64, 4, 1), (128, 128, 4, 1), (256, 256, 4, 1)]
SHIFTED = [
    (128, 16, 1, 1), (128, 16, 3, 1), (128, 32, 4, 1), (64, 64, 4, 1), (128, 128, 4, 1), (256, 256, 4, 1), (512, 512, 4, 1),
]  # fmt: skip
SHIFTED_FLOAT = [(128, 16, 2, 1), *SHIFTED[2:], (512, 512, 8, 1)]
ELEMENTS = [(128, 8, 4, 1), (128, 32, 4, 1), (128, 128, 8, 1)]  # capacity in elements
ACROSS = [(256, 8, 12, 1), (512, 16, 12, 1), (512, 32, 12, 1)]  # lanes on rows; capacity in elements, 8 bytes of rows a lane
ACROSS_LOOP = (512, 32, 8, 1)


def main() -> None:
    results = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    for op in OPS:
        file = CONFIGS / f"{op}.json"
        earlier = {RowConfig(op=op, **row).name: row for row in (json.loads(file.read_text()) if file.exists() else [])}
        rows = rows_of(op)
        for row in rows:
            before = earlier.get(RowConfig(op=op, **row).name, {})
            row |= _measured(op, row, results) or {key: before[key] for key in MEASURED if key in before}
        text = ",\n".join("  " + json.dumps(row) for row in rows)
        file.write_text(f"[\n{text}\n]\n")


def rows_of(op: str) -> list[dict]:
    """In order of preference: the dispatcher takes the first that is eligible."""
    targets = ("sm_90a", "portable")
    if op in SHARED:
        return [row for target in targets for row in _rows(op, target)]
    return [_as_json(config) for target in targets for config in MODULES[op].configs(target)]


def _as_json(config: RowConfig) -> dict:
    """Without the operator, and without what has its default."""
    usual = {field.name: field.default for field in fields(config)} | {"op": config.op}
    return {name: value for name, value in asdict(config).items() if value != usual[name]}


def _rows(op: str, target: str) -> list[dict]:
    rows = []
    for x in BYTES:
        vector, same = 16 // BYTES[x], {"target": target, "x": x, "y": x}
        for rows_of_lane in (8 // BYTES[x], 1):
            rows += [_row(same, rows_of_lane, tile, lanes_on_rows=True) for tile in ACROSS]
            rows.append(_row(same, rows_of_lane, ACROSS_LOOP, lanes_on_rows=True, looped=True))
        rows += [_aligned(op, same, vector, tile) for tile in _tiles(op, target, vector)]
        rows.append(_row(same, vector, (512, 512, 4, 1), looped=True))
        rows += [_row(same, vector, tile, shifted=True) for tile in (SHIFTED_FLOAT if x == "float32" else SHIFTED)]
        rows.append(_row(same, vector, (512, 512, 4, 1), shifted=True, looped=True))
        rows += [_row(same, 1, tile) for tile in ELEMENTS]
        rows.append(_row(same, 1, (512, 512, 8, 1), looped=True))
    if op == "softmax":
        for x, y in ((x, y) for x in BYTES for y in BYTES if x != y):
            pair = {"target": target, "x": x, "y": y}
            if "float32" in (x, y):
                rows += [_row(pair, 16 // BYTES[x], tile) for tile in MIXED]
            rows.append(_row(pair, 1, (512, 512, 8, 1), looped=True))
    return rows


def _tiles(op: str, target: str, vector: int) -> list[tuple]:
    aligned = ALIGNED if target == "sm_90a" else ALIGNED_PORTABLE
    if op == "softmax":
        return [SOFTMAX.get(tile, tile) for tile in aligned]
    other = RMS_NORM_16 if op == "rms_norm" and vector == 8 else {}
    return [other.get(tile, tile) for tile in aligned if _weight_fits(tile, vector)]


def _aligned(op: str, dtypes: dict, vector: int, tile: tuple) -> dict:
    if op != "rms_norm_silu" or dtypes["target"] != "sm_90a" or vector != 8:
        return _row(dtypes, vector, tile)
    row = _row(dtypes, vector, RMS_NORM_SILU_PACED.get(tile, tile))
    row["min_blocks"] -= tile in RMS_NORM_SILU_FEWER
    return row | ({"paced": True} if tile in RMS_NORM_SILU_PACED else {})


def _weight_fits(tile: tuple, vector: int) -> bool:
    """512 threads have 128 registers each: x, the result and the weight of 64 columns do not fit."""
    return tile[0] < 512 or tile[2] * vector < 64


def _row(dtypes: dict, vector: int, tile: tuple, **flags) -> dict:
    threads, threads_per_row, chunks, passes = tile
    row = dtypes | {"vector": vector, "threads": threads, "threads_per_row": threads_per_row, "chunks": chunks}
    row |= {"passes": passes} if passes > 1 else {}
    if not flags:
        row |= _min_blocks(dtypes, chunks * passes * vector, threads)
    return row | flags


def _min_blocks(dtypes: dict, elements: int, threads: int) -> dict:
    """Registers as tight as they can be without a spill, for more threads on a multiprocessor (65536 registers)."""
    small = dtypes["x"] == "float32" or dtypes["target"] == "portable"  # sm_100 and sm_120 code needs more registers
    if not small and 16 <= elements <= 24:
        return {"min_blocks": 65536 // (48 * threads) // 2 * 2}
    if elements <= (24 if small else 32):
        return {"min_blocks": 65536 // (64 * threads)}
    return {"min_blocks": 65536 // (72 * threads)} if elements <= 40 and not small else {}


def _measured(op: str, row: dict, results: list[dict]) -> dict:
    name = RowConfig(op=op, **row).name
    runs = [r for r in results if r["op"] == op and r["variant"] == name]
    if not runs:
        return {}
    best = max(runs, key=lambda r: r["us"])  # the largest of its workloads
    copy_us = best["us"] * best["ceiling_pct"] / 100
    return {"workload": best["label"], "us": round(best["us"], 2), "baseline_us": round(copy_us, 2)}


if __name__ == "__main__":
    main()
