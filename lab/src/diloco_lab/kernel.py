"""The rounds of the fast mode, compiled: what happens to every learner and fragment, event by event.

:func:`play` goes on until it needs what only Python has, and says what that is (an :class:`Ask`); called again, it goes on from
where it was. All that it knows is in the arrays of :class:`World`. Nothing is changed before everything that a change needs is
known, so that what was asked for can be asked for in the middle of anything.

Of a round there are three events: it opens, it closes, its version is committed. Beside them there are answers at a later
boundary than the announcement's, and learners that begin again with the log. Of an offer only the newest three of a learner
matter: a learner sends one of a fragment at a time, so the one before the newest has arrived, and what has arrived either is in
the next version or will be in none; the third is one that is being merged while the other two are made.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from diloco_lab.cluster import MICROS, NEVER_US

Records = NDArray[Any]
IDLE, OPEN, MERGING = 0, 1, 2
KEPT_OFFERS = 3
_UNKNOWN = -1
# without NRT: nothing is allocated, and counting references to a world's arrays took most of the time
_OPTIONS = {"cache": True, "error_model": "numpy", "boundscheck": False, "_nrt": False}


class Ask(IntEnum):
    """What :func:`play` wants."""

    NOTHING = 0  # it is done
    LIFE = 1  # of a learner (of all: -1), up to a time
    WAIT = 2  # the learner waits for a fragment's version that comes at a time: when does it go on?
    ROOM = 3  # for more versions on their way to learners
    TELL = 4  # nothing: a fragment's version was committed


def _dtype(whole: str, real: str = "") -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in whole.split()] + [(name, np.float64) for name in real.split()])


# settings, in units of the simulation, and other modules' constants, which compiled in would outlive a change of theirs;
# ``pace_s``: all learners' step time, 0 if they differ
RUN = _dtype(
    "until_us clock_us answer_us commit_us steps max_versions max_staleness learners_wait pulse_us member_bytes "
    "tells versions members",
    "late overlap nothing weight default_step_s pace_s",
)
# a learner: of what is known of its life the number of stretches and the end; after how many steps it waits; its link
LINE = _dtype(
    "known now_us steps limit delay_us up_free_us down_free_us bytes_up bytes_down cuts gone loads load", "bits_per_s"
)
# as :class:`diloco_lab.life.Stretch`, with tokens of a step and of the last one, and what was done before
STRETCH = _dtype(
    "start_us end_us steps step_us tokens last_tokens steps_before tokens_before silent_us heard_us absent", "average_s"
)
SPAN = _dtype("begin_us end_us")
LOAD = _dtype("at_us restarted")  # or only away
# ``next_us``: of its next event; ``later_us``: not after the first answer at a later boundary; ``todo``: to be looked at
FRAGMENT = _dtype(
    "version phase opened_us quorum_us next_us later_us todo first_due offer_bytes record_bytes", "quorum_s sync_s"
)
# what a learner holds of a fragment, as :class:`diloco.core.books.Books` counts it: kept are those of what it held when it
# applied its base, from_ and version_step what it had done by then; offers up to ``forgotten`` are not on its books any more.
# Then what syncers know: the version heard of, and from which step on; when that makes a round due; the offers merged last and
# being merged. The learner answers ``round`` again at ``again_us``, or at the first boundary after ``after_us``; ``coming``
# versions are on their way, of which the last may be ``unplaced``: it is not known yet when it is applied.
WORK = _dtype(
    "base_version kept_steps kept_tokens from_steps from_tokens after forgotten number answered carried_since "
    "version_step offered_us encoded_us sent_us heard heard_step ready_us cursor merged_tokens chosen round again_us after_us "
    "first coming unplaced"
)
# as :class:`diloco.core.books.Outstanding` counts it
OFFER = _dtype("round after base_version steps tokens arrives_us held_steps held_tokens", "kept")
# a version on its way: the learner's offer in it (0: none), when it comes and is applied, and what was done by then
COMING = _dtype("version number round arrives_us at_us steps tokens")


class World(NamedTuple):
    """All of it; by fragment, then by learner, then in order of time."""

    run: Records  # one
    quorum: Records  # of the open round, by learners alive
    lines: Records
    stretches: Records
    cuts: Records  # of the link
    gone: Records  # in which syncers take the learner for dead
    loads: Records  # when it begins again with the log
    fragments: Records
    works: Records
    offers: Records  # by number modulo KEPT_OFFERS
    coming: Records  # rings from ``first`` on
    times_us: Records  # by learner, for what is counted at the moment
    paces_s: Records


# ---- a learner's life


@njit(**_OPTIONS)
def _known(world, m, at_us):
    """Whether its life is known at a time, as far as it is decided: it may wait, or the simulation end."""
    line = world.lines[m]
    return line.now_us > at_us or line.now_us > world.run[0].until_us or line.steps >= line.limit


@njit(**_OPTIONS)
def _index(world, m, at_us):
    """Of the stretch that a time is in."""
    low, high = 0, world.lines[m].known
    while low < high:
        middle = (low + high) >> 1
        if world.stretches[m, middle].start_us <= at_us:
            low = middle + 1
        else:
            high = middle
    return low - 1


@njit(**_OPTIONS)
def _done(world, m, at_us):
    """Steps and tokens done by a time."""
    i = _index(world, m, at_us)
    if i < 0:
        return 0, 0
    stretch = world.stretches[m, i]
    if not stretch.steps:
        return stretch.steps_before, stretch.tokens_before
    if at_us >= stretch.end_us:
        return _all_done(stretch)
    done = min((at_us - stretch.start_us) // stretch.step_us, stretch.steps - 1)
    return stretch.steps_before + done, stretch.tokens_before + done * stretch.tokens


@njit(**_OPTIONS)
def _all_done(stretch):
    if not stretch.steps:
        return stretch.steps_before, stretch.tokens_before
    tokens = (stretch.steps - 1) * stretch.tokens + stretch.last_tokens
    return stretch.steps_before + stretch.steps, stretch.tokens_before + tokens


@njit(**_OPTIONS)
def _boundary(world, m, after_us):
    """The first boundary after a time that is known, and the steps and tokens done by then."""
    i = _index(world, m, after_us)
    if i < 0:  # long ago, and forgotten
        stretch = world.stretches[m, 0]
        return stretch.start_us, stretch.steps_before, stretch.tokens_before
    stretch = world.stretches[m, i]
    if stretch.steps:
        done = (after_us - stretch.start_us) // stretch.step_us + 1
        if done < stretch.steps:
            at_us = stretch.start_us + done * stretch.step_us
            return at_us, stretch.steps_before + done, stretch.tokens_before + done * stretch.tokens
    steps, tokens = _all_done(stretch)
    return stretch.end_us, steps, tokens


@njit(**_OPTIONS)
def _step_us(world, m, step):
    """When so many steps are done; never, if it waits before or the simulation ends."""
    line = world.lines[m]
    if line.steps < step:
        return NEVER_US if line.now_us > world.run[0].until_us or line.steps >= line.limit else _UNKNOWN
    low, high = 0, line.known - 1
    while low < high:
        middle = (low + high) >> 1
        stretch = world.stretches[m, middle]
        if stretch.steps_before + stretch.steps < step:
            low = middle + 1
        else:
            high = middle
    stretch = world.stretches[m, low]
    done = step - stretch.steps_before
    return stretch.end_us if done == stretch.steps else stretch.start_us + done * stretch.step_us


@njit(**_OPTIONS)
def _average_s(world, m, at_us):
    """Its moving average of step times, as a syncer has heard it."""
    at_us -= world.lines[m].delay_us
    i = _index(world, m, at_us)
    if i < 0:
        return 0.0
    stretch = world.stretches[m, i]
    done = _done(world, m, at_us)[0] - stretch.steps_before
    if not done:
        return stretch.average_s
    step_s = stretch.step_us / MICROS
    if not stretch.average_s:
        return step_s
    return step_s + (stretch.average_s - step_s) * (1.0 - world.run[0].weight) ** float(done)


@njit(**_OPTIONS)
def _spans_before(spans, count, at_us):
    """How many of the spans have begun by a time."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if spans[middle].begin_us <= at_us:
            low = middle + 1
        else:
            high = middle
    return low


