"""From the arms' records to the table, the marks and the JSON line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from examples.demo.arms import ARMS, CHAIN, GREEDY, ONE_NODE, PHASES, PLAIN, SAMPLED, TREE, Phase
from examples.demo.compare import MAX_ULPS, Parting, check_scores, differences, distance, distinct_share, mean_accepted, partings

MAT_MARKS = {GREEDY.name: 1.15, SAMPLED.name: 1.25}  # the tree's mean accepted tokens over the chain's


@dataclass(frozen=True)
class Records:
    """What the arms wrote."""

    by_arm: dict[str, dict[str, Any]]
    scores: dict[str, np.ndarray]  # plain decoding's: phase -> scores, phase + "_top" -> top logits

    def tokens(self, arm: str, phase: Phase) -> list[list[int]]:
        """Per prompt."""
        return self.by_arm[arm]["phases"][phase.name]["tokens"]

    def mat(self, arm: str, phase: Phase) -> float:
        """Mean accepted tokens per round, bonus included."""
        counters = self.by_arm[arm]["phases"][phase.name]["counters"]
        return round(mean_accepted(counters["drafts"], counters["accepted_tokens"]), 3)

    def forwards(self, arm: str, phase: Phase) -> int:
        """Target forwards that served decode rows."""
        return self.by_arm[arm]["phases"][phase.name]["forwards"]

    def partings(self, arm: str, phase: Phase) -> list[Parting]:
        """Where the arm's tokens part from plain decoding's."""
        return partings(self.tokens(PLAIN.name, phase), self.tokens(arm, phase), self.scores[phase.name], self.scores[f"{phase.name}_top"])


class Report:
    """Everything the demo found out."""

    def __init__(self, records: Records, seconds: float, picture: Path | None) -> None:
        self.records, self.seconds, self.picture = records, seconds, picture
        for phase in PHASES:
            check_scores(records.tokens(PLAIN.name, phase), records.scores[phase.name])
        # The tree against plain decoding through the same layers: not one token may differ.
        self.changed = {p.name: self._changed(p) for p in PHASES}
        # The tree against stock vLLM's layers, which round in other places: only ties may differ.
        self.ties = {p.name: records.partings(TREE.name, p) for p in PHASES}

    def _changed(self, phase: Phase) -> list[dict[str, Any]]:
        """Where the tree's tokens are not those of trees of one node.

        `ulps` says how close the call was, for whoever looks for the reason; None where plain decoding had written another text by then.
        """
        records = self.records
        stock, one_node, tree = (records.tokens(arm.name, phase) for arm in (PLAIN, ONE_NODE, TREE))
        found = []
        for place in differences(one_node, tree):
            prompt, position = place["prompt"], place["position"]
            ulps = None
            if stock[prompt][:position] == one_node[prompt][:position]:
                scores, top = records.scores[phase.name], records.scores[f"{phase.name}_top"]
                ulps = round(
                    distance(scores[prompt, position], top[prompt, position], one_node[prompt][position], tree[prompt][position]), 3
                )
            found.append({**place, "ulps": ulps})
        return found

    def as_json(self) -> dict[str, Any]:
        """The last line of the demo."""
        records, tree = self.records, self.records.by_arm[TREE.name]
        return {
            "tokens_equal": not self.changed[GREEDY.name],
            "seeded_tokens_equal": not self.changed[SAMPLED.name],
            "differences": self.changed,
            "stock_ties": [tie.as_dict() for tie in self.ties[GREEDY.name]],
            "seeded_stock_ties": [tie.as_dict() for tie in self.ties[SAMPLED.name]],
            "max_stock_ulps": self._max_ulps(GREEDY),
            "max_seeded_stock_ulps": self._max_ulps(SAMPLED),
            "stock_ties_ok": all(tie.is_tie for ties in self.ties.values() for tie in ties),
            "mat": records.mat(TREE.name, GREEDY),
            "chain_mat": records.mat(CHAIN.name, GREEDY),
            "sampled_mat": records.mat(TREE.name, SAMPLED),
            "sampled_chain_mat": records.mat(CHAIN.name, SAMPLED),
            "distinct_4grams": {p.name: round(distinct_share(records.tokens(PLAIN.name, p)), 3) for p in PHASES},
            "target_forwards": records.forwards(TREE.name, GREEDY),
            "ar_forwards": records.forwards(PLAIN.name, GREEDY),
            "nodes_per_step": round(tree["stats"]["nodes_per_step"], 1),
            "bytes_per_node": tree["stats"]["bytes_per_node"],
            "spec_blocks_per_request": tree["stats"]["spec_blocks_per_request"],
            "tree_rows_served": tree["stats"]["tree_rows"],
            "versions": tree["versions"],
            "arm_seconds": {name: record["seconds"] for name, record in records.by_arm.items()},
            "seconds": round(self.seconds, 1),
            "picture": str(self.picture) if self.picture else None,
        }

    def _max_ulps(self, phase: Phase) -> float:
        return round(max((tie.ulps for tie in self.ties[phase.name]), default=0.0), 3)

    def failures(self) -> list[str]:
        """Why the demo must not pass; empty when nothing is wrong."""
        found = []
        for phase in PHASES:
            for place in self.changed[phase.name]:
                where = "prompt {prompt}, position {position} ({ulps} ulps)".format(**place)
                found.append(f"{phase.name}: the tree changed a token: {where}.")
            for tie in self.ties[phase.name]:
                if not tie.is_tie:
                    found.append(f"{phase.name}: parts from stock vLLM by {tie.ulps:.1f} ulps, more than a tie ({MAX_ULPS:g}): {tie}.")
        return found

    def marks(self) -> str:
        """One line: each mark, and whether it is met."""
        values = self.as_json()
        parts = [f"{name} {_yes(values[name])}" for name in ("tokens_equal", "seeded_tokens_equal", "stock_ties_ok")]
        for phase, mark in MAT_MARKS.items():
            ratio = self.records.mat(TREE.name, _phase(phase)) / self.records.mat(CHAIN.name, _phase(phase))
            parts.append(f"{phase} MAT {ratio:.2f}x the chain's (mark {mark}) {_yes(ratio >= mark)}")
        return "marks: " + "; ".join(parts)

    def table(self) -> str:
        """Rows: arms."""
        rows = {arm.title: self._row(name) for name, arm in ARMS.items()}
        return pd.DataFrame.from_dict(rows, orient="index").to_string()

    def _row(self, name: str) -> dict[str, Any]:
        records, record = self.records, self.records.by_arm[name]
        drafted = name in (CHAIN.name, TREE.name)
        phases = record["phases"]
        return {
            "equal to plain": "-" if name == PLAIN.name else _equality(records.partings(name, GREEDY)),
            "equal, sampled": self._sampled_equality(name),
            "MAT": f"{records.mat(name, GREEDY):.2f}" if drafted else "1.00",
            "MAT, sampled": f"{records.mat(name, SAMPLED):.2f}" if drafted else "1.00",
            "forwards": "{}+{}".format(*(phases[p.name]["forwards"] for p in PHASES)),
            "nodes/step": f"{record['stats']['nodes_per_step']:.1f}" if record["stats"] else "-",
            "bytes/draft": f"{record['stats'].get('bytes_per_node', record['state_bytes']):,}" if drafted else "-",
            "spec blocks": record["spec_blocks"],
            "seconds": f"{record['seconds']:.0f}",
        }

    def _sampled_equality(self, name: str) -> str:
        if name == PLAIN.name:
            return "-"
        if name == CHAIN.name:
            return "(other noise)"  # vLLM's rejection sampling of a chain draws other random numbers: equal in distribution only
        return _equality(self.records.partings(name, SAMPLED))


def _phase(name: str) -> Phase:
    return next(phase for phase in PHASES if phase.name == name)


def _yes(met: bool) -> str:
    return "ok" if met else "NOT MET"


def _equality(found: list[Parting]) -> str:
    wrong = sum(not parting.is_tie for parting in found)
    if wrong:
        return f"NO ({wrong} beyond a tie)"
    return f"{len(found)} tie{'s' * (len(found) > 1)}" if found else "yes"
