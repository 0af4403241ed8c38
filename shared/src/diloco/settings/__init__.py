"""Settings: of a run, of a service; presets; validation; loading."""
