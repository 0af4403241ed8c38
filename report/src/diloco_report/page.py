"""``report.html``: the report dictionary as one file that opens without a network.

Style sheet and script are inlined, pictures are SVG (:mod:`diloco_report.drawing.charts`), and a content security policy
forbids the browser to fetch anything or to run any script but this one, known by its hash. All that comes from a run (names,
settings, generated text) is escaped. ``docs/report.md`` describes the dictionary; keys that are missing leave their part out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from diloco_report import changed, compared, html, now
from diloco_report.company import company
from diloco_report.course import course
from diloco_report.drawing import charts
from diloco_report.facts import Report, learners_of, natural, units_of, until_s
from diloco_report.facts import colours as colours_of
from diloco_report.facts import ratio as ratio_of
from diloco_report.islands import islands
from diloco_report.losses import losses
from diloco_report.samples import samples
from diloco_report.units import MISSING, count, decimal, duration, finite, model_size, share, size, times

MAX_OPEN = 16  # fragments whose table is shown without being asked for, while a run goes on
MAX_MEMBERS = 8  # of a merge whose names a table has room for
STILL = (
    "This page does not update itself, because its script does not run in this browser. Reload it for the current "
    "state of the run."
)
_ACCENT, _PLAIN = "var(--accent)", "var(--parallel)"


def write_html(report: Report, path: Path) -> None:
    """Write the page; a reader sees the old file or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    part.write_text(render_html(report), encoding="utf-8", errors="replace")
    os.replace(part, path)


def render_html(report: Report) -> str:
    """Return the page as one file, with the report's data in it."""
    return html.document(_title(report), _header(report), body(parts(report)), html.inlined(html.script(*html.SCRIPT)))


def begin_live(report: Report, actions: str | None = None) -> str:
    """Return the beginning of the same page as a server gives it out, which goes on by itself.

    Its parts follow, as :func:`body` has them, and then :func:`end_live`. So a browser may show the first ones while others are
    still drawn.

    Args:
        report: a run's report as of now.
        actions: the part of :func:`diloco_report.actions.form`, where the server has actions.
    """
    assets = html.linked(("page.js",) if actions is None else ("page.js", "act.js"))
    note = f'<p id="link" class="late" role="status">{STILL}</p>\n{actions or ""}'
    return f'{html.opening(_title(report), _header(report), assets)}{note}<div id="parts">\n'


def end_live(state: str) -> str:
    """Return the end of the page; ``state``: the name of the parts' state, after which the page asks for all that follows."""
    return f'\n</div>\n<div id="state" data-state="{escape(state)}" hidden></div>{html.closing(html.linked(()))}'


def parts(report: Report) -> dict[str, str]:
    """Return the parts of the page by name, in order; of one that the report has nothing for the text is empty."""
    return {name: draw(report) for name, draw in PARTS.items()}


def asset(name: str) -> bytes:
    """Return a file that a served page links to.

    ``page.css``; ``page.js``, which has the script of both pages; ``act.js``, that of actions; ``enter.js``, that of the form
    of a token.
    """
    if name == "page.css":
        return html.style().encode()
    return html.script(*((*html.SCRIPT, "live.js") if name == "page.js" else (name,))).encode()


def body(drawn: Mapping[str, str]) -> str:
    """Return parts as :func:`parts` drew them, each where it is found again by its name."""
    return "\n".join(f'<div class="part" id="part-{name}">{text}</div>' for name, text in drawn.items())


def _title(report: Report) -> str:
    return str(report.get("run", "run"))


def _header(report: Report) -> str:
    preset = escape(str(report.get("preset", "")))
    return f"""{f'<span class="preset">{preset}</span>' if preset else ""}
<button id="theme" type="button">Light or dark</button>"""


