"""The page: complete, one file, safe against a stranger's plan."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from foreplan.planner.report.html import render_report

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "<!--",
    "]]>",
    "$script ${title} $$ %s {0}",
    "\u2028\u2029\u202e",
    "&lt;b&gt;",
    "\x1b[31m",
]


class Page(HTMLParser):
    """Checks nesting; keeps attributes, scripts and text by element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self) -> str:
        return " ".join(
            " ".join(t for tag, t in self.texts if tag not in ("script", "style")).split()
        )

    def scripts(self) -> list[str]:
        return [t for tag, t in self.texts if tag == "script"]


@pytest.fixture(scope="module")
def html(plan, verification, timeline, measured):
    return render_report(plan, verification, timeline, measured)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_it_says_what_matters(page):
    text = page.text()
    for said in (
        "llama-2-7b on cuda:0/sms=64, t4, cpu:threads=2,isa=avx2",
        "735.1 ms predicted, 24 % less than even split, the next best.",
        "771.9 ms in a real run, 4.8 % from the prediction, within the 10 % allowed",
        "random weights", "slice of a chip", "emulated link", "not measured",
        "the host had other load during the run",
        "Tight: memory of hosta/t4 (72.6 MiB free), average bits (0.1 free).",
        "rank 1: out of memory at 1decode0.3",
        "rank 1 (hosta/t4) needs 18.2 GiB of 15 GiB",
        "1.0 % faster (measured)",
        "every prompt is padded to prompt_tokens",
        "measured 71 %",
        "10 % more: 6.0 % better (691 ms)",
        "10 % less: nothing gained",
        "in 75 % of 64 draws",
        "layers 15 + 13 + 4 (12 %); even split (6.2 %)",
        "none in time in 6.2 % of draws",
        "linear@int8/bf16/weight_only on t4 (roofline, ×0.5 to ×2): best choice in 90 % once known",
    ):  # fmt: skip
        assert said in text, said


def test_it_asks_nobody_for_anything(html, page):
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html.replace("// ", ""))
    for tag, attributes in page.seen:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "action", "srcset"):
            assert attributes.get(name, "data:,") == "data:,"
        assert not [name for name in attributes if name.startswith("on")]


