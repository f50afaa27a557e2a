"""The layers that are measured: head counts, sizes and the bytes that a round of them cannot avoid."""

from __future__ import annotations

from dataclasses import dataclass, replace

ACTIVATION_BYTES = 2
FP32_BYTES = 4
CONV_WIDTH = 4


@dataclass(frozen=True)
class LayerShape:
    """One Gated DeltaNet layer on one GPU, and how many of them the model has. Bytes are per layer."""

    name: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    layers: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Of one request."""
        return self.value_heads * self.key_dim * self.value_dim * FP32_BYTES

    @property
    def conv_state_bytes(self) -> int:
        """Of one request."""
        return self.channels * (CONV_WIDTH - 1) * ACTIVATION_BYTES

    @property
    def weight_bytes(self) -> int:
        return self.channels * CONV_WIDTH * ACTIVATION_BYTES + 2 * self.value_heads * FP32_BYTES

    @property
    def x_bytes(self) -> int:
        """Of one node, as the bytes below."""
        return self.channels * ACTIVATION_BYTES

    @property
    def raw_gate_bytes(self) -> int:
        return 2 * self.value_heads * ACTIVATION_BYTES

    @property
    def key_bytes(self) -> int:
        return self.key_heads * (self.key_dim * ACTIVATION_BYTES + FP32_BYTES)

    @property
    def value_bytes(self) -> int:
        return self.value_heads * self.value_dim * ACTIVATION_BYTES

    @property
    def correction_bytes(self) -> int:
        return self.value_heads * self.value_dim * FP32_BYTES

    @property
    def gate_bytes(self) -> int:
        return self.value_heads * FP32_BYTES

    def kept_bytes(self, commit: str) -> int:
        """What a commit needs of a node: P, k, U and the conv inputs for `factor`, g, beta and the conv inputs for `replay`."""
        if commit == "factor":
            return self.gate_bytes + self.key_bytes + self.correction_bytes + self.x_bytes
        return 2 * self.gate_bytes + self.x_bytes

    def inputs_floor(self, nodes: int, requests: int) -> int:
        """Convolution, norms and gates, the conv inputs kept."""
        written = 2 * self.key_bytes + self.value_bytes + 3 * self.gate_bytes + self.x_bytes
        return nodes * (self.x_bytes + self.raw_gate_bytes + written) + requests * self.conv_state_bytes + self.weight_bytes

    def factors_floor(self, nodes: int, columns: int, commit: str) -> int:
        """q, k and their gates read, one row of Y and, for `factor`, of Z written per value head."""
        rows = (2 if commit == "factor" else 1) * 4 * self.value_heads * columns
        return nodes * (2 * self.key_bytes + 2 * self.gate_bytes + rows)

    def solve_floor(self, nodes: int, requests: int, commit: str) -> int:
        """State, V, O and, for `factor`, U. q, k and gates are left out (a sixth more at T=64), so the floor is a strict one."""
        kept = self.correction_bytes if commit == "factor" else 0
        return requests * self.state_bytes + nodes * (2 * self.value_bytes + kept)

    def core_floor(self, nodes: int, requests: int, commit: str) -> int:
        """A whole verify round: x, a, b, both states and the weights read, O and what the commit needs written."""
        read = nodes * (self.x_bytes + self.raw_gate_bytes) + requests * (self.state_bytes + self.conv_state_bytes) + self.weight_bytes
        return read + nodes * (self.value_bytes + self.kept_bytes(commit))

    def on(self, ranks: int) -> LayerShape:
        """One rank of a tensor-parallel layer."""
        heads = {"key_heads": self.key_heads // ranks, "value_heads": self.value_heads // ranks}
        return self if ranks == 1 else replace(self, name=f"{self.name}-tp{ranks}", **heads)


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer on one GPU."""

    name: str
    query_heads: int
    kv_heads: int
    head_size: int

    def floor(self, rows: int, keys: int) -> int:
        """Q read and O written for `rows` rows, K and V read for `keys` positions (all requests together)."""
        return ACTIVATION_BYTES * self.head_size * (2 * rows * self.query_heads + 2 * keys * self.kv_heads)


LAYERS = {
    "9b": LayerShape("9b", 16, 32, 128, 128, 24),
    "27b": LayerShape("27b", 16, 48, 128, 128, 48),
    "122b": LayerShape("122b", 16, 64, 128, 128, 36),
}
ATTENTION = {"9b": AttentionShape("9b", 16, 4, 256)}
# for the interpreter: every code path, no time
TINY_LAYER = LayerShape("tiny", 1, 2, 32, 32, 2)
TINY_ATTENTION = AttentionShape("tiny", 4, 2, 32)


def layers_of(full: bool, tiny: bool) -> list[LayerShape]:
    """The 9B layer; `full`: also 27B and 122B, and each divided by 2 and 4."""
    if tiny:
        return [TINY_LAYER]
    if not full:
        return [LAYERS["9b"]]
    return [shape.on(ranks) for shape in LAYERS.values() for ranks in (1, 2, 4)]
