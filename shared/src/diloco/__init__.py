"""Decoupled DiLoCo: one model, trained over many data centers on ordinary links.

``diloco.core`` decides (pure: no clock, no network, no file), ``diloco.wire`` is what travels, ``diloco.nats`` carries it,
``diloco.member.member`` is a learner's protocol side. None of them needs an accelerator library.
"""

__version__ = "0.2.0"
