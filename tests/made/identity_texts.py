"""A good identity file, in text."""

from __future__ import annotations

# of 32 bytes 1, and of 32 bytes 2: no real secret
SEED = "SUAACAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAN7EY"
PUBLIC_KEY = "UCFIRY65OQE7DFP5KLNS2PF2LVZMUZYJX4OZIEQ36N2IQANUB5XVZ45L"
GOOD_IDENTITY = f"""
format = 1
run = "demo"
role = "learner"
name = "ann"
region = "us"
public_key = "{PUBLIC_KEY}"
seed = "{SEED}"
founder = false
expires = 2999-01-01T00:00:00Z
certificate = "-"
private_key = "-"
ca = "-"
"""