def _headline(report: Report) -> str:
    if report.get("now"):
        return now.headline(report)
    learners = learners_of(report)
    traffic = report.get("traffic") or {}
    processed, merged, wall_s = (report.get(key) for key in ("tokens_processed", "tokens_merged", "wall_s"))
    blocked = [learner.get("blocked_fraction") for learner in learners.values()]
    before = f", after {count(report['tokens_before'])}" if report.get("tokens_before") else ""
    worst = max((value for value in blocked if value is not None), default=None)
    ratio, word = times(traffic["ratio"]) if traffic.get("ratio") else (None, "")
    compared = ", ".join(filter(None, (escape(units_of(report)), _against_others(report))))
    bytes_ = f"than data-parallel: {size(traffic.get('bytes_up'))} up, {size(traffic.get('bytes_down'))} down"
    rounds = f"{count(report.get('versions'))} versions from {count(report.get('rounds'))} rounds"
    figures = (
        ("Validation loss", decimal(report.get("val_loss")), "", compared),
        ("Wall time", duration(wall_s), "", f"{count(ratio_of(processed, wall_s))} tokens/s, {len(learners)} learners"),
        ("Tokens merged", share(ratio_of(merged, processed), 1), "", f"{count(merged)} of {count(processed)}{before}"),
        ("Traffic", f"{ratio}×" if ratio else MISSING, word, bytes_),
        ("Steps blocked", share(worst, 2), "at most", rounds),
    )
    return '<div class="figures">\n' + "\n".join(html.figure(*figure) for figure in figures) + "\n</div>"


def _against_others(report: Report) -> str:
    """Return how the loss compares with data-parallel training, or where that was not measured, with n-gram models."""
    loss, others = report.get("val_loss"), compared.references(report) or compared.baselines(report)
    if loss is None or not others:
        return f"began at {decimal(report.get('val_loss_initial'))}"
    name = min(others, key=lambda name: others[name])
    css = "" if loss > others[name] else ' class="good"'
    return f"<span{css}>{compared.above(loss, others[name])}</span> {escape(name)} ({decimal(others[name], 2)})"


def _others_and_traffic(report: Report) -> str:
    others = compared.baselines(report) | compared.references(report)
    losses: dict[str, float | None] = {
        "this run": report.get("val_loss"),
        **{name: others[name] for name in sorted(others, key=lambda name: others[name])},
        "untrained": report.get("val_loss_initial"),
    }
    rows = [(name, loss, decimal(loss), _ACCENT if name == "this run" else _PLAIN) for name, loss in losses.items()]
    learners, traffic, colours = learners_of(report), report.get("traffic") or {}, colours_of(report)
    links: list[tuple[str, float | None, str, str]] = []
    for name, learner in learners.items():
        both = _sum(learner, "bytes_up", "bytes_down")
        links.append((name, both, size(both), colours[name]))
    parallel = ratio_of(traffic.get("bytes_data_parallel"), len(learners))
    rate = ratio_of(parallel, report.get("wall_s"))
    links.append(("data-parallel", parallel, size(parallel), _PLAIN))
    traffic_of_each = (
        html.heading("Bytes over each learner's link")
        + html.note(
            "Sent and received. Data-parallel: a ring all-reduce of bfloat16 gradients at each of the same steps"
            + (f", {size(rate)} each second on every link." if rate else ".")
        )
        + charts.bars(links)
    )
    sentences = compared.sentences(report)
    if sum(finite(loss) for loss in losses.values()) < 2 and not sentences:  # while a run goes on no other model is known
        return f"<section>{traffic_of_each}</section>"
    in_units = f" in {units_of(report)}" if units_of(report) else ""
    models = (
        html.heading("Against other models")
        + html.note(f"Validation loss{in_units}; less is better.")
        + charts.bars(rows)
        + "".join(map(html.note, sentences))
    )
    return f"<section>{html.pair(models, traffic_of_each)}</section>"


def _activity(report: Report) -> str:
    activity = {
        str(name): [(float(start_s), float(stop_s), str(state)) for start_s, stop_s, state in spans]
        for name, spans in sorted(
            ((report.get("series") or {}).get("activity") or {}).items(), key=lambda item: natural(str(item[0]))
        )
    }
    if not activity:
        return ""
    seen = {state for spans in activity.values() for _, _, state in spans}
    legend = html.legend((state, f"var(--state-{state})") for state in charts.STATES if state in seen)
    return html.section(
        "What each learner did",
        "Steps continue while the learner sends. A gap: the learner was not heard. " + charts.horizontal(until_s(report)),
        legend + html.wide(charts.timeline(activity, until_s(report)), newest=True),
    )


