from collections.abc import Sequence

import yaml
from jsonargparse import ArgumentParser

from lrlhf.rewards import Rewards


def twos(completions: Sequence[str]) -> list[float]:
    return [2.0] * len(completions)


def doubled(rewards: dict[str, list[float]]) -> list[float]:
    return [2 * value for value in rewards["two"]]


async def threes(completions: Sequence[str]) -> list[float]:
    return [3.0] * len(completions)


def from_yaml(text: str) -> Rewards:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=Rewards)
    config = parser.parse_object(
        {"rewards": {"class_path": "lrlhf.rewards.Rewards", "init_args": yaml.safe_load(text)}}
    )
    written = parser.dump(config)  # as it is saved beside a checkpoint
    rewards: Rewards = parser.instantiate(parser.parse_string(written)).rewards
    return rewards


def test_a_yaml_names_functions_classes_and_built_in_rewards() -> None:
    rewards = from_yaml(
        """
        functions:
          - tests.rewards.test_config.twos
          - tests.rewards.test_config.threes
          - exact_match
          - class_path: lrlhf.rewards.RegexFormat
            init_args: {pattern: a.}
          - class_path: OverlongPenalty
            init_args: {max_new_tokens: 4, buffer: 2}
        weights: [1, 1, 1, 1, 2]
        """
    )
    assert rewards.names == ("twos", "threes", "exact_match", "regex_format", "overlong_penalty")
    result = rewards.score(["p"], ["ab"], [[1, 2, 3]], [{"answer": "ab"}])
    assert result.per_function[0].tolist() == [2.0, 3.0, 1.0, 1.0, -0.5]


def test_every_option_can_be_given_in_a_yaml() -> None:
    rewards = from_yaml(
        """
        functions:
          two: tests.rewards.test_config.twos
          four: tests.rewards.test_config.doubled
          three: tests.rewards.test_config.threes
        inputs: {four: [two]}
        optional: [three]
        timeout: null
        max_unscorable_fraction: 0
        max_failures: null
        recipe: {math: {two: 0.0, four: 3.0}, chat: {three: 1.0}}
        label_column: kind
        """
    )
    assert rewards.score(["p"], ["c"], [[1]], [{"kind": "math"}]).scores.tolist() == [12.0]
