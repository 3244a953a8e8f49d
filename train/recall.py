"""Training on associative recall, which is gone."""

raise SystemExit('error: train.recall is gone: docs/results/recall.md has its results and names a commit that has it')