def _merges(report: Report) -> str:
    rounds: Sequence[Mapping[str, Any]] = (report.get("series") or {}).get("merges") or []
    colours = colours_of(report)
    for name in sorted({str(member[0]) for merged in rounds for member in merged["members"]} - set(colours), key=natural):
        colours[name] = "var(--soft)"
    picture, drawn = charts.merges(rounds, colours, until_s(report))
    every = int((report.get("series") or {}).get("merges_every") or 1)
    known = _known_from(report) if (report.get("series") or {}).get("merges_missed") else ""
    some = f" Only {drawn} of {every * len(rounds)} are drawn." if 0 < drawn < every * len(rounds) else ""
    return html.section(
        "Who was in each merge",
        "One column of marks for each version of a fragment, one mark for each learner; grey: it had no part. Pale: its "
        "offer was made from an older version. Point at a mark for weights and times. "
        f"{charts.horizontal(until_s(report))}{some}{known}",
        html.toggles(colours.items()) + html.wide(picture, newest=True),
    )


def _known_from(report: Report) -> str:
    """Say from where the merges are known, where the log had dropped some before they were read."""
    series = report["series"]
    return (
        f" {count(series['merges_missed'])} older versions are missing: the log had dropped them before a coordinator "
        f"read them, most recently at {duration(series.get('merges_missed_until_s'))}."
    )


def _learners(report: Report) -> str:
    learners, colours = learners_of(report), colours_of(report)
    if not learners:
        return ""
    lives = bool(report.get("now"))
    head = ("learner", *(("state", "heard", "loss", "tokens/s") if lives else ()), "steps", "step", "tokens", "merged", "lost")
    placed = any(learner.get("device") for learner in learners.values())
    head += ("busy", "blocked", "up", "down", "in versions", "missed", *(("device",) if placed else ()))
    rows = [
        [
            f'<i style="background:{colours[name]}"></i>{escape(name)}',
            *(_doing(learner) if lives else ()),
            count(learner.get("steps")),
            f"{decimal(learner.get('step_s'))} s",
            count(learner.get("tokens_processed")),
            share(ratio_of(learner.get("tokens_merged"), learner.get("tokens_processed")), 1),
            count(learner.get("tokens_lost")),
            share(learner.get("busy_fraction"), 1),
            share(learner.get("blocked_fraction"), 2),
            size(learner.get("bytes_up")),
            size(learner.get("bytes_down")),
            count(learner.get("rounds_merged")),
            count(learner.get("rounds_missed")),
            *((_place(learner),) if placed else ()),
        ]
        for name, learner in learners.items()
    ]
    return html.section("Learners", "", html.wide(html.table(head, rows, of="learners")))


def _place(learner: Mapping[str, Any]) -> str:
    """Return what a learner computes on, and where."""
    return escape(" on ".join(str(learner[key]) for key in ("device", "host") if learner.get(key)) or MISSING)


def _doing(learner: Mapping[str, Any]) -> tuple[str, ...]:
    state = str(learner.get("state", ""))
    css = f"var(--state-{state})" if state in charts.STATES else "var(--muted)"
    named = f'<i style="background:{css}"></i>{escape(state)}'
    return named, now.ago(learner.get("seen_s_ago")), decimal(learner.get("loss")), count(learner.get("tokens_per_s"))


def _fragments(report: Report) -> str:
    fragments: Sequence[Mapping[str, Any]] = report.get("fragments") or []
    if not fragments:
        return ""
    lives, rounds = bool(report.get("now")), now.rounds(report)
    head = ("fragment", "parameters", "merged by", "owner", *(("epoch", "round", "last merge", "of") if lives else ()))
    head += ("versions", "tokens merged", "state")
    rows = [
        [
            str(int(fragment.get("fragment", 0))),
            count(fragment.get("parameters")),
            "average" if fragment.get("embedding") or fragment.get("state") else "direction",
            escape(str(fragment.get("owner", ""))),
            *(_last_merge(fragment, rounds) if lives else ()),
            count(fragment.get("versions")),
            count(fragment.get("tokens_merged")),
            f"<code>{escape(str(fragment.get('state_hash', ''))[:16])}</code>",
        ]
        for fragment in fragments
    ]
    state, trained = (
        sum(fragment.get("parameters") or 0 for fragment in fragments if bool(fragment.get("state")) is kind)
        for kind in (True, False)
    )
    shown = " open" if lives and len(fragments) <= MAX_OPEN else ""
    return html.section(
        "Fragments",
        f"{len(fragments)} fragments of {model_size(trained, state)}. The state is the start of the hash of a fragment's last "
        "version, which is the same on every machine.",
        f"<details{shown}><summary>Show all</summary>{html.wide(html.table(head, rows, of='fragments'))}</details>",
    )


