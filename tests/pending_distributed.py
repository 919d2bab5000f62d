"""What does not hold yet; run by name: pytest tests/pending_distributed.py."""

from functools import partial
from pathlib import Path

from test_distributed import in_pairs, steps_that_talk_to_each_other


def test_steps_that_talk_to_each_other_within_the_smallest_budget(tmp_path: Path) -> None:
    in_pairs([partial(steps_that_talk_to_each_other, budgets=("smallest",))] * 10, tmp_path)
