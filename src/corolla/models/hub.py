"""A hub of models, asked through its own client: which files a repository has, and byte ranges of them.

`huggingface_hub` does what it can do: endpoints (`HF_ENDPOINT`), the saved login and `HF_TOKEN`, metadata, redirects,
proxies, names of errors. Its own downloads are of whole files, and they wait as long as a `Retry-After` says; here are
ranges, and every wait has a bound. Its errors are translated here; nothing else touches it.
"""

import functools
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from corolla import __version__
from corolla.errors import BadInput, SwarmError
from corolla.models.ranges import Range

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_PARTIAL: Final = 206
_WORD: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REPOSITORY: Final = re.compile(f"{_WORD}/{_WORD}")
_FILE: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")

Pause = Callable[[float, str], None]
"""Waits some seconds, for a reason that can be shown; raises when nobody wants the bytes any more."""


@dataclass(frozen=True, slots=True)
class HubConfig:
    """How a hub is asked."""

    endpoint: str | None = None
    """None: what its client says, HF_ENDPOINT or the public one."""
    connections: int = 8
    """Ranges downloaded at once. One connection of a CDN gives a part of a fast line only."""
    piece_bytes: int = 32 << 20
    """One request's range: small beside a shard, large beside the redirect that each request takes."""
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    """Without a single byte for this long, the connection counts as broken."""
    attempts: int = 6
    """Failures in a row, without a byte between them, before giving up."""
    first_pause_s: float = 0.5
    """Before the second attempt; doubled before each later one."""
    max_pause_s: float = 120.0
    """The longest wait that a hub may ask for (`Retry-After`)."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name != "endpoint" and value <= 0:
                raise BadInput(f"{name} must be positive, not {value}")


class RemoteFile(msgspec.Struct, frozen=True):
    """A file as the hub lists it. Large ones have a sha256, the others git's own hash."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str | None = None
    git_sha1: str | None = None


class Repository(msgspec.Struct, frozen=True):
    """The files of one commit; only those whose names are plain and stand at the top."""

    name: str
    commit: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]
    files: dict[str, RemoteFile]


def is_repository_name(name: str) -> bool:
    """Whether it reads like `OWNER/NAME`."""
    return _REPOSITORY.fullmatch(name) is not None and ".." not in name and "--" not in name


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


class Unreachable(SwarmError):
    """The hub cannot be asked now; what it said before may still hold."""


class Hub:
    """One hub, with one login. `token` None: the saved login or HF_TOKEN, as its client finds them."""

    def __init__(self, config: HubConfig | None = None, token: str | None = None) -> None:
        self.config = config or HubConfig()
        self._token = token

    @functools.cached_property
    def endpoint(self) -> str:
        from huggingface_hub import constants

        return (self.config.endpoint or constants.ENDPOINT).rstrip("/")

    def look_up(self, name: str, revision: str, pause: Pause, *, attempts: int | None = None) -> Repository:
        """The repository's files at a branch, tag or commit.

        Raises BadInput when there is no such thing for us, Unreachable when the hub does not answer.
        """
        patience = _Patience(self, name, pause, attempts or self.config.attempts, revision)
        while True:
            try:
                return self._ask(name, revision)
            except OSError as fault:  # all of the client's errors are
                patience.wait_after(fault)
            except (ValueError, KeyError, TypeError) as fault:
                raise SwarmError(f"{self.endpoint}: its answer about {name} makes no sense") from fault

    def stream(self, repository: Repository, file: str, part: Range, pause: Pause) -> Iterator[bytes]:
        """The bytes `part` of a file, exactly; goes on where a connection broke off.

        Raises BadInput when the hub does not have what it listed or we may not see it, SwarmError when it fails.
        """
        patience = _Patience(self, repository.name, pause, self.config.attempts)
        at, end = part
        while at < end:
            try:
                for chunk in self._request(repository, file, (at, end)):
                    at += len(chunk)
                    patience.reset()
                    yield chunk
                if at < end:
                    raise ConnectionError(f"the answer about {file} ended {end - at} bytes early")
            except OSError as fault:
                patience.wait_after(fault)

    def _ask(self, name: str, revision: str) -> Repository:
        from huggingface_hub import HfApi

        api = HfApi(self.endpoint, self._token, library_name="corolla", library_version=__version__)
        with _as_os_errors():
            found = api.model_info(name, revision=revision, files_metadata=True, timeout=self.config.read_timeout_s)
        files = {file.rfilename: _described(file) for file in found.siblings or () if _FILE.fullmatch(file.rfilename)}
        return msgspec.convert({"name": name, "commit": found.sha, "files": files}, Repository)

    def _request(self, repository: Repository, file: str, part: Range) -> Iterator[bytes]:
        """One request's bytes: a part of what was asked for when the connection breaks, and never more than that."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(repository.name, file, revision=repository.commit, endpoint=self.endpoint)
        headers = build_hf_headers(token=self._token, library_name="corolla", library_version=__version__)
        headers |= {"Range": f"bytes={part[0]}-{part[1] - 1}", "Accept-Encoding": "identity"}
        patience_s = self.config.read_timeout_s
        timeouts = (self.config.connect_timeout_s, patience_s, patience_s, patience_s)
        room = part[1] - part[0]
        with (
            _as_os_errors(),
            get_session().stream("GET", url, headers=headers, timeout=timeouts, follow_redirects=True) as response,
        ):
            hf_raise_for_status(response)
            self._check_part(response.status_code, response.headers, repository, file, part)
            for chunk in response.iter_bytes():  # as they come: a given size would hold back what a break then loses
                room -= len(chunk)
                if room < 0:
                    raise BadInput(f"{self._say(repository.name)}: sends more bytes of {file} than were asked for")
                yield chunk

    def _check_part(
        self, status: int, headers: Mapping[str, str], repository: Repository, file: str, part: Range
    ) -> None:
        """Refuse an answer about other bytes than those asked for."""
        page, size = self._say(repository.name), repository.files[file].size
        if status == _PARTIAL:
            said, expected = headers.get("Content-Range", ""), f"bytes {part[0]}-{part[1] - 1}/{size}"
            if said != expected:
                raise BadInput(f"{page}: asked for {expected!r} of {file}, it answered {said!r}")
        elif part != (0, size):
            raise BadInput(f"{page}: does not serve parts of {file}, so a span cannot be loaded")
        length = headers.get("Content-Length")
        if length != str(part[1] - part[0]) and length is not None and "Content-Encoding" not in headers:
            raise BadInput(f"{page}: asked for {part[1] - part[0]} bytes of {file}, it would send {length}")

    def _say(self, name: str) -> str:
        """The repository's page."""
        return f"{self.endpoint}/{name}"


