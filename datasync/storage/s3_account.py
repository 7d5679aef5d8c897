"""Who asks, and where: from a cluster's settings and the AWS configuration to an endpoint and keys.

Explicit settings come first; what they leave open is looked up where every AWS tool looks (environment,
``~/.aws/config`` and ``credentials``, SSO, container and instance roles), by botocore, which also renews keys
that expire during a run. botocore is imported only where keys are not given.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

from datasync.errors import DeniedError, UsageError
from datasync.storage.secrets import reveal
from datasync.storage.sigv4 import Keys

DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """What the configuration says about one S3 account; as in `datasync.config.Cluster`."""

    endpoint: str | None = None
    profile: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    addressing: str | None = None
    ca_bundle: str | None = None
    anonymous: bool = False

    def __post_init__(self) -> None:
        if (self.access_key is None) != (self.secret_key is None):
            raise UsageError("access_key and secret_key belong together", mend="give both, or neither")
        if self.addressing not in (None, "auto", "path", "virtual"):
            raise UsageError(f"{self.addressing!r} is no addressing", mend="use path, virtual or auto")


class Account:
    """Settings with their gaps filled; one for each process."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._session: Any = None
        self._credentials: Any = None
        self.region = settings.region or self._configured("region") or DEFAULT_REGION
        self.endpoint = (settings.endpoint or self._configured_endpoint() or "").rstrip("/")
        self.is_aws = not self.endpoint or ".amazonaws.com" in self.endpoint
        self.ca_bundle = settings.ca_bundle or self._configured("ca_bundle")

    def endpoint_for(self, region: str) -> str:
        """The endpoint's URL; that of AWS depends on the region."""
        if self.endpoint:
            return self.endpoint
        suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        return f"https://s3.{region}.{suffix}"

    def keys(self, where: str) -> Keys | None:
        """The keys of this moment; None is anonymous.

        Raises:
            DeniedError: None were found.
        """
        settings = self.settings
        if settings.anonymous:
            return None
        if settings.access_key is not None and settings.secret_key is not None:
            token = settings.session_token
            return Keys(
                reveal(settings.access_key, where=f"access_key of {where}"),
                reveal(settings.secret_key, where=f"secret_key of {where}"),
                reveal(token, where=f"session_token of {where}") if token else None,
            )
        return self._keys_from_chain(where)

    def renew(self) -> None:
        """Forget keys that the server calls expired: a renewed file or role is read again."""
        with self._lock:
            self._session = self._credentials = None

    def _keys_from_chain(self, where: str) -> Keys:
        from botocore.exceptions import BotoCoreError

        with self._lock:
            try:
                if self._credentials is None:
                    self._credentials = self._botocore().get_credentials()
                frozen = self._credentials.get_frozen_credentials() if self._credentials else None
            except BotoCoreError as error:
                raise DeniedError(
                    f"no credentials for {where}: {error}",
                    mend="log in again, or check the AWS configuration",
                ) from error
        if frozen is None or not frozen.access_key:
            profile = f" in profile {self.settings.profile!r}" if self.settings.profile else ""
            raise DeniedError(
                f"no credentials for {where} were found{profile}",
                mend="name a profile, or give access_key and secret_key, or set anonymous = true",
            )
        return Keys(frozen.access_key, frozen.secret_key, frozen.token)

    def _configured(self, name: str) -> str | None:
        """A variable of the AWS configuration, without botocore where nothing can be configured."""
        variables = {"region": ("AWS_REGION", "AWS_DEFAULT_REGION"), "ca_bundle": ("AWS_CA_BUNDLE",)}[name]
        for variable in variables:
            if os.environ.get(variable):
                return os.environ[variable]
        if not self._has_files():
            return None
        found = self._scoped().get(name)
        return str(found) if found else None

    def _configured_endpoint(self) -> str | None:
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if os.environ.get(variable):
                return os.environ[variable]
        if not self._has_files():
            return None
        scoped = self._scoped()
        services = self._botocore().full_config.get("services", {}).get(scoped.get("services"), {})
        own = services.get("s3", {}).get("endpoint_url") if isinstance(services.get("s3"), dict) else None
        found = own or scoped.get("endpoint_url")
        return str(found) if found else None

    def _has_files(self) -> bool:
        """Whether there is an AWS configuration to look into."""
        if self.settings.profile:
            return True
        names = (("AWS_CONFIG_FILE", "~/.aws/config"), ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
        return any(os.path.exists(os.path.expanduser(os.environ.get(v) or path)) for v, path in names)

    def _scoped(self) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError

        try:
            return dict(self._botocore().get_scoped_config())
        except BotoCoreError as error:
            raise UsageError(f"the AWS configuration: {error}", mend="check the profile's name") from error

    def _botocore(self) -> Any:
        if self._session is None:
            import botocore.session

            self._session = botocore.session.Session(profile=self.settings.profile)
        return self._session
