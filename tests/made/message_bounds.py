"""One table of every number in every message: how large it can be, and what becomes of a larger one.

``docs/security.md`` shows the table, and ``tests/shared/test_message_bounds.py`` tries each row: a value at its bound, and one
beyond. A number without a row fails a test there. Where nothing goes by a number beyond what its sender may decide anyway, its
bound is the field's, which the decoder keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import structs
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat
from tests.made.learner_claims import BATCH, BUILT_IN_BOUNDS, ann, chain_with
from tests.made.learner_world import LearnerWorld
from tests.made.log_entries import hash_of, record_of
from tests.made.rounds import offer, round_of
from tests.made.run_settings import CLAIMS, ROUNDS, WORLD, settings_of

from diloco.control.gate import check_owned
from diloco.core.learner.learner import MAX_AHEAD
from diloco.core.log.chain import Chain
from diloco.core.run import leases
from diloco.core.run.gate import Gate, HeartbeatVerdict, check_claims, check_trained
from diloco.core.run.leases import ClaimedShare, ShareClaim
from diloco.core.syncer import claims
from diloco.core.syncer.offer_fit import unfit
from diloco.core.syncer.roster import Roster
from diloco.errors import MessageError
from diloco.member.peer import Layout
from diloco.wire.body import Body, check_body_size
from diloco.wire.control import Announcement
from diloco.wire.entries import RolledBack
from diloco.wire.offers import MergeMember

STEP, TOKENS = 100, 1000  # of the first heartbeat of the learner of these tests, which is a second old
BUDGET = 1_000_000
MORE_STEPS = 1000 + 10_000  # in that second
BEYOND = "refused"
Judge = Callable[[Any], bool]  # whether a value counts


@dataclass(frozen=True)
class NumberBound:
    """The bound of some numbers of a message.

    Attributes:
        message: its kind, or the name of an array in it.
        numbers: the fields, as the message's class calls them.
        most: the bound, for the page.
        beyond: what becomes of a larger number.
        judge: whether a value counts, with ``at`` and ``above``: a value at the bound and one beyond; None: the form's.
    """

    message: str
    numbers: tuple[str, ...]
    most: str
    beyond: str = BEYOND
    judge: Judge | None = None
    at: Any = None
    above: Any = None

    @property
    def row(self) -> str:
        """Return the row of the page."""
        names = ", ".join(f"`{name}`" for name in self.numbers)
        return f"| `{self.message}` | {names} | {self.most} | {self.beyond} |"


def _passes(check: Callable[[], Any]) -> bool:
    try:
        check()
    except MessageError:
        return False
    return True


def _heartbeat(name: str) -> Judge:
    """Judge a heartbeat of another value of a field, a second after the first one."""
    first = learner_heartbeat("ann", STEP, 7, tokens=TOKENS, batch_tokens=10)

    def judge(value: Any) -> bool:
        stated = [value] if isinstance(getattr(first, name), list) else value
        said = structs.replace(first, **{name: stated})
        return _passes(lambda: check_claims(said, first, 1.0, BUDGET))

    return judge


def _trained(ranges: Any) -> bool:
    said = learner_heartbeat("ann", STEP, trained=ranges)
    return _passes(lambda: check_trained(said, settings_of(CLAIMS), BUILT_IN_BOUNDS))


def _incarnation(value: int) -> bool:
    gate = Gate()
    gate.hear(learner_heartbeat("ann"), BUDGET, 0.0)
    gate.admit("ann", 1, 0.0)
    return gate.hear(learner_heartbeat("ann", incarnation=value), BUDGET, 1.0) is HeartbeatVerdict.HEARD


def _step_s(value: float) -> bool:
    roster = Roster(settings_of(ROUNDS))
    for step in range(3):
        roster.hear(learner_heartbeat("ann", step, step_s=value), float(step))
    return roster.step_s(2.0) == value


def _owned(name: str) -> Judge:
    def judge(fragment: int) -> bool:
        stated = [(fragment, 1, 1, 1.0)] if name == "open" else [fragment]
        return _passes(lambda: check_owned(shard_heartbeat("syncer-0", **{name: stated}), 2))

    return judge


def _announced(name: str, counts: Callable[[LearnerWorld, Any], bool] = lambda world, value: True) -> Judge:
    """Judge an announcement of another value of a field, to a learner whose log is at version 0 and whose H is 4."""

    def judge(value: Any) -> bool:
        world = LearnerWorld(settings_of(WORLD))
        said = Announcement(0, 1, 0, "syncer-0", 0.0, False, 0, 4, [])
        heard = _passes(lambda: world.learner.hear(structs.replace(said, **{name: value}), 0.0))
        return heard and counts(world, value)

    return judge


def _unfit(name: str) -> Judge:
    """Judge an offer of another value of a field, to a log at version 5 that has merged offer 1 of ann."""

    def judge(value: Any) -> bool:
        chain = Chain(0, 5, 0, bytes(32), 9, hash_of(5))
        chain.cursors = {"ann": ann(40, 0)}
        made = structs.replace(offer("ann", 4, 6, after=(1, 1)), **{name: value})
        return unfit(made, chain, {}, 4) is None

    return judge


def _claimed(**claim: Any) -> Judge:
    """Judge an offer by the claims' bounds; the value takes the place of None."""

    def judge(value: Any) -> bool:
        stated = {name: value if its is None else its for name, its in claim.items()}
        values: dict[str, Any] = {"steps": 24, "tokens": 24 * BATCH, "data": [(0, 100, 24)]} | stated
        chain = chain_with(ann(600_000, 1000))
        return _passes(lambda: claims.judge(offer("ann", 2, **values), chain, settings_of(CLAIMS), BUILT_IN_BOUNDS))

    return judge


