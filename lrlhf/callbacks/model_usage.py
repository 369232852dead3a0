"""How an exported model is used, in the code that its card shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from lrlhf.models.loading.reward_files import HEAD_CONFIG


class Usage(NamedTuple):
    """How a model is loaded, which its files tell."""

    task: str
    """As the hub calls it."""
    library: str
    code: str
    """An example in Python."""

    @classmethod
    def of(cls, folder: Path, repo: str | None) -> Usage:
        """Read how the model of an export is used; ``repo`` is its name on the hub."""
        config = folder / "config.json"
        stored = json.loads(config.read_text()) if config.exists() else {}
        architecture = next(iter(stored.get("architectures") or ()), "")
        place = repr(repo or "path/to/this/folder")
        if architecture.endswith("ForSequenceClassification"):
            return cls("text-classification", "transformers", _CLASSIFIER.format(place=place))
        if architecture.endswith("ForTokenClassification"):
            return cls("token-classification", "transformers", _STEPS.format(place=place))
        if (folder / HEAD_CONFIG).exists():
            return cls("text-classification", "lrlhf", _reward(folder, place))
        if architecture.endswith("ForConditionalGeneration"):
            return cls("image-text-to-text", "transformers", _VISION.format(place=place))
        chats = (folder / "chat_template.jinja").exists()
        asked = '[{"role": "user", "content": "…"}]' if chats else '"…"'
        return cls("text-generation", "transformers", _POLICY.format(place=place, asked=asked))


_POLICY = """\
from transformers import pipeline

generate = pipeline("text-generation", model={place})
print(generate({asked}, max_new_tokens=128, return_full_text=False)[0]["generated_text"])"""
_VISION = """\
from transformers import pipeline

generate = pipeline("image-text-to-text", model={place})
parts = [{{"type": "image", "path": "picture.png"}}, {{"type": "text", "text": "…"}}]
print(generate(text=[{{"role": "user", "content": parts}}], max_new_tokens=128))"""
_CLASSIFIER = """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({place})
model = AutoModelForSequenceClassification.from_pretrained({place})
text = "…" + tokenizer.eos_token  # prompt and response; a chat goes through the chat template
print(model(**tokenizer(text, return_tensors="pt")).logits)"""
_STEPS = """\
from lrlhf.modules import ProcessRewardModel

# or AutoModelForTokenClassification: class 1 says that the step which ends at a token is correct
reward = ProcessRewardModel({place})
print(reward.score("prompt", ["first step", "second step"]))"""
_REWARD = """\
from lrlhf.modules import RewardModel

reward = RewardModel({place}){told}
print(reward.score("prompt", ["one response", "another"]{head}))"""


def _reward(folder: Path, place: str) -> str:
    """Return the example of a reward model, which of several heads has to be asked for one."""
    names = json.loads((folder / HEAD_CONFIG).read_text(encoding="utf-8"))["names"]
    if len(names) == 1:
        return _REWARD.format(place=place, told="", head="")
    told = f"  # its heads: {', '.join(names)}"
    return _REWARD.format(place=place, told=told, head=f", head={names[0]!r}")