def _described(entry: "RepoSibling") -> dict[str, object]:
    if entry.lfs is not None:
        return {"size": entry.lfs.size, "sha256": entry.lfs.sha256}
    return {"size": entry.size, "git_sha1": entry.blob_id}


class _Patience:
    """Counts failures in a row; waits after each, or says that it was the last."""

    def __init__(self, hub: Hub, name: str, pause: Pause, attempts: int, revision: str = "") -> None:
        self._hub = hub
        self._name = name
        self._revision = revision
        self._pause = pause
        self._attempts = attempts
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def wait_after(self, fault: OSError) -> None:
        """Wait, if trying again makes sense. Raises BadInput or SwarmError, in the user's words, otherwise."""
        self._failures += 1
        status = _status_of(fault)
        if isinstance(fault, _offline_error()):
            raise Unreachable(f"{self._hub.endpoint} is not asked: HF_HUB_OFFLINE is set") from fault
        if status is not None and status not in _TRANSIENT:
            raise _refusal(self._hub, self._name, self._revision, fault, status) from fault
        what = "does not answer" if status is None else f"answers {status}"
        if self._failures >= self._attempts:
            why = f" ({_first_line(fault)})" if status is None else ""
            raise Unreachable(f"{self._hub.endpoint} {what}{why}; tried {self._failures} times") from fault
        self._pause(self._seconds(fault), f"{self._hub.endpoint} {what}")

    def _seconds(self, fault: OSError) -> float:
        """What the hub asks for, else twice as long each time."""
        asked = _asked_pause_s(fault)
        if asked is None:
            return self._hub.config.first_pause_s * 2 ** (self._failures - 1)
        if asked > self._hub.config.max_pause_s:
            raise Unreachable(
                f"{self._hub.endpoint} asks to wait {asked:.0f} s; corolla waits {self._hub.config.max_pause_s:.0f} s "
                "at most"
            ) from fault
        return asked


@contextmanager
def _as_os_errors() -> Generator[None]:
    """The HTTP library's errors as the OSErrors that they are; which library it is depends on the client's version."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # pyright: ignore[reportPrivateImportUsage]

    try:
        yield
    except HfHubHTTPError:
        raise
    except HTTPError as fault:
        raise ConnectionError(_first_line(fault) or type(fault).__name__) from fault


def _offline_error() -> type[Exception]:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return OfflineModeIsEnabled


def _status_of(fault: Exception) -> int | None:
    """The HTTP status of an answer; None: there was no answer."""
    from huggingface_hub.errors import HfHubHTTPError

    return fault.response.status_code if isinstance(fault, HfHubHTTPError) else None


def _asked_pause_s(fault: Exception) -> float | None:
    """How long the hub's answer asks to wait, in either of the headers that say so."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import parse_ratelimit_headers

    if not isinstance(fault, HfHubHTTPError):
        return None
    retry_after = fault.response.headers.get("Retry-After", "").strip()
    if retry_after.isdecimal():
        return float(retry_after)
    limit = parse_ratelimit_headers(fault.response.headers)
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None


def _refusal(hub: Hub, name: str, revision: str, fault: Exception, status: int) -> SwarmError:
    """Why there is no point in asking again, as one sentence that names the repository's page."""
    from huggingface_hub import errors

    page = f"{hub.endpoint}/{name}"
    login = "log in with `hf auth login` or pass a token"
    if isinstance(fault, errors.GatedRepoError):
        return BadInput(f"{name} is gated: ask for access at {page}, then {login} (--token, HF_TOKEN)")
    if isinstance(fault, errors.RevisionNotFoundError):
        return BadInput(f"{page}: has no revision {revision[:80]!r}")
    if isinstance(fault, errors.RepositoryNotFoundError):
        return BadInput(f"{page}: no such repository, or a private one: then {login} (--token, HF_TOKEN)")
    if status in (401, 403):
        return BadInput(f"{page}: the hub refuses access ({status}); {login} that may read it (--token, HF_TOKEN)")
    if status in (404, 410, 416):
        return BadInput(f"{page}: lacks a file, or a part of one, that its own list has ({status})")
    return SwarmError(f"{page}: the hub answers {status}")


def _first_line(fault: Exception) -> str:
    return next(iter(str(fault).strip().splitlines()), "")