@njit(**_OPTIONS)
def _live(world, m, at_us):
    """Whether syncers take it for alive."""
    begun = _spans_before(world.gone[m], world.lines[m].gone, at_us)
    return begun == 0 or at_us >= world.gone[m, begun - 1].end_us


@njit(**_OPTIONS)
def _live_changes_us(world, after_us):
    """When, after a time, some learner is taken for dead, or for alive again."""
    at_us = NEVER_US
    for m in range(world.lines.size):
        count = world.lines[m].gone
        if count:
            begun = _spans_before(world.gone[m], count, after_us)
            if begun < count:
                at_us = min(at_us, world.gone[m, begun].begin_us)
            if begun and world.gone[m, begun - 1].end_us > after_us:
                at_us = min(at_us, world.gone[m, begun - 1].end_us)
    return at_us


@njit(**_OPTIONS)
def _quorum(world, at_us):
    """Learners that have to answer."""
    live = 0
    for m in range(world.lines.size):
        live += _live(world, m, at_us)
    return world.quorum[live]


# ---- a learner's link


@njit(**_OPTIONS)
def _open_us(world, m, at_us):
    """As :meth:`diloco_lab.network.Way.open_us`."""
    for i in range(world.lines[m].cuts):
        cut = world.cuts[m, i]
        if cut.begin_us <= at_us < cut.end_us:
            at_us = cut.end_us
    return at_us


