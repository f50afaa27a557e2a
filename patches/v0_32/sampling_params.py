"""Lets requests to an engine with Bole use options that vLLM's rejection sampling does not support."""

from __future__ import annotations

import functools

from ..record import Patch


def _replace(original):
    @functools.wraps(original)
    def _validate_spec_decode(self, speculative_config) -> None:
        from bole_vllm.engine_config import samples_every_node

        if not samples_every_node(speculative_config):
            original(self, speculative_config)

    return _validate_spec_decode


SAMPLING_PARAMS = Patch(
    id="sampling_params",
    target="vllm.sampling_params:SamplingParams._validate_spec_decode",
    kind="wrapped method",
    why="vLLM refuses min_p and logit_bias beside any speculation; trees take samples of the processed target at every node, as plain "
    "decoding does, so both work; no hook lets an engine say so",
    upstream="none: vLLM asks the speculative method nothing when it validates a request",
    remove_when="vLLM supports both beside speculation",
    fingerprint="13f2065aad2612ad",
    test="tests/e2e/test_tree_options.py",
    replace=_replace,
)
