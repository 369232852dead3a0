"""The inspector's page in a real browser."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lrlhf.apps.lab.inspector import write_inspector
from lrlhf.media.decode import small_jpeg
from tests.apps.lab.browser import NARROW, WIDE, Opened, eventually, fits, opening
from tests.apps.lab.inspector.runs import policy_run, reward_run, write_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    with opening() as opened:
        yield opened


@pytest.fixture(scope="module")
def page_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    first, second = policy_run(folder / "one"), policy_run(folder / "two", seed=3)
    output = folder / "page.html"
    write_inspector([first, second, reward_run(folder / "reward")], output)
    return output


def write_page(folder: Path, *records: dict[str, Any], **options: Any) -> Path:
    write_lines(folder / "rollouts.jsonl", records)
    write_inspector([folder], folder / "inspect.html", **options)
    return folder / "inspect.html"


def plain(
    step: int, prompt: str, completion: str, score: float | None, **more: Any
) -> dict[str, Any]:
    return {"step": step, "prompt": prompt, "completion": completion, "score": score, **more}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_every_part_is_shown_at_both_widths_and_in_both_schemes(
    opened: Opened, page_of_runs: Path, size: tuple[int, int], scheme: str
) -> None:
    page = opened(page_of_runs, "curves", size, scheme)
    page.wait_for_selector(".curve .plot .scatterlayer path", state="attached")
    assert fits(page)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    for tab, there in {
        "Responses": ".item",
        "Prompts": ".item",
        "Pairs": ".pair .candidate.better",
    }.items():
        page.get_by_role("tab", name=tab).click()
        page.wait_for_selector(there)
        assert fits(page), tab
    page.wait_for_selector(".figures .plot .scatterlayer path", state="attached")
    page.context.close()


def test_the_step_under_the_pointer_is_read_off_every_curve_of_every_run(
    opened: Opened, page_of_runs: Path
) -> None:
    page = opened(page_of_runs, "curves")
    area = page.locator('[data-metric="rollout/score"] .area')
    page.wait_for_selector('[data-metric="rollout/score"] svg')
    box = area.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    step = int(page.locator("#pointed").inner_text().removeprefix("step "))
    assert 1 < step < 40
    rows = [
        (folder / "metrics.csv").read_text().splitlines()
        for folder in (page_of_runs.parent / "one", page_of_runs.parent / "two")
    ]
    for name in ("rollout/score", "policy/entropy"):
        column = rows[0][0].split(",").index(name)
        lines = [next(line for line in of if line.startswith(f"{step},0,")) for of in rows]
        expected = [float(line.split(",")[column]) for line in lines]
        shown = page.locator(f'[data-metric="{name}"] .values span').all_inner_texts()
        assert [float(text.replace("−", "-")) for text in shown] == pytest.approx(
            expected, abs=6e-4
        )
    page.context.close()


@pytest.fixture
def five(tmp_path: Path) -> Path:
    rewards = [{"exact": value} for value in (3.0, None, 1.0, 2.0, 5.0)]
    return write_page(
        tmp_path,
        plain(1, "colour?", "red apple", 0.5, finish_reason="stop", rewards=rewards[0]),
        plain(1, "colour?", "green pear", None, finish_reason="length", rewards=rewards[1]),
        plain(2, "taste?", "sour Apple", -2.0, finish_reason="stop", rewards=rewards[2]),
        plain(3, "taste?", "sweet plum", 10.0, finish_reason="length", rewards=rewards[3]),
        plain(12, "taste?", "bitter", 0.7, finish_reason="stop", rewards=rewards[4]),
    )


def test_responses_are_searched_filtered_and_sorted(opened: Opened, five: Path) -> None:
    page = opened(five, "responses")
    found = page.locator("#found")

    def expect(count: int, *texts: str) -> None:
        page.locator("#found", has_text=re.compile(f"^{count} of")).wait_for()
        eventually(page.locator(".item .said")).to_have_text(list(texts))

    expect(5, "red apple", "green pear", "sour Apple", "sweet plum", "bitter")
    page.get_by_label("Search prompts and responses").fill("APPLE")
    expect(2, "red apple", "sour Apple")
    page.get_by_label("Search prompts and responses").fill("colour")
    expect(2, "red apple", "green pear")
    page.get_by_label("Search prompts and responses").fill("nothing of that")
    page.locator("#found", has_text=re.compile("^0 of")).wait_for()
    page.get_by_label("Search prompts and responses").fill("")
    expect(5, "red apple", "green pear", "sour Apple", "sweet plum", "bitter")

    page.get_by_label("Finish reason").select_option(label="length")
    expect(2, "green pear", "sweet plum")
    page.get_by_label("Finish reason").select_option(label="any end")
    page.get_by_label("Step from").fill("2")
    page.get_by_label("Step to").fill("3")
    expect(2, "sour Apple", "sweet plum")
    page.get_by_label("Step from").fill("")
    page.get_by_label("Step to").fill("")
    page.get_by_label("Value from").fill("0.6")
    expect(2, "sweet plum", "bitter")
    page.get_by_label("Part", exact=True).select_option(label="reward exact")
    page.get_by_label("Value from").fill("2")
    page.get_by_label("Value to").fill("3")
    expect(2, "red apple", "sweet plum")
    page.get_by_label("Value from").fill("")
    page.get_by_label("Value to").fill("")

    # as numbers, and what has none last, whichever way
    page.get_by_label("Sort by").select_option(label="by score")
    expect(5, "sour Apple", "red apple", "bitter", "sweet plum", "green pear")
    page.get_by_label("Turn the order around").click()
    expect(5, "sweet plum", "bitter", "red apple", "sour Apple", "green pear")
    page.get_by_label("Sort by").select_option(label="by reward exact")
    expect(5, "bitter", "red apple", "sweet plum", "sour Apple", "green pear")
    assert found.inner_text() == "5 of 5 responses"
    page.context.close()


def test_a_response_is_shown_in_full_with_its_turns_rewards_and_columns(
    opened: Opened, tmp_path: Path
) -> None:
    path = write_page(
        tmp_path,
        plain(
            1,
            "raw prompt",
            "first",
            0.25,
            messages=[{"role": "user", "content": "Asked <b>so</b>"}],
        ),
        plain(
            4,
            "p",
            "callresultanswer",
            1.5,
            rewards={"exact": 1.0, "tone": 0.5},
            segments=[{"sampled": True, "text": "call"}, {"sampled": False, "text": "result"}],
            episode=[
                {"role": "assistant", "content": "call", "tool_calls": [{"name": "sum"}]},
                {"role": "tool", "content": [{"type": "text", "text": "result"}]},
            ],
            turn_rewards=[0.5, 1.0],
            columns={"answer": "42"},
            failure="the tool broke",
        ),
    )
    page = opened(path, "response/0")
    page.wait_for_selector(".response")
    assert page.locator(".response .turn").inner_text() == "user\nAsked <b>so</b>"
    page.keyboard.press("j")
    page.wait_for_selector('.response[data-row="1"]')
    turns = page.locator(".response .turn").all_inner_texts()
    assert turns[0].startswith("assistant\ncall")
    assert '"name": "sum"' in turns[0]
    assert turns[1] == "tool\nresult"
    facts = page.locator(".facts").all_inner_texts()
    assert "rewards of turns\t0.5, 1" in facts[0]
    assert "reward tone\t0.5" in facts[0]
    assert "answer\t42" in facts[1]
    assert "failure\tthe tool broke" in facts[1]
    page.get_by_role("button", name="Segments").click()
    assert page.locator(".response .given").inner_text() == "result"
    page.get_by_role("button", name="Text", exact=True).click()
    assert page.locator(".response .part:nth-of-type(2) .block").inner_text() == "callresultanswer"
    page.context.close()


def test_images_are_shown_in_the_turn_that_showed_them(opened: Opened, tmp_path: Path) -> None:
    image = {"type": "image"}
    pictures = {
        f"image #{name}": small_jpeg(Image.new("RGB", (9, 6), name), 8) for name in ("red", "blue")
    }
    pictures["image #script"] = "data:image/svg+xml,<svg onload='alert(1)'/>"
    pictures["image #far"] = "https://example.org/a.png"
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "look"}]}]
    turns = [
        {"role": "assistant", "content": "crop"},
        {"role": "tool", "content": [{"type": "text", "text": "here:"}, image, image]},
        {"role": "tool", "content": [image]},
    ]
    names = ["image #red", "image #blue", "image #script", "image #far"]
    pads = ["<pad>", "<pad>", "<pad>", "a", "a"]
    tokens = {"texts": pads, "advantage": [None, None, None, 0.5, 0.5]}
    own = {"messages": messages, "episode": turns, "media": names, "pictures": pictures}
    own |= {"tokens": tokens}
    page = opened(write_page(tmp_path / "run", plain(1, "p", "c", 1.0, **own)), "response/0")
    page.wait_for_selector(".turn")
    shown = page.evaluate(
        "[...document.querySelectorAll('.response .turn')].map((turn) => "
        "[...turn.querySelectorAll('.pictures')].map((row) => "
        "[...row.children].map((one) => one.alt ?? `(${one.textContent})`)))"
    )
    beside = ["image #blue", "(image #script)"]
    assert shown == [[["image #red"]], [], [beside], [["(image #far)"]]]
    loaded = "[...document.querySelectorAll('.turn img')].every((one) => one.naturalWidth === 8)"
    assert page.evaluate(loaded)
    assert page.locator(".response > .pictures").count() == 0
    page.locator("[data-way=tokens]").click()
    assert page.locator(".tokens span").all_inner_texts() == ["<pad> × 3 ", "a", "a"]


def test_tokens_have_the_colour_of_their_values(opened: Opened, tmp_path: Path) -> None:
    tokens = {
        "texts": ["up", " down", " none", " given"],
        "advantage": [2.0, -2.0, 0.0, None],
        "engine_logprob": [-1.0, -1.0, -1.0, None],
        "logprob": [-0.5, -1.5, -1.0, None],
        "ref_logprob": [-1.5, -1.5, -1.0, None],
        "entropy": [0.0, 3.0, 1.0, None],
        "value": [1.0, 2.0, 3.0, None],
    }
    page = opened(write_page(tmp_path, plain(1, "p", "up down", 1.0, tokens=tokens)), "response/0")
    spans = page.locator(".tokens span")
    page.wait_for_selector(".tokens span")

    def colours() -> list[str]:
        script = "spans => spans.map((span) => getComputedStyle(span).backgroundColor)"
        shown: list[str] = spans.evaluate_all(script)
        return shown

    up, down, none, given = colours()
    clear = "rgba(0, 0, 0, 0)"
    assert len({up, down, clear}) == 3
    assert (none.endswith(("/ 0)", ", 0)")), given) == (True, clear)
    spans.nth(0).hover()
    told = page.locator(".readout").inner_text()
    # by hand: KL is -0.5 + 1.5, the ratio exp(-0.5 + 1)
    for part in ("advantage 2", "kl to the reference 1", "ratio to the sampler 1.649", "entropy 0"):
        assert part in told
    page.get_by_label("Colour by").select_option(label="Entropy")
    least, most, *_ = colours()
    assert least.endswith(("/ 0)", ", 0)"))
    assert most != least
    page.get_by_label("Colour by").select_option(label="KL to the reference")
    assert colours()[1].endswith(("/ 0)", ", 0)"))
    assert colours()[0] not in (clear, colours()[1])
    page.context.close()


def test_two_evaluations_of_a_prompt_are_compared_word_by_word(
    opened: Opened, tmp_path: Path
) -> None:
    texts = {0: "the cat sat on the mat", 10: "the cat slept", 20: "the old cat sat on a mat"}
    for step, said in texts.items():
        write_lines(tmp_path / f"eval_scores_{step}.jsonl", [plain(step, "Cats?", said, step / 10)])
    page = opened(write_page(tmp_path, plain(1, "Cats?", "training", 0.0)), "prompt/0")
    diff = page.locator(".diff")
    page.wait_for_selector(".diff")

    def words(tag: str) -> list[str]:
        return [text.strip() for text in diff.locator(tag).all_inner_texts()]

    assert (words("del"), words("ins")) == (["the"], ["old", "a"])
    assert page.locator(".through svg").count() > 0
    page.get_by_label("To").select_option(label="evaluation, step 10, score 1")
    assert (words("del"), words("ins")) == (["sat on the mat"], ["slept"])
    assert page.locator(".through .item").count() == 4
    page.context.close()


def test_evaluations_at_several_temperatures_are_lines_of_their_own(
    opened: Opened, tmp_path: Path
) -> None:
    for step, scores in ((1, {0.0: 1.0, 1.0: 5.0}), (2, {0.0: 2.0, 1.0: 9.0})):
        lines = [plain(step, "p", f"{t:g}", own, temperature=t) for t, own in scores.items()]
        write_lines(tmp_path / f"eval_scores_{step}.jsonl", lines)
    write_inspector([tmp_path], tmp_path / "page.html")
    page = opened(tmp_path / "page.html", "prompt/0")
    page.wait_for_selector(".through .plot .scatterlayer path", state="attached")
    lines = page.evaluate(
        "document.querySelector('.through .plot').data.filter((one) => one.mode === 'lines')"
        ".map((one) => [...one.y])"
    )
    assert lines == [[1.0, 2.0], [5.0, 9.0]]
    names = page.locator(".through .plot .legendtext").all_text_contents()
    assert names == ["evaluation at temperature 0", "evaluation at temperature 1"]
    # the first and the last one at the same temperature
    chosen = page.get_by_label("To").locator("option:checked")
    assert chosen.inner_text() == "evaluation at temperature 0, step 2, score 2"
    # the mean of 1 and 4
    assert page.locator(".side .rose").inner_text() == "+2.5"
    page.context.close()


def test_a_long_difference_is_found_quickly_and_puts_both_texts_together_again(
    opened: Opened, tmp_path: Path
) -> None:
    first = " ".join(f"w{at}" for at in range(20_000))
    second = " ".join(f"w{at}" for at in range(20_000) if at % 100)
    other = " ".join(f"v{at}" for at in range(20_000))
    lines = [
        plain(step, "p", text, 0.0) for step, text in enumerate((first, second, other), start=1)
    ]
    page = opened(write_page(tmp_path, *lines), "prompt/0")
    for chosen, text in (
        ("training, step 2, score 0", second),
        ("training, step 3, score 0", other),
    ):
        begun = time.monotonic()
        page.get_by_label("To").select_option(label=chosen)
        sides = page.evaluate(
            "['INS', 'DEL'].map((skipped) => [...document.querySelector('.diff').childNodes]"
            ".filter((node) => node.nodeName !== skipped).map((node) => node.textContent).join(''))"
        )
        assert sides == [first, text]
        assert time.monotonic() - begun < 30
    page.context.close()


def test_the_change_of_a_prompt_is_within_runs_and_kinds_and_only_where_there_are_two_scores(
    opened: Opened, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_lines(one / "rollouts.jsonl", [
        plain(1, "unscored at first", "a", None), plain(2, "unscored at first", "b", 5.0),
        plain(1, "in training", "a", 1.0), plain(3, "in training", "b", 2.0),
        plain(1, "evaluated", "a", 9.0), plain(4, "evaluated", "b", 9.0),
    ])  # fmt: skip
    write_lines(two / "rollouts.jsonl", [
        # a second run that starts far above
        plain(2, "in training", "c", 20.0), plain(4, "in training", "d", 23.0),
    ])  # fmt: skip
    for step, score in ((2, 1.0), (3, 0.5)):
        write_lines(one / f"eval_scores_{step}.jsonl", [plain(step, "evaluated", "e", score)])
    write_inspector([one, two], tmp_path / "page.html")

    page = opened(tmp_path / "page.html", "prompts")
    items = page.locator(".side .item")
    told = {
        item.locator(".said").inner_text(): item.locator(".rose, .fell").all_inner_texts()
        for item in items.all()
    }
    # of 1 to 2 and of 20 to 23 the mean; and of evaluations alone
    assert told == {"unscored at first": [], "in training": ["+2"], "evaluated": ["−0.5"]}
    page.get_by_label("Sort prompts").select_option(label="score fell most")
    order = ["evaluated", "in training", "unscored at first"]
    eventually(items.locator(".said")).to_have_text(order)
    page.context.close()


def test_pairs_of_several_validation_sets_are_told_apart(opened: Opened, tmp_path: Path) -> None:
    for step, margin in ((1, 1.0), (2, 3.0)):
        write_lines(tmp_path / f"eval_scores_{step}.jsonl", [
            {"set": name, "margins": {"h": way * margin}, "labels": {"h": 1}, "scores0": {"h": 0.0},
             "scores1": {"h": 0.0}, "prompt": name, "candidate0": "a", "candidate1": "b"}
            for name, way in (("ours", 1), ("theirs", -1), ("nobody's", 0))
        ])  # fmt: skip
    write_inspector([tmp_path], tmp_path / "page.html")

    page = opened(tmp_path / "page.html", "pairs")
    first = page.locator(".pair .chip").first

    page.get_by_label("Validation set").select_option(label="theirs")
    eventually(first).to_have_text("wrong by 3")
    page.get_by_label("Evaluation").select_option(label="step 1")
    eventually(first).to_have_text("wrong by 1")
    eventually(page.locator(".lead")).to_contain_text("0 % of 1 labelled pairs")
    page.get_by_label("Validation set").select_option(label="nobody's")
    eventually(first).to_have_text("equal scores")
    eventually(page.locator(".lead")).to_contain_text("50 % of 1 labelled pairs")
    assert page.locator(".pair").count() == 1
    assert page.get_by_label("Evaluation").locator("option").count() == 2
    page.context.close()


HOSTILE = [
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 2'><svg onload='window.ran = 3'>",
    "<!-- <script> --> ]]> {{ 7 * 7 }} ${window.ran = 4}",
    "javascript:window.ran=5 &lt;b&gt; \" ' `",
    "a\u0000b\u0007c\u001b[31mred\u007f\r\n\tend",
    "right \u202eto left\u202c \u2066iso\u2069 \u200bzero",
    "half \ud83d a pair \udc00",
    "\u0645\u0631\u062d\u0628\u0627 \U0001f600 e\u0301 \ufdfd",
    "x" * 200_000,
    "",
]


def test_hostile_texts_run_nothing_and_are_shown_as_they_are(
    opened: Opened, tmp_path: Path
) -> None:
    records = [
        plain(
            step,
            text,
            text,
            None,
            rewards={text[:50]: 1.0},
            finish_reason=text[:50],
            source=text[:50],
            columns={text[:50]: text[:2000]},
            media=[text[:50]],
            messages=[{"role": text[:50], "content": text[:2000], text[:20]: text[:50]}],
            tokens={"texts": [text], "advantage": [1.0]} if step % 2 else None,
        )
        for step, text in enumerate(HOSTILE, start=1)
    ]
    lines = [json.dumps(record).replace('"score": null', '"score": NaN') for record in records]
    folder = tmp_path / "<script>window.ran = 6<"
    folder.mkdir()
    (folder / "rollouts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "metrics.csv").write_text(
        "step,a/<img src=x onerror=alert(1)>,b\n1,nan,inf\n2,1,-inf\n"
    )
    write_lines(folder / "eval_scores_1.jsonl", [
        {"margins": {text[:20]: -1.0}, "labels": {text[:20]: 1}, "scores0": {text[:20]: 0.0},
         "scores1": {text[:20]: 1.0}, "prompt": text, "candidate0": text, "candidate1": text + "!",
         "info": {text[:20]: text[:50]}}
        for text in HOSTILE
    ])  # fmt: skip
    output = tmp_path / "page.html"
    write_inspector([folder], output)
    for size in (WIDE, NARROW):
        page = opened(output, "curves", size)
        page.wait_for_selector(".curve svg")
        for row, text in enumerate(HOSTILE):
            for part in ("response", "prompt"):
                page.evaluate(f"location.hash = '{part}/{row}'")
                page.wait_for_selector(
                    f'[data-row="{row}"] .part' if part == "response" else ".through .part"
                )
                assert fits(page), (part, text[:40])
        page.evaluate("location.hash = 'pairs'")
        page.wait_for_selector(".pair")
        assert fits(page)
        assert page.evaluate("window.ran") is None
        page.context.close()
    page = opened(output, "response/0")
    page.get_by_role("button", name="Text", exact=True).click()
    shown = page.locator(".response .part:nth-of-type(2) .block")
    assert shown.inner_text() == HOSTILE[0]
    page.evaluate("location.hash = 'response/4'")
    page.wait_for_selector('.response[data-row="4"]')
    page.get_by_role("button", name="Text", exact=True).click()
    assert shown.inner_text() == "a␀b␇c␛[31mred␡␍\n\tend"
    page.evaluate("location.hash = 'response/5'")
    page.wait_for_selector('.response[data-row="5"]')
    assert "⟨U+202E⟩to left⟨U+202C⟩" in shown.inner_text()
    page.evaluate("location.hash = 'response/8'")
    page.get_by_role("button", name="Text", exact=True).click()
    assert len(shown.inner_text()) == 20_000
    page.get_by_role("button", name="Show all 200,000 characters").last.click()
    assert len(shown.inner_text()) == 200_000
    page.context.close()


def test_ten_thousand_responses_open_in_three_seconds(opened: Opened, tmp_path: Path) -> None:
    policy_run(tmp_path, steps=100, per_step=100)
    words = "".join(
        (tmp_path / "rollouts.jsonl").read_text().split('"completion": "')[1:50]
    ).split()
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    for at, line in enumerate(lines):  # as long as a model writes, and no two alike
        line["completion"] += " ".join(
            words[(at * 7 + k * (1 + at % 13)) % len(words)] for k in range(250)
        )
    lines[5_000]["completion"] += " zyzzyva"
    write_lines(tmp_path / "rollouts.jsonl", lines)
    output = tmp_path / "inspect.html"
    write_inspector([tmp_path], output, max_responses=10_400)
    assert output.stat().st_size < 20e6
    page = opened(output, "responses")
    page.wait_for_selector(".item")
    assert page.locator("#found").inner_text() == "10,080 of 10,080 responses"
    taken = busy_seconds(page)
    page.get_by_label("Search prompts and responses").fill("Zyzzyva")
    page.locator("#found", has_text="1 of 10,080").wait_for()
    assert (taken < 3, busy_seconds(page) - taken < 1) == (True, True)
    page.context.close()


def busy_seconds(page: Any) -> float:
    """What the page has computed so far: other work on this machine does not count."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    metrics = {
        one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]
    }
    seconds: float = (
        metrics["ScriptDuration"] + metrics["LayoutDuration"] + metrics["RecalcStyleDuration"]
    )
    return seconds


def test_what_is_left_out_is_said_at_the_top(opened: Opened, tmp_path: Path) -> None:
    policy_run(tmp_path, steps=20, per_step=8)
    told = write_inspector([tmp_path], tmp_path / "inspect.html", max_responses=44)
    note = "44 of 176 responses are in this page, evenly many of each step."
    assert note in told
    page = opened(tmp_path / "inspect.html", "responses")
    assert page.locator(".left-out").inner_text() == note
    page.locator("#found", has_text="44 of 44 responses").wait_for()
    page.context.close()
