"""What an S3 call can raise, as plain OSErrors that name the store, the reason and the fix, and never a secret."""

from __future__ import annotations

import errno
import http.client
import re

_CREDENTIAL_CODES = frozenset(
    {"AccessDenied", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "NotSignedUp"}
) | frozenset({"SignatureDoesNotMatch", "TokenRefreshRequired", "403", "Forbidden", "401"})
_DAMAGE_CODES = frozenset({"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"})
_MISSING_CODES = frozenset({"NoSuchKey", "NoSuchVersion", "404", "NotFound"})
_CREDENTIAL_ERRORS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
) | frozenset({"TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "MetadataRetrievalError"})
_CREDENTIALS_FIX = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, or an instance role) for this endpoint, "
    "and allow reading, writing, listing and deleting in the bucket"
)
_ENDPOINT_FIX = "check AWS_ENDPOINT_URL_S3 / AWS_ENDPOINT_URL, the network and that the S3 server runs"
_USER_INFO = re.compile(r"//[^/@\s]+@")


def transport_errors() -> tuple[type[BaseException], ...]:
    """Everything that s3fs lets through for a failed request."""
    from aiohttp import ClientError as HTTPError
    from botocore.exceptions import BotoCoreError

    return (OSError, BotoCoreError, HTTPError, http.client.HTTPException)


def was_damaged(error: BaseException) -> bool:
    """Whether bytes were changed or cut on the way, so that the same call can succeed. No client tries these again."""
    from aiohttp import ClientPayloadError
    from botocore.exceptions import FlexibleChecksumError

    return isinstance(error, (FlexibleChecksumError, ClientPayloadError)) or error_code(error) in _DAMAGE_CODES


def error_code(error: BaseException | None) -> str:
    """The S3 error code in the error or its causes, or an empty string."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def explain(error: BaseException, url: str, key: str) -> OSError:
    """A built-in OSError (FileNotFoundError, PermissionError, ConnectionError, ...) with a message for people."""
    code, name = error_code(error), type(error).__name__
    if name == "FlexibleChecksumError":
        return OSError(errno.EBADMSG, f"{url}: {key!r} does not match the server's own checksum, also when read again")
    where = f"{url}: {key!r}" if key else url
    if code == "NoSuchBucket" or (code in _MISSING_CODES and not key):
        message = f"{url}: the bucket does not exist: create it, or correct the url or the endpoint"
        # For an object this must not read as "nobody wrote it yet".
        return OSError(message) if key else FileNotFoundError(message)
    if code in _MISSING_CODES:
        return FileNotFoundError(f"no object {key!r} in {url}")
    if code in _CREDENTIAL_CODES or name in _CREDENTIAL_ERRORS:
        return PermissionError(f"{where}: the credentials are refused ({code or name}): {_CREDENTIALS_FIX}")
    text = _USER_INFO.sub("//", str(error)) or name
    if isinstance(error, FileExistsError):
        return FileExistsError(f"{where}: exists already")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{where}: {text}")
    if _is_connection(error):
        return ConnectionError(f"{where}: the endpoint does not answer ({name}: {text}): {_ENDPOINT_FIX}")
    return OSError(f"{where}: {code or name}: {text}")


def _is_connection(error: BaseException) -> bool:
    from aiohttp import ClientConnectionError
    from botocore.exceptions import ConnectionError as BotoConnectionError
    from botocore.exceptions import HTTPClientError

    kinds = (ConnectionError, TimeoutError, BotoConnectionError, HTTPClientError, ClientConnectionError)
    return isinstance(error, kinds)