@njit(**_OPTIONS)
def _sent_us(world, m, begin_us, size_bytes):
    """When a body is on the link, as :meth:`diloco_lab.network.Way.send` and :meth:`diloco_lab.cluster.Link.sending_us`."""
    return _open_us(world, m, begin_us) + round(size_bytes * 8 / world.lines[m].bits_per_s * MICROS)


@njit(**_OPTIONS)
def _send_up(world, m, at_us, size_bytes):
    line = world.lines[m]
    line.bytes_up += size_bytes
    line.up_free_us = _sent_us(world, m, max(at_us, line.up_free_us), size_bytes)
    return _open_us(world, m, line.up_free_us + line.delay_us)


@njit(**_OPTIONS)
def _send_down(world, m, at_us, size_bytes):
    line = world.lines[m]
    line.bytes_down += size_bytes
    line.down_free_us = _sent_us(world, m, max(at_us, line.down_free_us), size_bytes)
    return _open_us(world, m, line.down_free_us + line.delay_us)


@njit(**_OPTIONS)
def _announced_us(world, m, now_us):
    """When it hears of a round; an announcement is repeated until it passes."""
    return _open_us(world, m, _open_us(world, m, now_us) + world.lines[m].delay_us)


@njit(**_OPTIONS)
def _heard_us(world, m, at_us):
    """When syncers hear of something: of what is not told at once, by the first pulse that passes."""
    line, pulse_us = world.lines[m], world.run[0].pulse_us
    while True:
        passes_us = _announced_us(world, m, at_us)
        if passes_us == at_us + line.delay_us:
            return passes_us
        at_us = -(-max(_open_us(world, m, at_us), passes_us - line.delay_us) // pulse_us) * pulse_us


# ---- a learner's books


@njit(**_OPTIONS)
def settle(world, p, m, now_us):
    """Apply what has come by a boundary that is past."""
    work, room = world.works[p, m], world.coming.shape[2]
    while work.coming and world.coming[p, m, work.first].at_us <= now_us:
        came = world.coming[p, m, work.first]
        work.first, work.coming = (work.first + 1) % room, work.coming - 1
        if came.version == work.base_version + 1:
            _apply(world, p, m, came)


@njit(**_OPTIONS)
def _apply(world, p, m, came):
    run, work = world.run[0], world.works[p, m]
    steps = work.kept_steps + came.steps - work.from_steps
    tokens = work.kept_tokens + came.tokens - work.from_tokens
    factor = 0.0
    if not came.number:
        if work.carried_since < 0:
            work.carried_since = work.base_version
        if tokens and came.version - work.carried_since <= run.max_versions:
            factor = run.late
        for number in range(max(work.forgotten, work.number - KEPT_OFFERS) + 1, work.number + 1):
            offer = world.offers[p, m, number % KEPT_OFFERS]
            offer.held_steps, offer.held_tokens = int(factor * offer.held_steps), int(factor * offer.held_tokens)
            offer.kept *= factor
    else:
        if came.number > work.forgotten:
            offer = world.offers[p, m, came.number % KEPT_OFFERS]
            steps, tokens = steps - offer.held_steps, tokens - offer.held_tokens
            in_time = came.round == came.version and offer.kept > run.nothing
            factor = run.overlap if in_time else run.late
        work.after, work.forgotten, work.carried_since = came.number, work.number, -1
    work.kept_steps, work.kept_tokens = int(factor * steps), int(factor * tokens)
    if not work.kept_tokens:
        work.carried_since = -1
    work.base_version, work.from_steps, work.from_tokens = came.version, came.steps, came.tokens


@njit(**_OPTIONS)
def _load(world, m, now_us, restarted):
    """A learner begins again with the log; what it held is lost.

    Syncers count on from where they first heard of its version, unless it is another, or the learner another incarnation.
    """
    steps, tokens = _done(world, m, now_us)
    for p in range(world.fragments.size):
        work, fragment = world.works[p, m], world.fragments[p]
        settle(world, p, m, now_us - 1)
        if restarted or work.base_version != fragment.version:
            work.heard_step = steps
        work.heard, work.version_step = fragment.version, steps
        work.coming, work.forgotten = 0, work.number
        work.after, work.answered, work.carried_since = work.cursor, 0, -1
        work.kept_steps = work.kept_tokens = 0
        work.base_version, work.from_steps, work.from_tokens = fragment.version, steps, tokens
        fragment.todo = True
    if world.run[0].learners_wait:
        limit(world, m)


@njit(**_OPTIONS)
def _due(world, p, version):
    return world.run[0].steps if version else world.fragments[p].first_due


@njit(**_OPTIONS)
def limit(world, m):
    """After how many steps a learner has to wait for a version."""
    least = NEVER_US
    for p in range(world.fragments.size):
        work = world.works[p, m]
        least = min(least, work.version_step + _due(world, p, work.heard))
    world.lines[m].limit = least


# ---- a round opens


@njit(**_OPTIONS)
def _plan_open(world, p):
    """Look when the next round may be due, as things are; a learner whose life is to be known further, or -1."""
    fragment, first_us = world.fragments[p], NEVER_US
    due = _due(world, p, fragment.version)
    for m in range(world.lines.size):
        work = world.works[p, m]
        work.ready_us = NEVER_US
        if work.heard == fragment.version:
            done_us = _step_us(world, m, due + (work.heard_step if fragment.version else 0))
            if done_us == _UNKNOWN:
                return m
            if done_us < NEVER_US:
                work.ready_us = _heard_us(world, m, done_us)
                first_us = min(first_us, work.ready_us)
    fragment.next_us = max(first_us, world.run[0].clock_us)
    return -1


@njit(**_OPTIONS)
def _open(world, p):
    """A round opens, if it is due by now."""
    fragment, now_us = world.fragments[p], world.run[0].clock_us
    ready, later_us = 0, NEVER_US
    for m in range(world.lines.size):
        ready_us = world.works[p, m].ready_us
        if ready_us > now_us:
            later_us = min(later_us, ready_us)
        elif _live(world, m, now_us):
            ready += 1
    if ready < max(1, _quorum(world, now_us)):
        fragment.next_us = min(later_us, _live_changes_us(world, now_us))
        return (Ask.NOTHING, 0, 0, 0)
    for m in range(world.lines.size):
        at_us = _announced_us(world, m, now_us)
        if not _known(world, m, at_us):
            return (Ask.LIFE, 0, m, at_us)
    fragment.phase, fragment.opened_us, fragment.next_us, fragment.todo = OPEN, now_us, NEVER_US, True
    for m in range(world.lines.size):
        work = world.works[p, m]
        work.again_us = work.after_us = NEVER_US
        _answer(world, p, m, fragment.version + 1, _announced_us(world, m, now_us), False)
    return (Ask.NOTHING, 0, 0, 0)


# ---- learners answer


@njit(**_OPTIONS)
def _answer(world, p, m, version, now_us, at_boundary):
    """As :meth:`diloco.member.Member._try_answer`, at an announcement or at a boundary after it."""
    run, fragment, work, line = world.run[0], world.fragments[p], world.works[p, m], world.lines[m]
    settle(world, p, m, now_us)
    work.round = version
    if work.base_version < version - 1:
        if work.coming:
            work.again_us = world.coming[p, m, work.first].at_us
            fragment.later_us = min(fragment.later_us, work.again_us)
        return
    if work.base_version > version - 1 or work.answered >= version:
        return
    if work.coming and world.coming[p, m, work.first].arrives_us < now_us + (not at_boundary):
        return
    if not at_boundary:
        i = _index(world, m, now_us)
        if i >= 0 and world.stretches[m, i].silent_us <= now_us < world.stretches[m, i].heard_us:
            work.after_us = now_us
            return
    if work.sent_us >= now_us:
        work.after_us = work.sent_us
        return
    if work.offered_us >= 0 and (world.lines[m].now_us <= work.offered_us or _boundary(world, m, work.offered_us)[0] > now_us):
        work.after_us = work.offered_us
        return
    work.answered = version
    steps, tokens = _done(world, m, now_us)
    held_steps = work.kept_steps + steps - work.from_steps
    if not held_steps:
        return
    held_tokens = work.kept_tokens + tokens - work.from_tokens
    work.number += 1
    offer = world.offers[p, m, work.number % KEPT_OFFERS]
    offer.round, offer.after, offer.base_version = version, work.after, work.base_version
    offer.steps = offer.held_steps = held_steps
    offer.tokens = offer.held_tokens = held_tokens
    offer.kept = 1.0
    work.offered_us, work.encoded_us = now_us, now_us + run.answer_us
    offer.arrives_us = _send_up(world, m, work.encoded_us, fragment.offer_bytes)
    work.sent_us = offer.arrives_us + line.delay_us


@njit(**_OPTIONS)
def _answer_again(world, p):
    """One of those that answer at a boundary by now."""
    fragment, now_us = world.fragments[p], world.run[0].clock_us
    for m in range(world.lines.size):
        work = world.works[p, m]
        if work.again_us <= now_us:
            work.again_us = NEVER_US
            _answer(world, p, m, work.round, now_us, True)
            fragment.todo = True
            break
    fragment.later_us = NEVER_US
    for m in range(world.lines.size):
        fragment.later_us = min(fragment.later_us, world.works[p, m].again_us)


# ---- a round closes


@njit(**_OPTIONS)
def _sort(values, count):
    """The first values, in place. They are few, or nearly in order."""
    for i in range(1, count):
        value, j = values[i], i
        while j and values[j - 1] > value:
            values[j] = values[j - 1]
            j -= 1
        values[j] = value


@njit(**_OPTIONS)
def _smoothed(value, newest, weight):
    """As :meth:`diloco.core.pace.Average.add`; NaN before the first value."""
    return newest if np.isnan(value) else value + weight * (newest - value)


@njit(**_OPTIONS)
def _step_s(world, now_us):
    """As :meth:`diloco.core.round.Roster.step_s`."""
    if world.run[0].pace_s:
        return world.run[0].pace_s
    paces, count = world.paces_s, 0
    for m in range(world.lines.size):
        if _live(world, m, now_us):
            paces[count] = _average_s(world, m, now_us)
            count += paces[count] > 0.0
    if not count:
        return world.run[0].default_step_s
    _sort(paces, count)
    return (paces[(count - 1) // 2] + paces[count // 2]) / 2


@njit(**_OPTIONS)
def _answers_us(world, p, m):
    """When the learner's answer to the open round arrives; never, if it has given none."""
    work = world.works[p, m]
    if work.number:
        offer = world.offers[p, m, work.number % KEPT_OFFERS]
        if offer.round == world.fragments[p].version + 1 and offer.after == work.cursor:
            return offer.arrives_us
    return NEVER_US


@njit(**_OPTIONS)
def _everybody(world, p, now_us):
    """Whether everybody has answered who can."""
    waits = False
    for m in range(world.lines.size):
        waits |= _answers_us(world, p, m) > now_us and _live(world, m, now_us)
    return not waits


@njit(**_OPTIONS)
def _plan_close(world, p, grace_s):
    """Look when the open round will close, with what is on its way; until when a life has to be known for that, or -1."""
    fragment, count = world.fragments[p], world.lines.size
    arrives_us = world.times_us
    for m in range(count):
        arrives_us[m] = _answers_us(world, p, m)
    _sort(arrives_us, count)
    here, at_us, quorum_us, ends_us = 0, fragment.opened_us - 1, NEVER_US, NEVER_US
    quorum_s, sync_s = 0.0, 0.0 if np.isnan(fragment.sync_s) else fragment.sync_s
    fragment.next_us = NEVER_US
    while True:
        next_us = min(ends_us, _live_changes_us(world, at_us))
        at_us = min(next_us, arrives_us[here]) if here < count else next_us
        if at_us == NEVER_US:
            return -1  # somebody has yet to answer
        for m in range(count):
            if not _known(world, m, at_us):
                return at_us
        while here < count and arrives_us[here] <= at_us:
            here += 1
        if quorum_us == NEVER_US:
            if not here or here < _quorum(world, at_us):
                continue
            quorum_us = at_us
            quorum_s = _smoothed(fragment.quorum_s, (at_us - fragment.opened_us) / MICROS, world.run[0].weight)
        # the window is as long as steps take now, whatever they took at the quorum
        window_s = grace_s(_step_s(world, at_us), quorum_s, sync_s)
        ends_us = quorum_us + round(window_s * MICROS) + 1 if window_s > 0.0 else quorum_us
        if at_us >= ends_us or _everybody(world, p, at_us):
            break
    fragment.next_us, fragment.quorum_us = max(at_us, world.run[0].clock_us), quorum_us
    return -1


@njit(**_OPTIONS)
def _close(world, p):
    """The newest fit offer of each learner is in the version."""
    run, fragment = world.run[0], world.fragments[p]
    fragment.quorum_s = _smoothed(fragment.quorum_s, (fragment.quorum_us - fragment.opened_us) / MICROS, run.weight)
    for m in range(world.lines.size):
        work = world.works[p, m]
        work.chosen = 0
        for number in range(work.number, max(work.cursor, work.number - KEPT_OFFERS), -1):
            offer = world.offers[p, m, number % KEPT_OFFERS]
            if offer.arrives_us <= run.clock_us and offer.after == work.cursor:
                if fragment.version - offer.base_version <= run.max_staleness:
                    work.chosen = number
                break
    fragment.phase, fragment.next_us = MERGING, run.clock_us + run.commit_us


@njit(**_OPTIONS)
def _commit(world, p):
    """The version exists, and goes to all learners. False if there is no room for it on somebody's way."""
    run, fragment, room = world.run[0], world.fragments[p], world.coming.shape[2]
    members = 0
    for m in range(world.lines.size):
        if world.works[p, m].coming == room:
            return False
        members += world.works[p, m].chosen > 0
    fragment.phase, fragment.version, fragment.next_us, fragment.todo = IDLE, fragment.version + 1, NEVER_US, True
    fragment.sync_s = _smoothed(fragment.sync_s, run.commit_us / MICROS, run.weight)
    run.versions, run.members = run.versions + 1, run.members + members
    size_bytes = fragment.record_bytes + run.member_bytes * members
    for m in range(world.lines.size):
        work = world.works[p, m]
        offer = world.offers[p, m, work.chosen % KEPT_OFFERS]
        if work.chosen:
            work.cursor, work.merged_tokens = work.chosen, work.merged_tokens + offer.tokens
        i = _index(world, m, run.clock_us)
        if i >= 0 and world.stretches[m, i].absent and run.clock_us < world.stretches[m, i].end_us:
            continue
        came = world.coming[p, m, (work.first + work.coming) % room]
        came.version, came.number, came.round = fragment.version, work.chosen, offer.round
        came.arrives_us, came.at_us = _send_down(world, m, run.clock_us, size_bytes), NEVER_US
        work.coming, work.unplaced = work.coming + 1, True
    return True


@njit(**_OPTIONS)
def _place(world, p, m):
    """Find out at which boundary the newest version on its way to a learner is applied."""
    work, line, until_us = world.works[p, m], world.lines[m], world.run[0].until_us
    came = world.coming[p, m, (work.first + work.coming - 1) % world.coming.shape[2]]
    if came.at_us == NEVER_US:
        after_us = max(came.arrives_us, work.encoded_us)
        if line.now_us > after_us:
            came.at_us, came.steps, came.tokens = _boundary(world, m, after_us)
        elif not _known(world, m, after_us):
            return (Ask.LIFE, 0, m, after_us)
        elif line.now_us <= until_us and after_us <= until_us:
            return (Ask.WAIT, p, m, after_us)
    work.unplaced = False
    if came.at_us == NEVER_US:  # after the end
        work.coming -= 1
        return (Ask.NOTHING, 0, 0, 0)
    work.heard, work.heard_step, work.version_step = came.version, came.steps, came.steps
    if world.run[0].learners_wait:
        limit(world, m)
    return (Ask.NOTHING, 0, 0, 0)


# ---- one after another


@njit(**_OPTIONS)
def _look(world, p, grace_s):
    """Find out what follows from what has happened to a fragment."""
    fragment = world.fragments[p]
    for m in range(world.lines.size):
        work = world.works[p, m]
        if work.unplaced:
            ask = _place(world, p, m)
            if ask[0] != Ask.NOTHING:
                return ask
        if work.after_us < NEVER_US:
            if world.lines[m].now_us > work.after_us:
                work.again_us = _boundary(world, m, work.after_us)[0]
                fragment.later_us = min(fragment.later_us, work.again_us)
            elif not _known(world, m, work.after_us):
                return (Ask.LIFE, 0, m, work.after_us)
            work.after_us = NEVER_US
    if fragment.phase == IDLE:
        m = _plan_open(world, p)
        if m >= 0:
            return (Ask.LIFE, 0, m, world.lines[m].now_us)
    elif fragment.phase == OPEN:
        at_us = _plan_close(world, p, grace_s)
        if at_us >= 0:
            return (Ask.LIFE, 0, -1, at_us)
    fragment.todo = False
    return (Ask.NOTHING, 0, 0, 0)


@njit(**_OPTIONS)
def _next(world):
    """The next event: when, and what it is about: a learner that loads the log, or a fragment.

    At one moment learners load the log first, then they answer, then rounds open, and at last they close or are committed.
    """
    at_us, loads, answers, about = NEVER_US, False, False, 0
    for m in range(world.lines.size):
        line = world.lines[m]
        if line.load < line.loads and world.loads[m, line.load].at_us < at_us:
            at_us, loads, about = world.loads[m, line.load].at_us, True, m
    for p in range(world.fragments.size):
        if world.fragments[p].later_us < at_us:
            at_us, loads, answers, about = world.fragments[p].later_us, False, True, p
    for closing in (False, True):
        for p in range(world.fragments.size):
            fragment = world.fragments[p]
            if (fragment.phase != IDLE) == closing and fragment.next_us < at_us:
                at_us, loads, answers, about = fragment.next_us, False, False, p
    return at_us, loads, answers, about


@njit(**_OPTIONS)
def play(world, grace_s):
    """Go on with the rounds; (what it wants, of which fragment, of which learner, at what time).

    ``grace_s``: the grace window by the time of a step, until the quorum, and from there to the version, in seconds.
    """
    run = world.run[0]
    while True:
        for p in range(world.fragments.size):
            if world.fragments[p].todo:
                ask = _look(world, p, grace_s)
                if ask[0] != Ask.NOTHING:
                    return ask
        at_us, loads, answers, about = _next(world)
        if at_us > run.until_us:
            return (Ask.NOTHING, 0, 0, 0)
        for m in range(world.lines.size):
            if not _known(world, m, at_us):
                return (Ask.LIFE, 0, -1, at_us)
        run.clock_us = at_us
        if loads:
            line = world.lines[about]
            _load(world, about, at_us, world.loads[about, line.load].restarted)
            line.load += 1
        elif answers:
            _answer_again(world, about)
        elif world.fragments[about].phase == IDLE:
            ask = _open(world, about)
            if ask[0] != Ask.NOTHING:
                return ask
        elif world.fragments[about].phase == OPEN:
            _close(world, about)
        elif not _commit(world, about):
            return (Ask.ROOM, 0, 0, 0)
        elif run.tells:
            return (Ask.TELL, about, 0, 0)
