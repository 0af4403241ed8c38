"""Cuts and heals of emulated links become events, each once."""

from __future__ import annotations

from diloco_ops.cuts import Cuts


def links(**states: str) -> dict[str, dict[str, str]]:
    return {name.replace("_", "-"): {"state": state} for name, state in states.items()}


def test_each_cut_and_each_heal_is_told_once() -> None:
    cuts = Cuts()
    assert cuts.look(links(us_eu="up", eu_us="up", us_ap="up")) == []
    assert cuts.look(links(us_eu="cut", eu_us="cut", us_ap="up")) == [("links eu-us, us-eu", "are cut")]
    assert cuts.look(links(us_eu="cut", eu_us="cut", us_ap="up")) == []
    assert cuts.look({}) == []  # the relay does not answer: nothing is known to have changed
    assert cuts.look(links(us_eu="cut", eu_us="up", us_ap="cut")) == [
        ("link us-ap", "is cut"),
        ("link eu-us", "is healed"),
    ]
