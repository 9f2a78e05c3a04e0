"""Tables that more than one sub-command prints."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def results_table(config: dict[str, Any]) -> Table:
    """Loss and accuracy (or R2) of each part of the data, time and speed."""
    metric, timing = config["metric"], config["timing"]
    speed = timing["samples_per_second"]
    pace = "" if speed is None else f", {speed:,.0f} samples/s"
    table = Table(
        caption=f"{timing['training_seconds']:.1f} s of training{pace}", caption_justify="left"
    )
    for column in ("rows", "number", "loss", "R²" if metric == "r2" else metric):
        table.add_column(column, justify="left" if column == "rows" else "right")
    for part, values in config["results"].items():
        score = values["score"]
        shown = f"{score:.4f}" if metric == "r2" else f"{100 * score:.2f} %"
        style = "bold" if part == "test" else None
        number = f"{config['data']['rows'][part]:,}"
        table.add_row(part, number, f"{values['loss']:.4g}", shown, style=style)
    return table
