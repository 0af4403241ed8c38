"""A section of a run's settings: what all of them are alike in."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Section(BaseModel):
    """Settings that no one changes once they are made; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    _LATER: ClassVar[frozenset[str]] = frozenset()  # settings that the first runs of this protocol did not have

    @model_serializer(mode="wrap")
    def _as_the_first_runs_were(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out later settings that have their default: a run of before keeps its identity, its members may be older."""
        values: dict[str, Any] = serialize(self)
        return {name: value for name, value in values.items() if name not in self._LATER or value != self._default(name)}

    @classmethod
    def _default(cls, name: str) -> Any:
        """Return a setting's default as it is stored."""
        default = cls.model_fields[name].default
        return default.model_dump() if isinstance(default, Section) else default
