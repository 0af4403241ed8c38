"""The WAN between regions, emulated: one relay process that all of its bytes pass (``docs/wan.md``)."""
