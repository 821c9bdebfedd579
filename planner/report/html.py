"""`render_report`: one self-contained HTML page about a plan and, if there is one, its real run.

Style, script and data are inlined and a content security policy forbids everything else, so the
page works from a mail attachment and asks no server for anything. Every text of the plan is
escaped. Same inputs, same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from string import Template

from foreplan.cost_models.timeline import Timeline
from foreplan.planner.plan import Plan
from foreplan.planner.report._markup import Html, element, esc, join
from foreplan.planner.report._plan_sections import (
    decision_section,
    foundations_section,
    interval,
    limits_section,
    memory_section,
    metric_cards,
    time_section,
    workload_line,
)
from foreplan.planner.report._run_sections import (
    alternatives_section,
    held_bytes,
    run_cards,
    run_labels,
    run_section,
    verdict,
)
from foreplan.planner.report._timeline_section import timeline_data, timeline_section
from foreplan.planner.report.gantt import gantt_document
from foreplan.planner.report.summary import Label, Summary
from foreplan.planner.report.text import percent, seconds, words
from foreplan.planner.verify.verification import Verification

_FOLDER = Path(__file__).parent
_NOTHING = Html("")


def render_report(
    plan: Plan,
    verification: Verification | None = None,
    predicted_timeline: Timeline | None = None,
    measured_timeline: Timeline | None = None,
) -> str:
    """The page.

    Args:
        plan: what was decided.
        verification: a real run of this plan.
        predicted_timeline: the plan's schedule, simulated.
        measured_timeline: the plan's schedule as it ran.

    Returns:
        A complete HTML document.
    """
    summary = Summary.of(plan)
    labels = [*summary.labels, *run_labels(verification, summary.labels)]
    timelines = [("predicted", predicted_timeline), ("measured", measured_timeline)]
    drawn = {name: gantt_document(timeline) for name, timeline in timelines if timeline is not None}
    script = _read("gantt.js") if drawn else ""
    body = join(
        [
            run_section(plan, verification, summary),
            limits_section(summary.limits),
            decision_section(summary),
            memory_section(plan, summary, held_bytes(verification)),
            time_section(plan, summary),
            timeline_section(drawn),
            alternatives_section(plan, verification),
            foundations_section(plan),
        ]
    )
    footer = f"{words(plan.kind)} plan {plan.digest[:16]} · foreplan {plan.provenance.foreplan}"
    return fill_page(
        page_title=f"{summary.title}: {seconds(plan.predicted.total_s)}",
        kicker=f"{words(plan.kind)} plan",
        title=summary.title,
        headline=summary.headline,
        verdict=verdict(verification),
        labels=labels,
        workload=workload_line(plan),
        cards=_cards(plan, verification),
        body=body,
        footer=footer,
        data=timeline_data(drawn),
        script=script,
    )


def fill_page(
    *,
    page_title: str,
    kicker: str,
    title: str,
    headline: str,
    body: Html,
    footer: str,
    verdict: Html = _NOTHING,
    labels: Sequence[Label] = (),
    workload: Html = _NOTHING,
    cards: Html = _NOTHING,
    data: Html = _NOTHING,
    script: str = "",
) -> str:
    """The complete document of a page of ours; see the module."""
    return Template(_read("template.html")).substitute(
        policy=esc(_policy(script)),
        page_title=esc(page_title),
        style=_read("report.css").rstrip(),
        kicker=esc(kicker),
        title=esc(title),
        headline=esc(headline, 1000),
        verdict=verdict,
        labels=_labels(labels),
        workload=workload,
        cards=cards,
        body=body,
        footer=esc(footer),
        data=data,
        script=script,
    )


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Nothing from anywhere; styles of the page itself, and exactly our script."""
    # The template puts the script between line breaks, and the hash covers those too.
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    allowed = "style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {allowed}; script-src 'sha256-{digest}'"


def _labels(labels: Sequence[Label]) -> Html:
    items = [element("li", element("b", item.word), item.sentence) for item in labels]
    return element("ul", *items, class_="labels") if items else Html("")


def _cards(plan: Plan, verification: Verification | None) -> Html:
    cards = [
        _card("Predicted", seconds(plan.predicted.total_s), f"90 %: {interval(plan)}"),
        *(_card(*card) for card in run_cards(plan, verification)),
    ]
    sure = plan.confidence
    if sure.draws:
        cards.append(
            _card(
                "Chance to be the best",
                percent(sure.probability_best),
                f"of {1 + len(sure.share)} decisions",
            )
        )
    cards += [_card(name.capitalize(), value, "predicted") for name, value in metric_cards(plan)]
    columns = len(cards) if len(cards) < 6 else min((len(cards) + 1) // 2, 5)
    return element("div", *cards, class_="cards", style=f"--columns: {columns}")


def _card(what: str, big: str, more: str, tone: str = "") -> Html:
    number, _, unit = big.rpartition(" ")
    shown = [number, Html(" "), element("small", unit)] if number else [big]
    return element(
        "div",
        element("span", what, class_="what"),
        element("span", *shown, class_=f"big {tone}".strip()),
        element("span", more, class_="more"),
        class_="card",
    )