def _last_merge(fragment: Mapping[str, Any], rounds: Mapping[int, str]) -> tuple[str, ...]:
    members = [str(name) for name in fragment.get("members") or []][:MAX_MEMBERS]
    others = int(fragment.get("members_count") or len(members)) - len(members)
    shown = ", ".join(members) + (f" and {others} more" if others > 0 else "")
    opened = rounds.get(int(fragment.get("fragment", 0)), MISSING)
    return count(fragment.get("epoch")), opened, duration(fragment.get("merged_at_s")), escape(shown)


def _data(report: Report) -> str:
    data: Mapping[str, Any] = report.get("data") or {}
    shares: Sequence[Mapping[str, Any]] = data.get("shares") or []
    own: Mapping[str, Any] = data.get("own") or {}
    if not shares and not own:
        return ""
    notes = [
        f"{name} trained on data of its own: {count(tokens)} merged tokens are not accounted for."
        for name, tokens in own.items()
    ]
    notes += [str(error) for error in data.get("errors") or []]
    head = ("share", "trained by", "batches", "in every fragment", "in none", "trained again")
    rows = [
        [
            str(int(row.get("share", 0))),
            escape(", ".join(str(name) for name in row.get("learners") or [])),
            *(count(row.get(key)) for key in ("trained", "merged", "lost", "repeated")),
        ]
        for row in shares
    ]
    each = f"{'at most ' if data.get('tokens_vary') else ''}{count(data.get('batch_tokens'))} tokens each"
    return html.section(
        "Data",
        f"What became of the batches, of {each}, by share of the data: merged into "
        "every fragment, merged into none, and trained again because a learner died before they were merged.",
        html.wide(html.table(head, rows, of="data")) + _epochs(data) + "".join(map(html.note, notes)),
    )


def _epochs(data: Mapping[str, Any]) -> str:
    """Draw how often the merged tokens go over each source of a mix."""
    epochs: Mapping[str, Any] = data.get("epochs") or {}
    rows = [(escape(str(name)), decimal(value, 2)) for name, value in epochs.items()]
    return html.subhead("Epochs by source") + html.table(("source", "epochs"), rows, of="epochs") if rows else ""


def _values(report: Report) -> str:
    values: Mapping[str, Any] = report.get("values") or {}
    initial: Mapping[str, Any] = report.get("values_initial") or {}
    if not values:
        return ""
    rows = [(escape(name), decimal(value, 4), decimal(initial.get(name), 4)) for name, value in values.items()]
    text = (
        "Of the global model at the end and as it was initialised: its losses on named validation sets, its metrics there, and "
    )
    return html.section(
        "Values",
        f"{text}those of the task's own.",
        html.wide(html.table(("value", "at the end", "at first"), rows, of="values")),
    )


# --- small parts ----------------------------------------------------------------------------------------------------


def _sum(values: Mapping[str, Any], *keys: str) -> float:
    return float(sum(values.get(key) or 0 for key in keys))


PARTS: dict[str, Callable[[Report], str]] = {
    "state": now.state,
    "headline": _headline,
    "alerts": now.alerts,
    "loss": losses,
    "sample": samples,
    "values": _values,
    "others": _others_and_traffic,
    "course": course,
    "activity": _activity,
    "merges": _merges,
    "islands": islands,
    "regions": company,
    "learners": _learners,
    "syncers": now.syncers,
    "refusals": now.refusals,
    "storage": now.storage,
    "fragments": _fragments,
    "events": now.events,
    "data": _data,
    "settings": changed.settings,
    "changes": changed.changes,
}
