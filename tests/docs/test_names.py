"""Pages name only what exists, and the command line answers with what their tables say."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lrlhf.cli import class_help
from lrlhf.cli.class_help import help_of_class
from lrlhf.familiar_names import FAMILIAR_NAMES
from lrlhf.options.errors import ConfigError
from tests.docs.names import OWNERS, is_path, wrong_names
from tests.docs.public import PACKAGE, ROOT
from tests.docs.test_pages import DOCS, PAGES, prose

WHOLE = [DOCS / f"{name}.md" for name in ("troubleshooting", "choosing")]
# that of Lightning has no tables of names: its own are ours
TABLES = sorted(page for page in DOCS.glob("from_*.md") if page.stem != "from_lightning")
OTHERS = [page for page in TABLES if page.stem != "from_trl"]
SPAN = re.compile(r"`([^`]+)`")
OTHERWISE = {
    "hf upload NAME runs/rloo_lrlhf/export/final",
    '[{"role": "assistant", "content": "…"}]',
}
"""Of the hub's own command, and a message as data has it."""
OWN = {"ckpt_path", "clip_range"}
"""Names of theirs that are ours for something else."""


def rows(page: Path) -> Iterator[tuple[str, str]]:
    """What they call it and what we do, from the tables that have a column of ours."""
    ours = -1
    for line in prose(page).splitlines():
        if not line.startswith("|"):
            ours = -1
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if ours == -1:
            heads = [cell.strip() for cell in line.strip().strip("|").split("|")]
            ours = heads.index("lrlhf") if "lrlhf" in heads else 0
        elif ours > 0 and not set(line) <= set("|- "):
            yield cells[0].strip("| "), cells[ours].strip("| ")


@pytest.mark.parametrize("page", WHOLE, ids=lambda page: page.stem)
def test_a_page_names_what_exists(page: Path) -> None:
    spans = SPAN.findall(prose(page))
    assert len(spans) > 20
    assert {span: wrong for span in spans if (wrong := wrong_names(span))} == {}


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_name_what_exists(page: Path) -> None:
    spans = {span for _, ours in rows(page) for span in SPAN.findall(ours)} - OTHERWISE
    assert len(spans) > 20
    assert {span: wrong for span in spans if (wrong := wrong_names(span))} == {}


def test_the_command_line_answers_with_what_the_tables_say() -> None:
    meanings: dict[str, set[str]] = {}
    for theirs, ours in (row for page in OTHERS for row in rows(page)):
        for option in re.findall(r"`(--[a-z_0-9.]+|(?!openrlhf)[a-z_]+\.[a-z_0-9.]+)", theirs):
            meanings.setdefault(option.rpartition(".")[2].removeprefix("--"), set()).add(ours)
    # short names, and those that mean several things, say too little; ours are no mistakes
    known = {
        name: ours
        for name, (ours, *others) in meanings.items()
        if "_" in name and not others and SPAN.search(ours) and not re.search(rf"\b{name}\b", ours)
        if name not in OWN and not any(is_path(f"{section}.{name}") for section in OWNERS)
    }
    assert len(known) > 80
    differing = {
        name: (ours, answer)
        for name, ours in known.items()
        for answer in [FAMILIAR_NAMES.get(name, "")]
        if not {*re.findall(r"\w{3,}", answer)} & {*re.findall(r"\w{3,}", ours)} - {"model", "data"}
    }
    assert differing == {}


@pytest.mark.parametrize(
    "span",
    [
        "model.update.num_minibatch",
        "update.options.clip_lower",
        "data.batchsize",
        "trainer.max_stepz",
        "policy/kl",
        "perf/sleeping_s",
        "lrlhf verfy",
        "lrlhf fit --model.policie x",
        "--model.update.loss_type",
        "KLController",
        "KLControl(goal=6.0)",
        "RLCheckpoint.keep",
        "model.algorithm: gproo",
        "max_stale: 1",
        "module.forget()",
        "scorings.jsonl",
        "lrlhf.callbacks.Nothing",
        "no such thing was … ever said here",
        "model.policy.lora: {rank: 16}",
    ],
)
def test_what_does_not_exist_is_found(span: str) -> None:
    assert wrong_names(span) != []


@pytest.mark.parametrize(
    "span",
    [
        "model.update.num_minibatches",
        "update.options.clip_low",
        "policy/approx_kl",
        "perf/generate_s",
        "mismatch/ratio_p01",
        "reward_model/margin",
        "guard/gradient",
        "lrlhf plan --gpus 64",
        "--ckpt_path last",
        "KLControl(target=6.0)",
        "RLCheckpoint.save_top_k",
        "model.algorithm: grpo",
        "module.generate(…)",
        "eval_scores_<step>.jsonl",
        "engine.gpu_memory_utilization",
        "model.policy.lora: {r: 16}",
        "no reward could score … responses",
        "step … was left out, nothing moved",
    ],
)
def test_what_exists_is_known(span: str) -> None:
    assert wrong_names(span) == []


def test_each_page_shows_its_config_as_it_is() -> None:
    configs = sorted((ROOT / "examples" / "moving").glob("*.yaml"))
    assert {f"from_{config.stem.partition('_')[0]}" for config in configs} == {
        p.stem for p in OTHERS
    }
    for config in configs:
        page = DOCS / f"from_{config.stem.partition('_')[0]}.md"
        assert f"```yaml\n{config.read_text(encoding='utf-8')}```" in page.read_text("utf-8")


def test_help_knows_every_class_that_a_page_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = class_help._modules_of_classes()
    monkeypatch.setattr(class_help, "_modules_of_classes", lambda: known)
    spans = {span for page in PAGES for span in SPAN.findall(prose(page))}
    words = {word for span in spans for word in re.findall(r"\b[A-Z]\w+", span)}
    named = sorted(words & {node for tree in sources() for node in tree})
    assert {"Experience", "LearnedReward", "Trainer", "GymnasiumEnvironment"} <= {*named}
    unknown = {}
    for name in named:
        try:
            help_of_class([name])
        except ConfigError as error:
            unknown[name] = str(error)
        else:
            assert capsys.readouterr().out.partition("\n")[0].endswith(f".{name}")
    # but for extras that are not installed
    missing = re.compile(r" needs the package | cannot be loaded: No module named '(?!lrlhf)")
    assert {name: text for name, text in unknown.items() if not missing.search(text)} == {}


def sources() -> Iterator[list[str]]:
    """The public classes at the top of each file of the package."""
    for file in PACKAGE.rglob("*.py"):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        yield [node.name for node in body if isinstance(node, ast.ClassDef) if node.name[0] != "_"]


def test_a_name_of_several_classes_is_told_apart_by_its_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in ("lrlhf.apps.serve.Scorer", "lrlhf.modules.policy.score.Scorer"):
        help_of_class([path])
        assert capsys.readouterr().out.startswith(f"{path}\n")
    with pytest.raises(ConfigError, match="did you mean 'LearnedReward'"):
        help_of_class(["LernedReward"])