def test_the_policy_allows_exactly_the_script(page):
    policy = next(a["content"] for tag, a in page.seen if a.get("http-equiv"))
    script = page.scripts()[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.endswith(f"script-src 'sha256-{digest}'")
    assert policy.startswith("default-src 'none'")


def test_data_blocks_are_json(page):
    blocks = [a for tag, a in page.seen if tag == "script" and a.get("type")]
    assert [block["id"] for block in blocks] == ["timeline-data"]
    data = json.loads(page.scripts()[0])
    assert [run["name"] for run in data["timelines"]] == ["predicted", "measured"]


def test_accessible(page):
    assert ("html", {"lang": "en"}) in page.seen
    tags = [tag for tag, _ in page.seen]
    assert tags.count("caption") == tags.count("table") > 4
    assert tags.count("h1") == 1
    for tag, attributes in page.seen:
        if attributes.get("role") == "img":
            assert attributes.get("aria-label"), tag
        if tag == "th":
            assert attributes["scope"] in ("col", "row")
    known = {a["id"] for _, a in page.seen if a.get("id")}
    assert all(a["aria-labelledby"] in known for _, a in page.seen if "aria-labelledby" in a)


def test_same_inputs_same_bytes(plan, verification, timeline, measured, html):
    assert render_report(plan, verification, timeline, measured) == html


def test_a_plan_alone(plan):
    page = Page(render_report(plan))
    assert page.scripts() in ([], ["\n\n"])
    assert "canvas" not in [tag for tag, _ in page.seen]
    assert "Measured" not in page.text()


def test_the_workload_has_no_label_without_a_value(make_plan):
    workload = {"times": {"transfer_s": None, "parts": {}}, "sharded": False, "slack": 0, "seen": 3}
    shown = [
        text.strip() for tag, text in Page(render_report(make_plan(workload=workload))).texts
        if tag == "span" and text.strip() in ("times", "sharded", "slack", "seen")
    ]  # fmt: skip
    assert shown == ["sharded", "seen"]


def test_a_plan_of_another_kind(bare_plan):
    text = Page(render_report(bare_plan)).text()
    assert "tau 4: 1.5 s predicted." in text
    assert "Alternatives" not in text
    assert "local-sgd" in text


def test_a_run_that_is_far_off_says_whether_it_waited(plan, make_verification):
    chosen = make_verification().model_dump(mode="json", by_alias=True)["candidates"][0]
    chosen["measured_s"] *= 1.5
    chosen["error"] = 1 - chosen["predicted_s"] / chosen["measured_s"]
    text = Page(render_report(plan, make_verification(candidates=[chosen]))).text()
    assert "Most of the error is waiting, not work: rank " in text


def test_a_machine_that_is_slow_now_is_told(plan, make_verification):
    chosen = make_verification().model_dump(mode="json", by_alias=True)["candidates"][0]
    assert "Pace is" not in Page(render_report(plan, make_verification())).text()
    chosen["measured_s"] *= 1.5
    chosen["error"] = 1 - chosen["predicted_s"] / chosen["measured_s"]
    chosen["pace"] = chosen["measured_s"] / chosen["predicted_s"]
    chosen["error_at_pace"] = 0.0
    text = Page(render_report(plan, make_verification(candidates=[chosen]))).text()
    assert "at that pace 0 %; profile again." in text
    assert "Error at pace" in text
    assert "Pace is what programs" in text


def test_a_failed_run(plan, make_verification):
    failed = {"name": "chosen", "role": "chosen", "predicted_s": 0.7, "failure": "rank 0 died"}
    run = make_verification(candidates=[failed], passed=False, agreement=[])
    text = Page(render_report(plan, run)).text()
    assert "Not verified : the real run failed: rank 0 died" in text


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_texts_stay_texts(evil, make_plan, make_verification, timeline, plan):
    baseline = [tag for tag, _ in Page(render_report(plan)).seen]
    document = plan.model_dump(mode="json", by_alias=True)
    model = document["model"] | {"name": evil}
    ranks = [
        rank | {"device": evil, "cause_s": {evil: 0.1}, "phase_s": {evil: 0.1},
                "memory_bytes": {evil: 10}}
        for rank in document["predicted"]["ranks"]
    ]  # fmt: skip
    stages = [
        stage | {"device": evil, "kernels": {evil: evil}, evil: evil}
        for stage in document["decision"]["stages"]
    ]
    hostile = make_plan(
        kind=evil, model=model,
        decision={"stages": stages, evil: evil, "x": [evil], "y": {evil: 1}},
        predicted=document["predicted"] | {"ranks": ranks, "metrics": {evil: 1.0}},
        workload={evil: evil}, assumptions=[evil], rejected=[{"name": evil, "reason": evil}],
        alternatives=[
            a | {"name": evil + "." * k} for k, a in enumerate(document["alternatives"])
        ],
        confidence={
            "probability_best": 0.5, "draws": 9, "runner_up": evil, "share": {evil: 0.25},
            "measure_next": [{"program": evil, "device": evil, "source": evil, "low": 0.5,
                              "high": 2.0, "probability_best": 0.9}],
        },
        bound=document["bound"] | {"solver": evil, "status": evil},
        provenance={"foreplan": evil, "costs": evil, "seed": 0, "source_share": {evil: 1.0},
                    "profiles": {evil: evil}},
    )  # fmt: skip
    run = make_verification(
        notes=[evil], kind=evil,
        machine={"cpu": evil, "cores": 1, "load_before": 0.0, "load_after": 0.0},
        agreement=[{"mode": "fast", "passed": False, "exact": False, "details": {evil: evil}}],
        candidates=[
            {"name": "chosen", "role": "chosen", "predicted_s": 1.0, "measured_s": 1.0,
             "ranks": [{"device": evil, "predicted_s": 1.0, "measured_s": 1.0, "error": 0.0,
                        "phases": [{"op": evil, "predicted_s": 1.0, "measured_s": 1.0,
                                    "error": None}],
                        "memory": [{"item": evil, "predicted_bytes": 1, "held_bytes": 1}]}]},
            {"name": evil, "role": "rival", "predicted_s": None, "failure": evil},
        ],
    )  # fmt: skip
    names = {"devices": (evil,) * 3, "ops": (evil, "send", "recv", "decode")}
    drawn = replace(timeline, schedule=replace(timeline.schedule, **names))
    page = Page(render_report(hostile, run, drawn, drawn))
    assert {tag for tag, _ in page.seen} <= {*baseline, "canvas", "button", "noscript", "small"}
    for tag, attributes in page.seen:
        assert not [name for name in attributes if name.startswith("on")], tag
    assert len(page.scripts()) == 2
    json.loads(page.scripts()[0])
    assert "\x1b" not in page.text()
    assert "\u202e" not in page.text()


def test_extreme_numbers(make_plan, plan):
    whole = plan.model_dump(mode="json", by_alias=True)
    document, nothing = whole["predicted"], whole["bound"] | {"lower_s": 0.0}
    zero = {"total_s": 0.0, "low_s": 0.0, "high_s": 0.0, "metrics": {"a_s": -0.0, "b": 1e300}}
    rank = {"device": "x", "compute_s": 0.0, "communication_s": 0.0, "bubble_s": 0.0,
            "memory_bytes": {"weights": 0, "more": 5}, "capacity_bytes": 0}  # fmt: skip
    for ranks in ([rank], []):
        made = make_plan(predicted=document | zero | {"ranks": ranks}, bound=nothing)
        Page(render_report(made))
    huge = rank | {"memory_bytes": {"weights": 1 << 59}, "capacity_bytes": 1, "compute_s": 1e9}
    text = Page(render_report(make_plan(predicted=document | {"ranks": [huge] * 40}))).text()
    assert "exceeded" in text


def test_limits_are_found_by_name(make_plan):
    plan = make_plan(workload={"max_omega": 0.3, "min_average_bits": 4, "max_gizmo": 3})
    text = Page(render_report(plan)).text()
    assert "at most 0.3" in text
    assert "exceeded" in text
    assert "at least 4" in text
    assert text.count("gizmo") == 1  # among the workload's fields only


def luminance(colour):
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_can_be_read(html, scheme):
    style = html.partition("<style>")[2].partition("</style>")[0]
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(blocks) == 3
    colours = {}
    for block in {"light": blocks[:1], "dark": blocks[:2], "print": blocks[::2]}[scheme]:
        colours |= dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block))
    pairs = [(text, ground) for text in ("text", "muted", "accent", "good", "warn", "bad")
             for ground in ("page", "card")]  # fmt: skip
    pairs += [(f"t{k}", f"c{k}") for k in range(9)]
    pairs += [("label-text", "label"), ("wait-text", "wait"), ("muted", "idle")]
    poor = {p: round(r, 2) for p in pairs if (r := contrast(*(colours[n] for n in p))) < 4.5}
    assert not poor


def test_measured_quality_is_shown_against_its_limit(make_plan, make_verification):
    document = make_verification().model_dump(mode="json", by_alias=True)
    document["candidates"][0]["quality"] = {"perplexity": 5.125, "perplexity_increase": 0.25}
    workload = {"batch": 16, "prompt_tokens": 512, "new_tokens": 24, "max_perplexity_increase": 0.2}
    page = render_report(make_plan(workload=workload), make_verification(**document))
    assert "Quality on held-out text" in page
    card = r'Perplexity increase</span><span class="big {}">0.25</span>.*measured, {} allowed'
    assert re.search(card.format("bad", "0.2"), page)
    generous = make_plan(workload=workload | {"max_perplexity_increase": 0.25})
    page = render_report(generous, make_verification(**document))
    assert re.search(card.format("good", "0.25"), page)
    assert "Quality on held-out text" not in render_report(generous, make_verification())
