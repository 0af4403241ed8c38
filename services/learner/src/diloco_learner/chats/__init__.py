"""Conversations as data: JSON lines, rendered by a tokenizer's chat template, packed into rows. docs/data.md has the forms."""
