"""Where a run's weights are published while it goes on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from diloco.settings.places import checked_place, has_scheme
from diloco.settings.section import Section


class PublishSettings(Section):
    """Publishing weights as they are made (storage.md)."""

    to: str = Field(
        "", max_length=1024, description="place below which weights are published: s3://, gs://, az:// or hf://; empty: nowhere"
    )
    every_versions: int = Field(
        24, ge=1, le=1_000_000, description="weights are published when every fragment has so many versions more"
    )
    keep: int = Field(3, ge=1, le=10_000, description="number of published versions that are kept, beside the final weights")
    format: Literal["safetensors", "hf"] = Field(
        "safetensors", description="a safetensors file, or a folder for Hugging Face's libraries if the task has config()"
    )

    @field_validator("to")
    @classmethod
    def _is_a_place(cls, to: str) -> str:
        if to and not has_scheme(to):
            raise ValueError(f"publish.to = {to!r}: expected a place such as s3://BUCKET/FOLDER")
        if to.startswith("https:"):
            raise ValueError("publish.to: a web server takes no files; expected s3://, gs://, az:// or hf://")
        return checked_place(to, "publish.to", known=False)
