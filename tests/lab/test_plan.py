"""Plans: two tiny sites worked by hand, each bad input, what is listed, and what must not get worse."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco_lab.planning.link_settings import ChosenSettings, LinkWay, settle
from diloco_lab.planning.plan import Plan, plan, toml
from diloco_lab.planning.sites import Sites, read
from diloco_lab.published.published import FITTED
from diloco_lab.simulate_command import simulate
from diloco_lab.simulator.network import MEMBER_BYTES, OFFER_BYTES, RECORD_BYTES

EXAMPLE = Path(__file__).parents[2] / "examples" / "sites.toml"
SITE = """chips = 4
tokens_per_s_per_chip = 100
memory_per_chip_bytes = 16e6
price_per_chip_hour = 2.0
chips_per_slice = 1
between_s = inf
"""
# each site takes 400 tokens a second; a step of 2000 is 1000 for each of two learners, 2.5 s
TWO = f"""[model]
parameters = 1e6
tokens = 691_200_000
tokens_per_step = 2000

[sites.a]
{SITE}
[sites.b]
{SITE}
[[links]]
between = ["a", "b"]
bits_per_s = 1e9
delay_s = 0.0
"""
# of 41,667 values (a 24th of a million) with 4 bits: 652 blocks of 34 bytes; and what goes with an offer, and with a version
HEADS = OFFER_BYTES, RECORD_BYTES + 2 * MEMBER_BYTES
OFFER, VERSION = (652 * 34 + head for head in HEADS)
CYCLE_BYTES = 1.07 * 12 * (OFFER + VERSION)  # of two sites each has 12 of 24 fragments
STEP_S = 2.5


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    """A function that plans a text, with replacements."""

    def go(*changes: tuple[str, str], text: str = TWO, **options: bool) -> Plan:
        return plan(given_sites(tmp_path, text, *changes), **options)

    return go


def given_sites(folder: Path, text: str, *changes: tuple[str, str]) -> Sites:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "sites.toml"
    path.write_text(text)
    return read(path)


def way(
    rate: float, *, delay_s: float = 0.0, learners: int = 1, parameters: int = 1_000_000, step_s: float = STEP_S
) -> LinkWay:
    return LinkWay(rate, delay_s, parameters, 2, 2, learners, learners, step_s)


def test_two_sites_by_hand(planned: Any) -> None:
    found = planned()
    chosen = found.chosen
    assert chosen.learners == {"a": 1, "b": 1}
    assert chosen.step_s == {"a": STEP_S, "b": STEP_S}
    assert (chosen.goodput.mean, found.uptime.mean, chosen.utilisation) == (1, 1, 1)
    assert chosen.days.mean == chosen.days.high == pytest.approx(691_200_000 / 800 / 86400)  # ten
    assert chosen.cost.mean == pytest.approx(8 * 2.0 * 240)
    # 16 bits: two bytes a value, and a cycle is 24 steps
    assert chosen.choice == ChosenSettings(bits=16)
    cycle_bytes = 1.07 * 12 * (2 * 83334 + sum(HEADS))
    for link in found.links:
        assert link.bytes_per_day == pytest.approx(cycle_bytes * 86400 / 60)
        assert link.load == pytest.approx(8 * cycle_bytes / (1e9 * 60))
    assert found.bottleneck.kind == "chips"


def test_regions_by_hand(planned: Any) -> None:
    wide = planned(("parameters = 1e6", "parameters = 1e9"), ("16e6", "16e9"), ("bits_per_s = 1e9", "bits_per_s = 1e14"))
    region = wide.regions[0]
    assert wide.chosen.choice.bits == 16
    # two keyframes of 12 bytes a parameter, and after each as many bytes of records; one learner's offers
    assert region.storage_bytes == pytest.approx(48e9 + 2e9)
    # half of the fragments, the other half followed
    assert region.syncer_memory_bytes == pytest.approx(0.5e9 * 16 + 0.5e9 * 8)
    # half a billion values in 60 s: 4.1 ns of the first learner's, of the second's the merge, and 2 bytes that are read
    assert region.syncer_cores == pytest.approx(0.5e9 / 60 * (4.1e-9 + 1 / 3.1e9 + 2 * 0.32e-9))
    assert region.server_cores == pytest.approx(4.5e-9 * (2e9 + 2e9) / 60)
    assert region.syncers == 1
    # short steps: more work than one core does
    fast = planned(
        ("parameters = 1e6", "parameters = 1e9"), ("16e6", "16e9"), ("bits_per_s = 1e9", "bits_per_s = 1e14"), ("2000", "40")
    )
    assert fast.regions[0].syncers == math.ceil(50 * region.syncer_cores) == 3
    assert next(one.value for one in fast.settings if one.name == "shards") == 6


def test_learners_by_hand(planned: Any) -> None:
    # 16 MB of state: four chips of a host have 9.6 MB of room each, so two hold a replica; one host, so no rows leave it
    one, other = planned().islands
    assert (one.site, other.site) == ("a", "b")
    assert (one.chips, one.hosts, one.data, one.fsdp, one.state_bytes, one.state_share) == (4, 1, 2, 2, 8e6, 0.5)
    assert (one.host_bytes, one.host_most_bytes, one.rows_bytes) == (12e6, 16e6, 0)
    assert one.sent_bytes == 2e6  # 16 bits
    # hosts of one chip: each has half of the rows. Of a version of a quarter of the model three others get half of its rows,
    # and for others' offers a host sends the half that it has of theirs
    apart = planned(("chips_per_slice = 1", "chips_per_slice = 1\nchips_per_host = 1")).islands[0]
    assert (apart.hosts, apart.data, apart.fsdp) == (4, 2, 2)
    assert (apart.host_bytes, apart.sent_bytes, apart.rows_bytes) == (3e6, 0.5e6, 4 * (250e3 * 0.5 * 3 + 250e3 * 0.5))


def test_chips_without_room_for_activations_are_said(planned: Any) -> None:
    full = planned(("16e6", "5e6"))  # all four chips together have 20 MB for 16
    assert (full.islands[0].fsdp, full.islands[0].state_share) == (4, 0.8)
    assert any(
        note.startswith("parameters, gradients and optimizer state fill 80% of a chip's memory in a") for note in full.notes
    )
    assert not any("activations" in note for note in planned().notes)


def test_data_parallel_by_hand(planned: Any) -> None:
    together, alone = planned().data_parallel
    assert together.sites == ["a", "b"]
    # 16 Mbit a step, of which a 64th has the step's end for itself: 0.25 ms
    assert together.utilisation == pytest.approx(STEP_S / (STEP_S + 16e6 / 64 / 1e9))
    assert together.days.mean == pytest.approx(10 / together.utilisation)
    assert alone.sites == ["a"]
    assert (alone.utilisation, alone.goodput.mean) == (1, 1)
    assert alone.days.mean == pytest.approx(20)
    assert alone.cost.mean == pytest.approx(4 * 2.0 * 480)
    # a job goes at the pace of its slowest chips: eight as slow as b's
    slow = planned(("[sites.b]\nchips = 4\ntokens_per_s_per_chip = 100", "[sites.b]\nchips = 4\ntokens_per_s_per_chip = 50"))
    assert slow.data_parallel[0].days.mean == pytest.approx(691_200_000 / 400 / 86400, rel=1e-3)
    assert slow.chosen.days.mean == pytest.approx(691_200_000 / 600 / 86400)


def test_one_site_has_no_regions(planned: Any) -> None:
    found = planned(text=TWO[: TWO.index("[sites.b]")])
    assert found.chosen.learners == {"a": 1}
    assert found.links == []
    assert "regions.names" not in [one.name for one in found.settings]
    assert [one.sites for one in found.data_parallel] == [["a"]]
    assert found.regions[0].syncer_memory_bytes == 1e6 / 2 * 16  # of two syncers, the preset's shards


def test_a_link_that_is_full_gives_up_bits_then_steps() -> None:
    assert way(1e9).cycle_bytes(ChosenSettings()) == pytest.approx(CYCLE_BYTES)
    full = 8 * CYCLE_BYTES / (24 * STEP_S)  # bits a second of four bits a value, in 24 steps
    # 8 bits are twice as many bytes, and 16 four times
    assert settle([way(4 / 0.75 * full)], 0.95) == ChosenSettings(bits=16)
    assert settle([way(2 / 0.75 * full)], 0.95) == ChosenSettings(bits=8)
    assert settle([way(full / 0.75)], 0.95) == ChosenSettings(bits=4)
    # a run gives way above 0.8: 30 steps' time for what takes that of 24.
    assert settle([way(1.001 * full)], 0.95) == ChosenSettings(bits=4, steps=30)
    assert settle([way(1e9), way(1.001 * full), way(1e6)], 0.95) == ChosenSettings(bits=4, steps=30)
    assert settle([way(full / 1e5)], 0.95) is None


def test_bytes_at_a_regions_border_are_those_that_were_measured() -> None:
    # docs/performance.md: 6.4M parameters, three regions, of what a ring of three would send in each direction
    ring = 2 * (2 / 3) * 6_400_000 / 2
    for learners, least, most in ((1, 1.13, 1.15), (2, 1.70, 1.715)):
        border = replace(way(1e9, learners=learners, parameters=6_400_000), regions=3)
        assert least <= 2 * border.cycle_bytes(ChosenSettings()) / ring <= most


def test_a_version_must_come_within_the_overlap() -> None:
    # there and back 7.5 s, three steps: of 2 steps' overlap nothing is left, of 4 one
    assert settle([way(1e9, delay_s=3.75)], 0.95) == ChosenSettings(bits=16, overlap_steps=4.0)
    # each of 24 fragments is a step late, in every one of 24 steps
    assert way(1e12, delay_s=3.75).utilisation(ChosenSettings()) == pytest.approx(0.5, rel=1e-3)
    assert way(1e12, delay_s=2.5).utilisation(ChosenSettings()) == pytest.approx(1, rel=1e-3)


def test_large_fragments_are_cut_before_steps_are_given_up() -> None:
    # a 24th of the model takes 3 s, thirty steps: none of it would be in time, were it not cut smaller
    large = way(4e9, parameters=70_000_000_000, step_s=0.1)
    found = settle([large], 0.95)
    assert found is not None
    assert found.fragments > 24
    assert large.load(found) > 0.78  # the link's room is used, where 24 fragments would need steps without end
    whole = large.least_steps(ChosenSettings(), 0.95)
    assert whole is not None
    assert whole > 10 * found.steps


def test_several_learners_are_merged_where_that_saves_steps() -> None:
    three = way(8 * CYCLE_BYTES / (24 * STEP_S) / 0.75, learners=3)  # with one learner it would be three quarters full
    assert three.cycle_bytes(ChosenSettings()) == pytest.approx(1.07 * 12 * (3 * OFFER + VERSION))
    assert three.load(ChosenSettings(merge=True)) == pytest.approx(0.75)
    assert settle([three], 0.95) == ChosenSettings(bits=4, merge=True)
    assert settle([replace(three, bits_per_s=1e9)], 0.95) == ChosenSettings(bits=16)


rates = st.floats(1e4, 1e9)


@settings(max_examples=20, deadline=None)
@given(rate=rates, wider=st.floats(1, 10), delay_s=st.floats(0, 2), learners=st.integers(1, 3))
def test_a_wider_link_never_needs_a_longer_interval(rate: float, wider: float, delay_s: float, learners: int) -> None:
    before = settle([way(rate, delay_s=delay_s, learners=learners)], 0.95)
    after = settle([way(rate * wider, delay_s=delay_s, learners=learners)], 0.95)
    if before is not None:
        assert after is not None
        assert (after.steps, after.overlap_steps) <= (before.steps, before.overlap_steps)
        assert way(rate, delay_s=delay_s, learners=learners).fits(before, 0.95)


def test_more_chips_are_not_slower(planned: Any) -> None:
    days = [
        min(one.days.mean for one in planned(("chips = 4\n", f"chips = {chips}\n")).candidates) for chips in (4, 5, 7, 8, 13)
    ]
    assert days == sorted(days, reverse=True)


def test_the_bottleneck_is_the_thin_link_until_it_is_wide(planned: Any) -> None:
    thin = planned(("bits_per_s = 1e9", "bits_per_s = 50e3"))
    assert thin.chosen.choice.steps > 24
    assert (thin.bottleneck.kind, thin.bottleneck.name) == ("link", "a-b")
    needed = float(thin.bottleneck.why.split("bits needs ")[1].split()[0])
    assert needed == pytest.approx(8 * CYCLE_BYTES / (24 * STEP_S) / 0.8 / 1e9, rel=0.01)
    assert planned(("bits_per_s = 1e9", f"bits_per_s = {1.01e9 * needed}")).bottleneck.kind == "chips"
    assert planned(("bits_per_s = 1e9", f"bits_per_s = {0.98e9 * needed}")).bottleneck.kind == "link"


def test_failures_are_the_bottleneck_where_they_cost_most(planned: Any) -> None:
    found = planned(("chips = 4\n", "chips = 64\n"), ("between_s = inf", "between_s = 20_000"))
    assert (found.bottleneck.kind, found.bottleneck.name) == ("failures", "a")
    # four learners at each site, of 16 chips: one of which fails every 1250 s
    assert found.chosen.learners == {"a": 4, "b": 4}
    assert "every 1250 s" in found.bottleneck.why
    assert "plan.most_learners = 8" in found.bottleneck.why
    assert found.chosen.goodput.low < found.chosen.goodput.mean < found.chosen.goodput.high < 0.97
    assert found.chosen.days.low < found.chosen.days.mean < found.chosen.days.high


def test_memory_is_the_bottleneck_where_it_keeps_learners_large(planned: Any) -> None:
    # a learner fills half of the chips
    found = planned(("chips = 4\n", "chips = 64\n"), ("between_s = inf", "between_s = 20_000"), ("16e6", "0.5e6"))
    assert found.chosen.learners == {"a": 2, "b": 2}
    assert (found.bottleneck.kind, found.bottleneck.name) == ("memory", "a")
    assert "32 chips" in found.bottleneck.why
    assert any("a learner of a fills its memory" in note for note in found.notes)


def test_a_link_that_carries_nothing_leaves_a_site_out(planned: Any) -> None:
    found = planned(("bits_per_s = 1e9", "bits_per_s = 1"))
    assert found.chosen.learners == {"a": 1}
    assert "b is left out: links allow no H at all with it" in found.notes


def test_the_cheapest_leaves_out_dear_chips(planned: Any) -> None:
    dear = ("[sites.b]\n" + SITE, "[sites.b]\n" + SITE.replace("2.0", "5.0"))
    assert planned(dear).chosen.learners == {"a": 1, "b": 1}
    cheap = planned(dear, cheapest=True)
    assert cheap.chosen.learners == {"a": 1}
    assert cheap.chosen.cost.mean == pytest.approx(4 * 2.0 * 480)
    assert any(note.startswith("b is left out") for note in cheap.notes)


def test_memory_and_the_file_limit_learners(planned: Any) -> None:
    # 16 MB a chip and 16 bytes a parameter: a learner needs one chip, or two of half the memory
    learners = [one.learners for one in planned().candidates if len(one.learners) == 2]
    assert {"a": 4, "b": 4} in learners
    less = planned(("16e6", "8e6")).candidates
    assert max(one.learners.get("a", 0) for one in less) == 2
    fixed = planned(("[sites.b]\n", "[sites.b]\nlearners = 3\n"))
    assert {one.learners["b"] for one in fixed.candidates if "b" in one.learners} == {3}


def test_settings_are_those_of_a_run(planned: Any) -> None:
    found = planned(("bits_per_s = 1e9", "bits_per_s = 50e3"))
    values = tomllib.loads(toml(found.settings))["settings"]
    taken = run_settings("decoupled", values)
    assert taken == run_settings("decoupled", {one.name: one.value for one in found.settings})
    assert (taken.learners, taken.tokens, taken.regions.names) == (2, 691_200_000, ["a", "b"])
    assert (taken.round.steps, taken.codec.record_bits) == (found.chosen.choice.steps, 4)


def test_what_is_left_out_is_listed(tmp_path: Path) -> None:
    listed = {one.name: one.value for one in given_sites(tmp_path, TWO, ("delay_s = 0.0", "")).defaults}
    assert listed["links[0].delay_s"] == 0.05
    assert listed["plan.utilisation"] == 0.95
    assert listed["model.bytes_per_parameter"] == 16
    assert listed["sites.a.repair_s"] == FITTED.repair_s
    assert "sites.a.between_s" not in listed  # given
    assert "sites.a.learners" not in listed  # not taken but found
    assert "sites.a.flops_utilisation" not in listed  # of no use here
    flops = given_sites(tmp_path, TWO, ("tokens_per_s_per_chip = 100", "flops_per_chip = 1.5e9"))
    assert {one.name: one.value for one in flops.defaults}["sites.a.flops_utilisation"] == 0.4
    assert flops.sites["a"].chip_tokens_per_s(flops.model) == pytest.approx(100)  # 6e6 operations a token


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[model]", "[modle]", ":1: modle is not a table of such a file (did you mean 'model'?)"),
        ("parameters", "parametres", ":2: model.parametres is unknown (did you mean 'parameters'?)"),
        ("tokens = 691_200_000", "", ":1: model.tokens is missing: token budget"),
        ("tokens = 691_200_000", "tokens = 1.5", ":3: model.tokens = 1.5: "),
        ("tokens = 691_200_000", "tokens = true", ":3: model.tokens = True: "),
        ("[sites.a]\nchips = 4", "[sites.a]\nchips = -4", ":7: sites.a.chips = -4: input should be greater than or equal to 1"),
        ("[sites.a]\nchips = 4", "[sites.a]\nchips = 0", ":7: sites.a.chips = 0: "),
        ("[sites.a]\nchips = 4", "[sites.a]\nchip = 4", ":7: sites.a.chip is unknown (did you mean 'chips'?)"),
        ("[sites.b]", "[sites.B]", "sites: names.1 = 'B'"),
        ("_per_chip = 100", "_per_chip = nan", ":8: sites.a.tokens_per_s_per_chip = nan: "),
        ("between_s = inf", "between_s = -1.0", ":12: sites.a.between_s = -1.0: input should be greater than 0"),
        ("between_s = inf", "repair_s = 0", ":12: sites.a.repair_s = 0: "),
        (
            "between_s = inf",
            "flops_per_chip = 1e9",
            ":6: sites.a needs one of tokens_per_s_per_chip and flops_per_chip, and has both",
        ),
        (
            "tokens_per_s_per_chip = 100",
            "",
            ":6: sites.a needs one of tokens_per_s_per_chip and flops_per_chip, and has neither",
        ),
        (
            "between_s = inf",
            "flops_utilisation = 0.5",
            ":12: sites.a.flops_utilisation applies to flops_per_chip, which is not given",
        ),
        ("chips_per_slice = 1", "chips_per_slice = 5", ":11: sites.a.chips_per_slice = 5 is more than chips = 4"),
        ("chips_per_slice = 1", "", ":6: sites.a.chips_per_slice = 256 is more than chips = 4"),
        (
            "chips_per_slice = 1",
            "chips_per_slice = 2\nchips_per_host = 3",
            ":12: sites.a.chips_per_host = 3: hosts have whole slices, or slices whole hosts; a slice has 2 chips",
        ),
        ("= 16e6", "= 3e6", ":9: sites.a.memory_per_chip_bytes = 3e+06: the model needs 1.6e+07 bytes, 6 slices of 1 chips"),
        ("between_s = inf", "learners = 5", ":12: sites.a.learners = 5 is more than the 4 that 4 slices of memory allow"),
        (
            "[model]",
            "[plan]\nmost_learners = 1\n[model]",
            ":2: plan.most_learners = 1 is fewer than the 2 that sites have at least",
        ),
        ("[model]", "[plan]\nutilisation = 1\n[model]", ":2: plan.utilisation = 1: input should be less than 1"),
        (TWO[TWO.index("[[links]]") :], "", "[[links]] has none between 'a' and 'b'"),
        ('"a", "b"', '"a", "a"', ":23: links[0].between = ['a', 'a']: joins a site to itself"),
        ('"a", "b"', '"a", "bb"', ":23: links[0].between = ['a', 'bb']: no site 'bb' (did you mean 'b'?)"),
        ('"a", "b"', '"a"', ":23: links[0].between = ['a']: "),
        ("bits_per_s = 1e9", "bits_per_s = 0", ":24: links[0].bits_per_s = 0: input should be greater than 0"),
        (
            "delay_s = 0.0",
            'delay_s = 0.0\n[[links]]\nbetween = ["b", "a"]\nbits_per_s = 1e9',
            ":27: links[1].between = ['b', 'a']: is the second link between these sites",
        ),
        ("[[links]]", "[links]", "links expected [[links]], one for each pair of sites"),
        ("[sites.a]", "[sites.a", "not TOML"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(tmp_path: Path, old: str, new: str, expected: str) -> None:
    with pytest.raises(SettingsError) as refused:
        given_sites(tmp_path, TWO, (old, new))
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / 'sites.toml'}")
    assert expected in message


def test_too_many_learners_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"most_learners = 3 is fewer than the 4"):
        given_sites(tmp_path, "[plan]\nmost_learners = 3\n" + TWO.replace("[sites.b]\n", "[sites.b]\nlearners = 3\n"))


def test_the_command() -> None:
    run = CliRunner().invoke(simulate, ["plan", str(EXAMPLE), "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.output)
    assert found["chosen"]["learners"] == {"us": 1, "eu": 1, "ap": 1}
    assert found["bottleneck"]["kind"] == "link"
    assert {"name": "sites.ap.flops_utilisation", "value": 0.4} in [
        {key: one[key] for key in ("name", "value")} for one in found["defaults"]
    ]
    run_settings("decoupled", {one["name"]: one["value"] for one in found["settings"]})
    shown = CliRunner().invoke(simulate, ["plan", str(EXAMPLE)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    for text in ("bottleneck  link (", "us 1, eu 1, ap 1 (this plan)", "data-parallel", "+1.1 % loss", '["us", "eu", "ap"]'):
        assert text in shown.output
