"""``--model`` of ``diloco up`` and ``diloco serve``: fine-tuning of models of ``transformers``."""
