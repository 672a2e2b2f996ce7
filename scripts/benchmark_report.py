"""What a benchmark has found, as tables in markdown and as a list of targets that were met or missed."""

from typing import Any

from baseline_report import markdown
from benchmark_contenders import CACHED, FULL, KINDS, SINGLE, THIRD, THIRD_SHARED

TOLERANCE = 1.12
LARGEST_OVERHEAD = 0.05
_KIBIBYTE, _MEBIBYTE = 2**10, 2**20


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Hold the figures against what the design promises.

    Args:
        found: The figures of `benchmark.measure`.

    Returns:
        For each target that the measured members tell of: "target", "measured", "limit" and "is_met".
    """
    wanted = [(FULL, 4, "training", 4.0), (FULL, 4, "inference", 4.0)]
    wanted += [(THIRD, 4, "training", None), (f"{THIRD}{CACHED}", 4, "training", None), (THIRD, 4, "inference", None)]
    wanted += [(THIRD, 8, "inference", None), (THIRD_SHARED, 4, "training", None)]
    held = []
    for name, of_shape in found["shapes"].items():
        rows = {(row["kind"], row["members"]): row for row in of_shape["rows"]}
        for kind, num_members, what, limit in wanted:
            if row := rows.get((kind, num_members)):
                counted = row[f"counted_{what}"]
                text = f"{name}, M={num_members}: {KINDS[kind].title}, {what}"
                if limit is None:
                    text += f" (counted {counted:.2f})"
                held.append(_held(text, row[what], limit or TOLERANCE * counted))
        overhead = found["norm_overhead"][name]["median"]
        held.append(_held(f"{name}, M=4: share of the step that sigma norms add", overhead, LARGEST_OVERHEAD))
    return held


def _held(target: str, measured: float, limit: float) -> dict[str, Any]:
    return {"target": target, "measured": measured, "limit": limit, "is_met": measured <= limit}


def report_of(found: dict[str, Any]) -> str:
    """Return the tables and the list of targets.

    Args:
        found: The figures of `benchmark.measure`.
    """
    parts = []
    for name, of_shape in found["shapes"].items():
        shape, (first, *_) = of_shape["shape"], of_shape["rows"]
        unit = f"images of {shape['length']} pixels" if shape["is_image"] else f"texts of {shape['length']} tokens"
        overhead = found["norm_overhead"][name]
        parts += [
            f"**{name}**: {shape['layers']} layers, {shape['hidden_size']} wide, batches of {shape['batch_size']} "
            f"{unit}. One model: {1000 * first['training_seconds']:,.0f} ms a training step, "
            f"{1000 * first['inference_seconds']:,.0f} ms inference.",
            markdown(_cost_cells(of_shape["rows"])),
            f"Sigma norms add {overhead['median']:.1%} to a training step at full depth, M = 4 (quartiles "
            f"{overhead['lower']:.1%} and {overhead['upper']:.1%} over pairs of steps).",
        ]
    if found["growth"]:
        parts += ["**Growth** of a training step with members in the last third:", markdown(_growth_cells(found))]
    met = {True: "met", False: "MISSED"}
    parts.append("Targets:")
    parts.append(
        "\n".join(
            f"- {held['target']}: {held['measured']:.3f}, at most {held['limit']:.3f}: {met[held['is_met']]}"
            for held in found["targets"]
        )
    )
    return "\n\n".join(parts)


def _cost_cells(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the cells of the main table; the single model, which every M is measured beside, comes once."""
    rows = [row for number, row in enumerate(rows) if row["kind"] != SINGLE or number == 0]
    return [
        {
            "": KINDS[row["kind"]].title,
            "M": str(row["members"]),
            "training": f"{row['training']:.2f}",
            "counted": f"{row['counted_training']:.2f}",
            "ratio": f"{row['training'] / row['counted_training']:.2f}",
            "inference": _cell(row["inference"]),
            "counted ": "-" if row["inference"] is None else f"{row['counted_inference']:.2f}",
            "ratio ": "-" if row["inference"] is None else f"{row['inference'] / row['counted_inference']:.2f}",
            "stored (KiB)": f"{row['stored_bytes'] / _KIBIBYTE:,.0f}",
            "load (s)": f"{row['load_seconds']:.2f}",
            "load": f"{row['load']:.2f}",
            "peak (MiB)": "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / _MEBIBYTE:,.0f}",
            "peak": _cell(row["peak"]),
        }
        for row in rows
    ]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _growth_cells(found: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "grows": row["grows"],
            "to": str(row["value"]),
            "training": f"{row['training']:.2f}",
            "counted": f"{row['counted']:.2f}",
            "ratio": f"{row['training'] / row['counted']:.2f}",
        }
        for row in found["growth"]
    ]