def _without_steps(least: int) -> bool:
    round_ = round_of("ann")
    made = offer("ann", steps=least, tokens=4, data=[])
    return _passes(lambda: round_.refuse(made))


def _body(name: str) -> Judge:
    def judge(value: Any) -> bool:
        return _passes(lambda: check_body_size(structs.replace(Body(100, bytes(32), 0, bytes(8)), **{name: value}), 100, "x"))

    return judge


def _entry(name: str, **changes: Any) -> Judge:
    """Judge an entry of another value of a field, which follows a log at version 3."""
    member = MergeMember("ann", 1, 1, 1, 0, 4, 40, 5, 1.0, [(0, 0, 4)])

    def judge(value: Any) -> bool:
        fields = {"tokens_merged": 40, "tokens_lost": 5} | changes
        members = [] if "rolled_back" in changes or fields.get("entry") == "takeover" else [member]
        if name.startswith("rolled_back."):
            fields["rolled_back"] = structs.replace(changes["rolled_back"], **{name.partition(".")[2]: value})
        elif name.startswith("member."):
            members = [structs.replace(member, **{name.partition(".")[2]: value})]
        else:
            fields[name] = value
        version = fields.pop("version", 4)
        return _passes(lambda: _chain(3).check(record_of(version, *members, **fields)))

    return judge


def _chain(version: int) -> Chain:
    return Chain(0, version, 0, bytes(32), version, hash_of(version))


def _share(name: str) -> Judge:
    def judge(value: int) -> bool:
        entry = structs.replace(ClaimedShare(1, True, 0, 0, 0), **{name: value})
        claim = ShareClaim("ann", 1, [entry]).pack()
        return _passes(lambda: leases.unpack(claim, "ann", 9, settings_of(CLAIMS), BUILT_IN_BOUNDS))

    return judge


def _asked(name: str) -> Judge:
    def judge(value: Any) -> bool:
        asked: dict[str, Any] = {"array": 0, "start": [0], "stop": [4]}
        return Layout((("optimizer/mu", (4,), "float32"),)).slice(**asked | {name: value}) is not None

    return judge


