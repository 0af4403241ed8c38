"""Credentials of S3 from profiles, as the AWS tools keep them: ``~/.aws/credentials`` and ``~/.aws/config``.

obstore reads the environment, web identity and instance metadata itself, but no profiles. A profile with keys is read here. One
that gets its keys elsewhere (SSO, a role, another program) is left to the library boto3, if that is installed.
"""

from __future__ import annotations

import configparser
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diloco.errors import SettingsError

KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
PLAIN = {"region": "region", "endpoint_url": "endpoint"}
ELSEWHERE = ("sso_session", "sso_start_url", "role_arn", "credential_process")


def of_environment() -> dict[str, Any]:
    """Return obstore's settings that the chosen profile gives; empty where the environment has keys, or there is no profile.

    Raises:
        SettingsError: ``AWS_PROFILE`` names none that is there, or one that needs boto3, which is not installed.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    chosen = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    name = chosen or "default"
    values = _section("AWS_SHARED_CREDENTIALS_FILE", "credentials", name)
    configured = _section("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}")
    if values is None and configured is None:
        if chosen:
            raise SettingsError(f"environment: AWS_PROFILE = {chosen}: there is no such profile in ~/.aws")
        return {}
    found = (configured or {}) | (values or {})
    settings: dict[str, Any] = {own: found[key] for key, own in PLAIN.items() if key in found}
    if os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        settings.pop("region", None)
    if "aws_access_key_id" in found:
        return settings | {own: found[key] for key, own in KEYS.items() if key in found}
    needs = next((key for key in ELSEWHERE if key in found), None)
    if needs is None:
        return settings
    if find_spec("boto3") is None:
        raise SettingsError(f"environment: AWS profile {name!r} gets its keys by {needs}, which needs boto3: pip install boto3")
    import boto3

    keys = boto3.Session(profile_name=name).get_credentials()
    if keys is None:
        raise SettingsError(f"environment: AWS profile {name!r} has no credentials now: renew them (aws sso login)")
    now = keys.get_frozen_credentials()
    token = {"session_token": now.token} if now.token else {}
    return settings | {"access_key_id": now.access_key, "secret_access_key": now.secret_key} | token


def _section(variable: str, file: str, name: str) -> dict[str, str] | None:
    """Return a section of a file of profiles; None: there is none."""
    path = Path(os.environ.get(variable) or Path("~/.aws").expanduser() / file)
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError):
        raise SettingsError(f"environment: {path}: is no file of AWS profiles") from None
    return dict(parser[name]) if parser.has_section(name) else None
