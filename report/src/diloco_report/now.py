"""The parts of a page that only a run has which goes on: its state as of now, from the report's key ``now``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_report import html
from diloco_report.drawing import charts
from diloco_report.facts import Report, learners_of, natural, ratio
from diloco_report.units import MISSING, count, decimal, duration, finite, lasting, moment, share, size

MAX_EVENTS = 50  # that are shown, of those known
_COUNTED = {
    "message": "message refused",
    "offer": "offer refused",
    "missed": "offer late",
    "heartbeat": "heartbeat dropped",
    "in_vain": "waited for in vain",
}


def state(report: Report) -> str:
    """Draw the run's state below its name: what it does now, or how it ended, and how it began."""
    return _preliminary(report) + _doing(report) + _origin(report.get("origin") or {})


def _preliminary(report: Report) -> str:
    """Say that the final report is yet to be written, where it is, and as of when this one is."""
    if not finite(report.get("preliminary_at_s")):
        return ""
    text = (
        f"Preliminary, as of {moment(report['preliminary_at_s'])} UTC: training has ended, and the run's final checks are "
        "still running. diloco up then writes the final report to report.html in the run's directory; open that file."
    )
    return f'<p class="preliminary" role="status">{text}</p>'


def _origin(origin: Mapping[str, Any]) -> str:
    """Draw when, where, with which software and by which command a run began, as far as that is known."""
    known = [
        f"began {moment(origin['began_at_s'])} UTC" if finite(origin.get("began_at_s")) else "",
        f"on {escape(str(origin['host']))}" if origin.get("host") else "",
        f"diloco {escape(str(origin['version']))}" if origin.get("version") else "",
        f"<code>{escape(str(origin['command']))}</code>" if origin.get("command") else "",
    ]
    said = " · ".join(filter(None, known))
    return f'<p class="origin">{said}</p>' if said else ""


def _doing(report: Report) -> str:
    now, wall_s = report.get("now"), report.get("wall_s")
    if now is None and finite(report.get("preliminary_at_s")):
        return _state("closing", f"training ended after {duration(wall_s)}" if finite(wall_s) else "training has ended")
    if now is None:
        return _state("finished", f"finished after {duration(wall_s)}" if finite(wall_s) else "finished")
    doing, learners = str(now.get("state") or ""), learners_of(report)
    if doing == "waiting":
        heard = f"{len(learners)} learners are heard" if learners else "no learner is heard yet"
        return _state("starting", f"starting: {heard}; they compile their first step, which usually takes 20 s to a minute")
    for_ = f" for {lasting(wall_s)}" if finite(wall_s) else ""
    left = f", {duration(now.get('eta_s'))} left" if finite(now.get("eta_s")) else ""
    return _state({"training": "stepping"}.get(doing, doing), f"{doing}{for_}{left}")


def _state(css: str, text: str) -> str:
    colour = f"var(--state-{css})" if css in charts.STATES else "var(--muted)"
    return f'<p class="state"><i style="background:{colour}"></i>{escape(text)}</p>'


def headline(report: Report) -> str:
    """Draw the run at a glance: losses, tokens, pace, goodput, time left."""
    now = report["now"]
    processed, budget = report.get("tokens_processed"), report.get("tokens_budget")
    losses = [learner["loss"] for learner in learners_of(report).values() if finite(learner.get("loss"))]
    mean = sum(losses) / len(losses) if losses else None
    done = processed / budget if finite(processed) and finite(budget) and budget else None
    figures = (
        ("Validation loss", decimal(report.get("val_loss")), "", f"learners: {decimal(mean)} while training"),
        ("Tokens", share(done, 1), "", f"{count(processed)} of {count(budget)}; {count(report.get('tokens_merged'))} merged"),
        ("Pace", count(now.get("tokens_per_s")), "tokens/s", f"{_working(report)} of {len(learners_of(report))} learners step"),
        (
            "Goodput",
            share(now.get("goodput"), 1),
            "",
            "of all learners' time had a step under way; learners that are down count",
        ),
        (
            "Time left",
            duration(now.get("eta_s")),
            "",
            escape(str(now.get("state", ""))) + (f" for {duration(report['wall_s'])}" if report.get("wall_s") else ""),
        ),
    )
    return '<div class="figures">\n' + "\n".join(html.figure(*figure) for figure in figures) + "\n</div>" + _standing_by(now)


def _working(report: Report) -> int:
    return sum(learner.get("state") in ("stepping", "sending") for learner in learners_of(report).values())


