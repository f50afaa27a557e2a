"""Draws one verified tree with the path that the target accepted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

ACCEPTED, SPINE, OTHER, BONUS = "#1b7f4d", "#b46a00", "#8a8a8a", "#1f5fa8"
FILL = {ACCEPTED: "#d5f0e1", SPINE: "#fdf0da", OTHER: "#f6f6f6", BONUS: "#dce9f8"}
MAX_TEXT = 12


def draw(tree: dict[str, Any], path: Path) -> None:
    """Write a PNG. tree: parent, text, logprob per node, `path` (accepted nodes), `bonus_text`; pads have token -1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_nodes, last = len(tree["parent"]), tree["path"][-1]
    # The bonus token is drawn as one more child of the path's last node.
    parent = [*tree["parent"], last]
    places = layout(parent, [token >= 0 for token in tree["token"]] + [True])
    depth = max(x for x, _ in places.values())
    height = max(y for _, y in places.values()) + 1
    figure, axes = pyplot.subplots(figsize=(1.75 * (depth + 1), 0.52 * height + 1.4))
    spine, accepted = spine_of(tree["parent"]), set(tree["path"])
    colours = {node: BONUS if node == num_nodes else ACCEPTED if node in accepted else SPINE if node in spine else OTHER for node in places}
    for node, place in places.items():
        if node:
            _edge(axes, places[parent[node]], place, colours[node])
    for node, place in places.items():
        if node == num_nodes:
            _node(axes, *place, tree["bonus_text"], BONUS, "bonus")
        else:
            probability = f"{math.exp(tree['logprob'][node]):.2g}" if node else ""
            _node(axes, *place, tree["text"][node], colours[node], probability)
    _finish(axes, depth, height, len(places) - 1, len(tree["path"]) - 1)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def layout(parent: list[int], real: list[bool]) -> dict[int, tuple[float, float]]:
    """Node -> (depth, row): first children continue their parent's row, so that every chain is a straight line."""
    children: dict[int, list[int]] = {}
    for node in range(1, len(parent)):
        if real[node]:
            children.setdefault(parent[node], []).append(node)
    places: dict[int, tuple[float, float]] = {}
    next_row = 0

    def place(node: int, depth: int, row: float) -> None:
        nonlocal next_row
        places[node] = (float(depth), row)
        for index, child in enumerate(children.get(node, [])):
            if index:
                next_row += 1
            place(child, depth + 1, row if index == 0 else float(next_row))

    place(0, 0, 0.0)
    return places


def spine_of(parent: list[int]) -> set[int]:
    """Nodes of the top-1 chain: it comes first, each node the child of the one before."""
    spine = {0}
    for node in range(1, len(parent)):
        if parent[node] != node - 1:
            break
        spine.add(node)
    return spine


def label(text: str) -> str:
    """A token's text on one line with its blanks visible."""
    shown = text.replace("\n", "↵").replace("\t", "→").replace(" ", "·") or "∅"
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 1] + "…"


def _node(axes, x: float, y: float, text: str, colour: str, note: str) -> None:
    # matplotlib reads a dollar sign as mathematics
    axes.text(x, y, label(text).replace("$", r"\$"), ha="center", va="center", fontsize=10, family="monospace", color="black", zorder=3,
              bbox={"boxstyle": "round,pad=0.3", "facecolor": FILL[colour], "edgecolor": colour, "linewidth": 1.8})  # fmt: skip
    axes.text(x, y + 0.42, note, ha="center", va="center", fontsize=6.5, color=colour, zorder=3)


def _edge(axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    (x0, y0), (x1, y1) = start, end
    bend = (x0 + x1) / 2
    kept = colour in (ACCEPTED, BONUS)
    line = {"color": colour, "linewidth": 3.0, "zorder": 2} if kept else {"color": "#c4c4c4", "linewidth": 1.0, "zorder": 1}
    axes.plot([x0, bend, bend, x1], [y0, y0, y1, y1], linestyle="--" if colour == BONUS else "-", **line)


def _finish(axes, depth: float, height: float, num_nodes: int, num_accepted: int) -> None:
    from matplotlib.patches import Patch

    axes.set_xlim(-0.6, depth + 0.6)
    axes.set_ylim(height - 0.2, -0.9)
    axes.set_axis_off()
    axes.set_title(f"One round: {num_nodes} nodes verified in one target forward, {num_accepted} drafts accepted and one bonus token\n"
                   "(below a node: the drafter's probability of the path to it)",
                   fontsize=11)  # fmt: skip
    names = {
        ACCEPTED: "accepted path (from the pending token)",
        SPINE: "rest of the top-1 chain",
        OTHER: "other drafts",
        BONUS: "bonus token",
    }
    handles = [Patch(facecolor=FILL[colour], edgecolor=colour, label=name) for colour, name in names.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=4, frameon=False, fontsize=9)
