"""Published results in miniature: does a claim of a paper show on a tiny model, with an interval?

Each claim is a comparison of two variants over the same seeds. Its verdict follows from the 95 %
interval by one rule, see `verdicts.py`. The policy has 27,000 random weights, so what is seen here
supports a claim, and what is not seen says nothing about large models.

    python -m benchmarks.published [--only NAME ...] [--seeds 1 2 3 4 5] [--work runs/published]
        [--out docs/published.png] [--json FILE]

A finished run is one line of ``runs.jsonl`` in the folder ``--work`` and is not run again. Delete
the folder, or name another, after a change of lrlhf.
"""