def _standing_by(now: Mapping[str, Any]) -> str:
    """Say that another coordinator leads the run, where one does, or that none answers."""
    if now.get("known_s_ago") is None:
        return ""
    known = lasting(now["known_s_ago"])
    if now.get("silent"):
        return html.note(
            f"No coordinator answers; learners may continue without one. This page shows what a coordinator stored {known} ago."
        )
    return html.note(
        f"This coordinator stands by; another one leads the run. This page shows what that one stored {known} ago."
    )


def alerts(report: Report) -> str:
    """Draw what needs attention: now, or of a run that is over the errors that did not end it."""
    found: Sequence[Mapping[str, Any]] = (report.get("now") or {}).get("alerts") or []
    said = [f"{alert.get('text', '')}, for {lasting(alert.get('since_s'))}" for alert in found[:MAX_EVENTS]]
    said += [f"{name}: {failure}" for name, failure in sorted((report.get("failures") or {}).items(), key=_natural)]
    if not said:
        return ""
    rows = "".join(f"<li>{escape(text)}</li>" for text in said)
    return f'<section class="alerts">{html.heading("Needs attention")}<ul>{rows}</ul></section>'


def _natural(item: tuple[object, object]) -> tuple[str, int, str]:
    return natural(str(item[0]))


def rounds(report: Report) -> dict[int, str]:
    """Return how each fragment's open round does, by fragment: who waits for how many."""
    found: Sequence[Mapping[str, Any]] = (report.get("now") or {}).get("open") or []
    return {
        int(each.get("fragment", 0)): f"{count(each.get('answers'))} of {count(each.get('quorum'))} answers, "
        f"{decimal(each.get('waited_s'), 1)} s"
        for each in found
    }


def syncers(report: Report) -> str:
    """Draw the syncers: what each owns, has merged and refused."""
    found: Mapping[str, Mapping[str, Any]] = (report.get("now") or {}).get("syncers") or {}
    if not found:
        return ""
    head = ("syncer", "state", "fragments", "rounds", "versions", "in", "out", "refused", "heard")
    rows = [
        [
            escape(str(name)),
            escape(str(each.get("state", ""))),
            *(count(each.get(key)) for key in ("fragments", "rounds", "versions")),
            size(each.get("bytes_in")),
            size(each.get("bytes_out")),
            count(each.get("refused")),
            ago(each.get("seen_s_ago")),
        ]
        for name, each in sorted(found.items(), key=lambda item: natural(str(item[0])))
    ]
    return html.section("Syncers", "", html.wide(html.table(head, rows, of="syncers")))


def refusals(report: Report) -> str:
    """Draw what members have refused, missed, dropped, and waited for in vain, by sender."""
    found: Sequence[Mapping[str, Any]] = (report.get("now") or {}).get("refusals") or []
    if not found:
        return ""
    rows = [
        [
            escape(str(each.get("sender", ""))),
            escape(_COUNTED.get(str(each.get("what")), str(each.get("what", "")))),
            escape(str(each.get("reason", ""))),
            count(each.get("count")),
            escape(", ".join(str(member) for member in each.get("by") or [])),
        ]
        for each in found
    ]
    head = ("sender", "what", "reason", "times", "counted by")
    said = "What syncers and the coordinator have counted of each sender since they began. Offers that were late are usual."
    return html.section("Members and their refusals", said, html.wide(html.table(head, rows, of="refusals")))


def storage(report: Report) -> str:
    """Draw how full the streams are that have a bound."""
    found: Sequence[Mapping[str, Any]] = (report.get("now") or {}).get("storage") or []
    if not found:
        return ""
    rows = [
        [
            escape(str(each.get("name", ""))),
            size(each.get("size_bytes")),
            size(each.get("max_bytes")),
            share(ratio(each.get("size_bytes"), each.get("max_bytes"))),
        ]
        for each in found
    ]
    said = (
        "Streams of the server that the leading coordinator uses. When a stream is at its bound, learners continue "
        "and versions wait."
    )
    return html.section("Storage", said, html.wide(html.table(("stream", "holds", "may hold", "full"), rows, of="storage")))


def events(report: Report) -> str:
    """Draw what happened, the newest first."""
    found: Sequence[Mapping[str, Any]] = (report.get("now") or report).get("events") or []
    if not found:
        return ""
    rows = [[duration(event.get("at_s")), escape(str(event.get("text", "")))] for event in reversed(found[-MAX_EVENTS:])]
    more = f"The last {MAX_EVENTS} of {len(found)}." if len(found) > MAX_EVENTS else ""
    return html.section("Events", more, html.wide(html.table(("at", "what"), rows, text=True, of="events")))


def ago(value_s: object) -> str:
    """Format the time since a process was heard, in steps, so that a page does not change for nothing."""
    if not finite(value_s):
        return MISSING
    return "now" if value_s < 3 else f"{lasting(value_s)} ago"