_BACK: dict[str, Any] = {
    "entry": "rollback", "bits": 32, "tokens_merged": 0, "tokens_lost": 0, "rolled_back": RolledBack(1, 2, 4)
}  # fmt: skip
_TAKEOVER: dict[str, Any] = {
    "entry": "takeover",
    "version": 3,
    "body": None,
    "state_hash": hash_of(3),
    "tokens_merged": 0,
    "tokens_lost": 0,
}
_TOKENS_MOST = TOKENS + 1000 * 10  # of a heartbeat with the step of the first one
_FURTHEST = (2 * BUDGET + 8 * BATCH) // (BATCH // 8)  # the end of the batches of a share

BOUNDS: tuple[NumberBound, ...] = (
    NumberBound("heartbeat", ("incarnation",), "the admitted one", "dropped", _incarnation, 1, 2),
    NumberBound(
        "heartbeat", ("step",), "that of its first heartbeat, 1000, and 10,000 for each second since", BEYOND,
        _heartbeat("step"), STEP + MORE_STEPS, STEP + MORE_STEPS + 1,
    ),
    NumberBound(
        "heartbeat", ("steps",), "as `step`", BEYOND, _heartbeat("steps"), STEP + MORE_STEPS, STEP + MORE_STEPS + 1
    ),
    NumberBound(
        "heartbeat", ("tokens",),
        "those of its first heartbeat, and `batch_tokens` for each step since and for 1000 more; twice the budget and 2^27",
        BEYOND, _heartbeat("tokens"), _TOKENS_MOST, _TOKENS_MOST + 1,
    ),
    NumberBound(
        "heartbeat", ("fragment_tokens",), "as `tokens`", BEYOND, _heartbeat("fragment_tokens"), _TOKENS_MOST, _TOKENS_MOST + 1
    ),
    NumberBound(
        "heartbeat", ("lost_tokens",), "as `tokens`", BEYOND, _heartbeat("lost_tokens"), _TOKENS_MOST, _TOKENS_MOST + 1
    ),
    NumberBound("heartbeat", ("batch_tokens",), "2^27", BEYOND, _heartbeat("batch_tokens"), 2**27, 2**27 + 1),
    NumberBound(
        "heartbeat", ("versions",), "twice the budget and 2^27", BEYOND,
        _heartbeat("versions"), 2 * BUDGET + 2**27, 2 * BUDGET + 2**27 + 1,
    ),
    NumberBound(
        "heartbeat", ("trained",), "as many batches as `step` and 1000 more; the shares and ends of an offer's `data`", BEYOND,
        _trained, [(0, 0, STEP + 1000)], [(0, 0, STEP + 1001)],
    ),
    NumberBound(
        "heartbeat", ("step_s",), "twice the usual time that the owner heard", "counts as the bound", _step_s, 2.0, 2.01
    ),
    NumberBound(
        "heartbeat", ("loss", "busy_s", "blocked_s", "bytes_up", "bytes_down", "refused"),
        "the field's: they are shown; `busy_s` can make the sender's own steps count as held up by a link",
    ),
    NumberBound("sample", ("versions",), "the field's: shown beside the text"),
    NumberBound(
        "gauges", ("learning_rate", "gradient_norm", "cores", "memory_bytes", "device_memory_bytes"), "the field's: shown"
    ),
    NumberBound("validation_loss", ("loss",), "finite: shown"),
    *(
        NumberBound("shard", (name,), "indices of the run's fragments", BEYOND, _owned(name), 1, 2)
        for name in ("fragments", "closed", "open")
    ),
    NumberBound(
        "shard", ("incarnation", "number", "revision"),
        "the field's: they order the sender's own heartbeats; a greater revision makes others read the table of owners once",
    ),
    NumberBound(
        "shard", ("rounds", "versions", "refused", "bytes_up", "bytes_down", "crossing", "record_bits", "pace", "offer_bits"),
        "the field's: shown",
    ),
    NumberBound("sender_report", ("entries",), "the field's: shown"),
    NumberBound("presence", ("incarnation", "number", "learners"), "the field's: of the sender's own summaries"),
    NumberBound("coordinator", ("revision",), "the field's: a greater one makes others read the key, whose revision counts"),
    NumberBound("round", ("fragment",), "indices of the run's fragments", BEYOND, _announced("fragment"), 1, 2),
    NumberBound(
        "round", ("version",), "that of the log and 1,000,000", BEYOND, _announced("version"), MAX_AHEAD, MAX_AHEAD + 1
    ),
    NumberBound(
        "round", ("epoch",), "that of the log and 1,000,000 takeovers", BEYOND, _announced("epoch"), MAX_AHEAD, MAX_AHEAD + 1
    ),
    NumberBound(
        "round", ("tokens_processed",), "those of the log, and two mean offers of each learner", "counts as the bound",
        _announced("tokens_processed", lambda world, value: world.learner.accounts.others_tokens == value), 0, 1,
    ),
    NumberBound(
        "round", ("steps",), "the longest interval of the settings", "counts as the bound",
        _announced("steps", lambda world, value: world.learner.fragments[0].steps_between == value), 4, 5,
    ),
    NumberBound("round", ("offer_bits",), "those that the settings allow", BEYOND, _announced("offer_bits"), [], [("us", 16)]),
    NumberBound("round", ("remaining_s",), "the field's: when the round is expected to close, for learners that wait"),
    NumberBound("marker", ("number", "versions"), "the field's: no learner waits for versions that the log has not"),
    NumberBound(
        "marker_answer", ("number", "step", "versions", "size_bytes", "parts"),
        "the field's: an answer of another number counts for nothing, and the files are compared with their hashes",
    ),
    NumberBound("marker_declined", ("number",), "the field's: of another number it counts for nothing"),
    *(
        NumberBound("state_request", (name,), "a slice of the lender's arrays", "not answered", _asked(name), at, above)
        for name, at, above in (("array", 0, 1), ("start", [3], [5]), ("stop", [4], [5]))
    ),
    NumberBound("state_loan", ("step", "versions", "size_bytes"), "the borrower's own layout, whose hash the loan must have"),
    NumberBound("state_part", ("array", "start"), "the slice that was asked for"),
    NumberBound(
        "offer", ("after",), "the cursor's", "missed", _unfit("after"), (1, 1), (1, 2)
    ),
    NumberBound("offer", ("round",), "one more than the log's version", "missed; two beyond: refused", _unfit("round"), 6, 7),
    NumberBound("offer", ("base_version",), "the log's version", "missed; two beyond: refused", _unfit("base_version"), 5, 6),
    NumberBound("offer", ("steps",), "at least 1; one a token", BEYOND, lambda value: _without_steps(1 - value), 0, 1),
    NumberBound(
        "offer", ("tokens",), "those of its steps: the grant's tokens a step, else eight times the task's batch, or 2^27",
        BEYOND, _claimed(tokens=None), 24 * 8 * BATCH, 24 * 8 * BATCH + 1,
    ),
    NumberBound(
        "offer", ("lost_tokens",), "twice the budget and a step, with merged and held tokens; those of the time since genesis",
        BEYOND, _claimed(lost_tokens=None), 1_367_232, 1_367_233,
    ),
    NumberBound(
        "offer", ("data",), "a batch a step; ends within twice the budget; shares of learners that can be",
        BEYOND, _claimed(data=None), [(0, _FURTHEST - 24, 24)], [(0, _FURTHEST - 23, 24)],
    ),
    NumberBound(
        "offer", ("fragment", "incarnation", "number", "bits"),
        "the subject's fragment, the admitted incarnation, the run's precisions; the number only orders the sender's offers",
    ),
    NumberBound("body", ("size_bytes",), "that of its fragment's largest content", BEYOND, _body("size_bytes"), 100, 101),
    NumberBound("body", ("parts",), "that of its size", BEYOND, _body("parts"), 0, 1),
    NumberBound(
        "answer",
        ("incarnation", "number", "after", "round", "base_version", "steps", "tokens", "lost_tokens", "data"),
        "as an offer's: a regional offer is refused if one of its members is",
    ),
    NumberBound("regional_offer", ("fragment", "incarnation", "number", "bits"), "as an offer's"),
    NumberBound("record", ("version",), "that of the log, and one more", BEYOND, _entry("version"), 4, 5),
    NumberBound("record", ("epoch",), "that of the log; of a takeover one more", BEYOND, _entry("epoch", **_TAKEOVER), 1, 2),
    NumberBound("record", ("tokens_merged",), "its members' and those before", BEYOND, _entry("tokens_merged"), 40, 41),
    NumberBound("record", ("tokens_lost",), "its members' and those before", BEYOND, _entry("tokens_lost"), 5, 6),
    NumberBound(
        "record", ("fragment", "bits", "learning_rate", "momentum"),
        "the field's: the entry must fold to the state hash that it states",
    ),
    NumberBound("record", ("committed_at_s", "quorum_s", "round_s"), "the field's: shown"),
    NumberBound(
        "member", ("incarnation", "number", "round", "base_version", "steps", "tokens", "lost_tokens", "weight", "data"),
        "the field's: newer than the cursor; the owner copies them from an offer that it has judged",
    ),
    NumberBound("regional_members", ("incarnation", "number", "members"), "the field's: places in the record's members"),
    *(
        NumberBound("rolled_back", (name,), most, BEYOND, _entry(f"rolled_back.{name}", **_BACK), at, above)
        for name, most, at, above in (("version", "the entry's", 4, 5), ("to_version", "before the log's", 2, 3))
    ),
    NumberBound("rolled_back", ("change",), "the field's: greater than that of the last rollback"),
    NumberBound("repaired", ("sequence", "ends"), "the field's: ends not beyond those before"),
    NumberBound(
        "keyframe", ("fragment", "version", "epoch", "entry_sequence", "tokens_merged", "tokens_lost", "ends"),
        "the field's: its state must have its hash, and an owner's own log its totals",
    ),
    NumberBound(
        "cursor", ("incarnation", "number", "versions", "tokens", "lost_tokens", "steps"), "the field's: as the keyframe's"
    ),
    NumberBound("genesis", ("created_at_s",), "the field's: the founder's clock, which can give learners more time"),
    NumberBound(
        "claim", ("fragment", "epoch", "entry_epoch", "entry_version", "entry_sequence"),
        "the field's: the epoch of a takeover, and an entry that the log has",
    ),
    NumberBound("commit_notice", ("fragment", "version", "epoch", "sequence"), "the field's: of an entry that the log has"),
    NumberBound("grant", ("batch_tokens", "min_step_s"), "the field's: signed by the run's authority"),
    NumberBound("refused_offers", ("fragment", "offers", "number"), "the field's: a syncer's report to a learner"),
    NumberBound(
        "outlier_statement", ("incarnation", "counting", "fragments"),
        "the field's: a syncer's statement, in which only outliers of the run's learners count",
    ),
    NumberBound(
        "seen_outlier", ("incarnation", "fragment", "version", "norm", "threshold", "change"),
        "the field's: a syncer's judgement, by which learners are quarantined",
    ),
    NumberBound("refusals", ("incarnation",), "the field's: of another incarnation it counts for nothing"),
    NumberBound("admission", ("incarnation",), "the field's: the learner's own"),
    NumberBound("share_claim", ("incarnation",), "the field's: the learner's own"),
    NumberBound("claimed_share", ("share",), "shares of learners that can be", BEYOND, _share("share"), 4098, 4099),
    NumberBound("claimed_share", ("next",), "as ends of an offer's `data`", BEYOND, _share("next"), _FURTHEST, _FURTHEST + 1),
    NumberBound("claimed_share", ("since",), "the claim's own revision", BEYOND, _share("since"), 9, 10),
    NumberBound("claimed_share", ("over",), "before `since`", BEYOND, _share("over"), 8, 9),
)  # fmt: skip


def bound_rows() -> list[str]:
    """Return the table of ``docs/security.md``."""
    head = ["| message or array | numbers | at most | beyond |", "|---|---|---|---|"]
    return [*head, *(bound.row for bound in BOUNDS)]
