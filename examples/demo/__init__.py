"""The main job from start to end: draft trees, verify them in one target pass, and check that no token changed.

Four engines run the same prompts (`arms`); `compare` checks their tokens, `report` prints what was measured, `picture`
draws one verified tree. Run it with `make demo`, or `python -m examples.demo --help`.
"""
