"""A Hugging Face Hub in memory, over HTTP on the loopback, for tests with the real `huggingface_hub` client.

It has models alone, and LFS without xet. A route that is not there answers 501, which the client does not retry.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import time
import traceback
import types
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub import HfApi, file_download, hf_api, hf_file_system
from huggingface_hub.utils import _http
from transformers.utils import hub as transformers_hub

USER = "user"
LFS_SUFFIXES = (".bin", ".npz", ".onnx", ".png", ".pt", ".safetensors")
GIT_ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()

_FRONT_MATTER = re.compile(r"\s*---[\r\n]+(.*?)[\r\n]+---\s*(?:[\r\n]|$)", re.DOTALL)
_CARD_STRINGS = ("library_name", "license", "pipeline_tag")
_CARD_LISTS = ("metrics", "model-index", "tags")
_MODEL = r"/api/models/(?P<repo_id>[^/]+/[^/]+)"
_LFS = r"/lfs/(?P<repo_id>[^/]+/[^/]+)/(?P<oid>[0-9a-f]{64})"
_ROUTES = {
    "GET /api/whoami-v2": "_whoami",
    "POST /api/validate-yaml": "_validate_yaml",
    "POST /api/repos/create": "_create_repo",
    r"GET /api/models/(?P<repo_id>[^/]+(/[^/]+)?)": "_model_info",
    f"GET {_MODEL}/revision/(?P<revision>[^/]+)": "_model_info",
    f"GET {_MODEL}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?": "_tree",
    f"GET {_MODEL}/refs": "_refs",
    f"GET {_MODEL}/commits/(?P<revision>[^/]+)": "_log",
    f"GET {_MODEL}/auth-check(?P<write>/write)?": "_auth_check",
    f"POST {_MODEL}/branch/(?P<branch>[^/]+)": "_create_branch",
    f"POST {_MODEL}/preupload/(?P<revision>[^/]+)": "_preupload",
    f"POST {_MODEL}/commit/(?P<revision>[^/]+)": "_commit",
    r"POST /(?P<repo_id>[^/]+/[^/]+)\.git/info/lfs/objects/batch": "_lfs_batch",
    f"PUT {_LFS}": "_lfs_put",
    f"POST {_LFS}/verify": "_lfs_verify",
    "GET /(?P<repo_id>[^/]+(/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<path>.+)": "_resolve",
}


class _HubError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        self.status, self.body = status, {"error": message}
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}


class _File(NamedTuple):
    content: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """The sha256 of an LFS file, and git's hash of any other: what the client compares with its own files."""
        if self.lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    def entry(self, path: str) -> dict:
        size = len(self.content)
        lfs = {"lfs": {"oid": self.oid, "size": size, "pointerSize": 134}} if self.lfs else {}
        return {"type": "file", "path": path, "size": size, "oid": self.oid[:40], **lfs}


class _Commit(NamedTuple):
    sha: str
    parent: str | None
    message: str
    files: dict[str, _File]
    date: str


class _Repo:
    def __init__(self, repo_id: str, private: bool, gated: bool):
        self.repo_id, self.private, self.gated = repo_id, private, gated
        self.refs: dict[str, str] = {}
        self.history: dict[str, _Commit] = {}
        self.objects: dict[str, bytes] = {}

    def at(self, revision: str) -> _Commit:
        sha = self.refs.get(revision, revision)
        if sha not in self.history:
            raise _HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.history[sha]

    def add(self, ref: str, files: dict[str, _File], message: str, parent: str | None = None) -> str:
        sha = hashlib.sha1(f"{self.repo_id} {parent} {message} {len(self.history)}".encode()).hexdigest()
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self.history[sha] = _Commit(sha, parent, message, files, date)
        self.refs[ref] = sha
        return sha

    def log(self, revision: str) -> list[_Commit]:
        commits = [self.at(revision)]
        while commits[-1].parent:
            commits.append(self.history[commits[-1].parent])
        return commits


class HubServer:
    """A Hub that serves for as long as the context is open.

    Attributes:
        url: Its endpoint.
        token: A token with all rights.
        read_token: One without the right to write, nor access to gated repositories.
        requests: The method and the path, with its query, of every request so far.
    """

    token = "hf_writes"
    read_token = "hf_reads"

    def __init__(self):
        self.requests: list[tuple[str, str]] = []
        self._repos: dict[str, _Repo] = {}
        self._faults: list[dict] = []
        self._lock = threading.RLock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add_repo(self, repo_id: str, files: dict[str, bytes], private: bool = False, gated: bool = False) -> str:
        """Publish files and return the commit's sha.

        Called again it adds a commit that replaces the files; the repository stays as private or gated as it was.
        """
        with self._lock:
            repo = self._repos.setdefault(repo_id, _Repo(repo_id, private, gated))
            files = {path: _File(content, path.endswith(LFS_SUFFIXES)) for path, content in files.items()}
            return repo.add("main", files, "Add files", repo.refs.get("main"))

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Return the contents by path; a repository made by the client starts with a `.gitattributes`."""
        with self._lock:
            return {path: file.content for path, file in self._repos[repo_id].at(revision).files.items()}

    def commits(self, repo_id: str, revision: str = "main") -> list[tuple[str, str]]:
        """Return every commit's sha and message, the newest first."""
        with self._lock:
            return [(commit.sha, commit.message) for commit in self._repos[repo_id].log(revision)]

    def is_private(self, repo_id: str) -> bool:
        """Return whether a repository is private."""
        with self._lock:
            return self._repos[repo_id].private

    def repo_ids(self) -> list[str]:
        """Return the ids of all repositories, the oldest first."""
        with self._lock:
            return list(self._repos)

    def fail_next(self, pattern: str, status: int = 500, times: int = 1) -> None:
        """Answer the next requests whose "METHOD path" matches a regex with an error, and do nothing else.

        The client itself retries 408, 429, 500, 502, 503 and 504 five times, except for the commit and most GETs; with
        `times=-1` the error is for ever.
        """
        with self._lock:
            self._faults.append({"pattern": pattern, "status": status, "times": times})

    def drop_next(self, pattern: str, times: int = 1) -> None:
        """Carry out the next requests that match, and close their connection in the middle of the answer."""
        with self._lock:
            self._faults.append({"pattern": pattern, "status": None, "times": times})

    def environment(self, cache_dir: str | Path, token: str | None = None) -> dict[str, str]:
        """Return the variables with which a fresh process uses this Hub, as nobody if the token is empty."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache_dir),
            "HF_HUB_CACHE": str(Path(cache_dir) / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": self.token if token is None else token,
            "NO_PROXY": "127.0.0.1",
        }

    def use(self, monkeypatch, cache_dir: str | Path, token: str | None = None) -> None:
        """Have `huggingface_hub` and `transformers` in this process use this Hub until the patches are undone."""
        variables = self.environment(cache_dir, token)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        constants = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HOME": variables["HF_HOME"],
            "HF_HUB_CACHE": variables["HF_HUB_CACHE"],
            "HF_TOKEN_PATH": f"{cache_dir}/token",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }
        for module in [module for name, module in sys.modules.items() if name.startswith("huggingface_hub")]:
            for name in constants.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, constants[name])
        for api in (hf_api.api, hf_file_system.hffs):
            monkeypatch.setattr(api, "endpoint", self.url)
        monkeypatch.setattr(hf_file_system.hffs, "_api", HfApi())
        monkeypatch.setattr(transformers_hub, "_hf_api", None)
        monkeypatch.setattr(_http, "_GLOBAL_CLIENT", None)

    def _answer(self, request: "_Handler") -> tuple[int, dict[str, str], bytes, bool]:
        with self._lock:
            self.requests.append((request.command, request.path))
            line = f"{request.command} {request.path}"
            due = (fault for fault in self._faults if fault["times"] and re.search(fault["pattern"], line))
            fault = next(due, {"times": 0, "status": None})
            drop = bool(fault["times"]) and not fault["status"]
            fault["times"] -= fault["times"] > 0
            try:
                if fault["status"]:
                    raise _HubError(fault["status"], "A test wants this to fail")
                status, headers, body = self._route(request)
            except _HubError as error:
                status, headers, body = error.status, error.headers, error.body
            except Exception:
                status, headers, body = 500, {}, {"error": traceback.format_exc()}
            return status, headers, body if isinstance(body, bytes) else json.dumps(body).encode(), drop

    def _route(self, request: "_Handler") -> tuple[int, dict[str, str], bytes | dict | list]:
        roles = {None: None, f"Bearer {self.token}": "write", f"Bearer {self.read_token}": "read"}
        if request.headers["Authorization"] not in roles:
            raise _HubError(401, "Invalid credentials in Authorization header")
        request.role = roles[request.headers["Authorization"]]
        line = f"{request.command.replace('HEAD', 'GET')} {urlsplit(request.path).path}"
        for pattern, name in _ROUTES.items():
            if found := re.fullmatch(pattern, line):
                answer = getattr(self, name)(request, **{k: v and unquote(v) for k, v in found.groupdict().items()})
                return answer if isinstance(answer, tuple) else (200, {}, answer)
        raise _HubError(501, f"tests/hub_server.py has no {line}")

    def _require_write(self, request: "_Handler", code: str | None = None) -> None:
        if not request.role:
            raise _HubError(401, "Invalid username or password.", code)
        if request.role != "write":
            raise _HubError(403, "This token may not write")

    def _repo(self, request: "_Handler", repo_id: str, to: str = "see") -> _Repo:
        repo = self._repos.get(repo_id)
        if repo is None or (repo.private and not request.role):
            raise _HubError(404 if request.role else 401, "Repository not found", "RepoNotFound")
        if to == "write":
            # Of a real Hub the client takes any 401 for a missing repository, but by the https of its address.
            self._require_write(request, "RepoNotFound")
        if to == "read" and repo.gated and request.role != "write":
            raise _HubError(403 if request.role else 401, f"Access to {repo_id} is restricted", "GatedRepo")
        return repo

    def _whoami(self, request):
        if not request.role:
            raise _HubError(401, "Invalid username or password.")
        return {"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": request.role}}}

    def _validate_yaml(self, request):
        _, errors, warnings = _read_card(json.loads(request.body)["content"])
        body = {"errors": [{"message": text} for text in errors], "warnings": [{"message": text} for text in warnings]}
        return 400 if errors else 200, {}, body

    def _create_repo(self, request):
        self._require_write(request)
        wanted = json.loads(request.body)
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        answer = {"url": f"{self.url}/{repo_id}", "name": repo_id}
        if repo_id in self._repos:
            return 409, {}, {**answer, "error": "You already created this model repo"}
        self._repos[repo_id] = _Repo(
            repo_id, "private" in (wanted.get("visibility"), wanted.get("private") and "private"), False
        )
        self._repos[repo_id].add("main", {".gitattributes": _File(GIT_ATTRIBUTES, lfs=False)}, "initial commit")
        return answer

    def _model_info(self, request, repo_id, revision="main"):
        repo = self._repo(request, repo_id)
        commit = repo.at(revision)
        card = _read_card(commit.files["README.md"].content.decode())[0] if "README.md" in commit.files else {}
        tags = [card[key] for key in ("library_name", "pipeline_tag") if key in card] + list(card.get("tags", []))
        return {
            "id": repo_id,
            "author": repo_id.split("/")[0],
            "sha": commit.sha,
            "lastModified": commit.date,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "tags": list(dict.fromkeys(tags)),
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
            "cardData": card or None,
            **{key: card[key] for key in ("library_name", "pipeline_tag") if key in card},
        }

    def _tree(self, request, repo_id, revision, folder):
        files = self._repo(request, repo_id).at(revision).files
        entries = {path: file.entry(path) for path, file in files.items()}
        for path in [parent.as_posix() for file in files for parent in PurePosixPath(file).parents]:
            entries[path] = {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
        if (folder or ".") not in entries:
            raise _HubError(404, f"{folder} does not exist", "EntryNotFound")
        inside = [path for path in sorted(entries) if path != "." and path.startswith(f"{folder}/" if folder else "")]
        if request.query.get("recursive") != ["true"]:
            inside = [path for path in inside if PurePosixPath(path).parent == PurePosixPath(folder or ".")]
        return [entries[path] for path in inside]

    def _refs(self, request, repo_id):
        refs = self._repo(request, repo_id).refs
        pulls = [{"name": ref, "ref": ref, "targetCommit": sha} for ref, sha in refs.items() if "refs/pr/" in ref]
        heads = [(ref, sha) for ref, sha in refs.items() if "refs/pr/" not in ref]
        branches = [{"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": sha} for ref, sha in heads]
        return {"branches": branches, "converts": [], "tags": [], "pullRequests": pulls}

    def _log(self, request, repo_id, revision):
        commits = self._repo(request, repo_id).log(revision)
        common = {"message": "", "authors": [{"user": USER}]}
        return [{"id": commit.sha, "title": commit.message, "date": commit.date, **common} for commit in commits]

    def _auth_check(self, request, repo_id, write):
        self._repo(request, repo_id, to="write" if write else "read")
        return {}

    def _create_branch(self, request, repo_id, branch):
        repo = self._repo(request, repo_id, to="write")
        if branch in repo.refs:
            raise _HubError(409, f"Reference already exists: {branch}")
        repo.refs[branch] = repo.at(json.loads(request.body).get("startingPoint", "main")).sha
        return {}

    def _preupload(self, request, repo_id, revision):
        present = self._repo(request, repo_id, to="write").at(revision).files
        files = []
        for path in [file["path"] for file in json.loads(request.body)["files"]]:
            mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
            oid = {"oid": present[path].oid} if path in present else {}
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **oid})
        return {"files": files}

    def _lfs_batch(self, request, repo_id):
        repo = self._repo(request, repo_id, to="write")
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in json.loads(request.body)["objects"]]
        for item in objects:
            if item["oid"] not in repo.objects:
                url = f"{self.url}/lfs/{repo_id}/{item['oid']}"
                item["actions"] = {"upload": {"href": url}, "verify": {"href": f"{url}/verify"}}
        return {"transfer": "basic", "objects": objects}

    def _lfs_put(self, request, repo_id, oid):
        # Without a token, as it goes to a presigned address.
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise _HubError(400, "The content does not have this sha256")
        self._repos[repo_id].objects[oid] = request.body
        return {}

    def _lfs_verify(self, request, repo_id, oid):
        if len(self._repo(request, repo_id, to="write").objects.get(oid, b"")) != json.loads(request.body)["size"]:
            raise _HubError(404, "The object has not been uploaded")
        return {}

    def _commit(self, request, repo_id, revision):
        repo = self._repo(request, repo_id, to="write")
        header, *operations = [json.loads(line) for line in request.body.splitlines()]
        wanted, pull = header["value"].get("parentCommit"), request.query.get("create_pr") == ["1"]
        parent = repo.at(wanted if wanted and pull else revision)
        if not pull and revision not in repo.refs:
            raise _HubError(404, f"{revision} is no branch", "RevisionNotFound")
        if wanted and not parent.sha.startswith(wanted):
            raise _HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(parent.files)
        for operation in operations:
            _apply(operation["key"], operation["value"], files, repo.objects)
        number = sum("refs/pr/" in ref for ref in repo.refs) + 1
        sha = repo.add(f"refs/pr/{number}" if pull else revision, files, header["value"]["summary"], parent.sha)
        pull_request = {"pullRequestUrl": f"{self.url}/{repo_id}/discussions/{number}"} if pull else {}
        return {"commitOid": sha, "commitUrl": f"{self.url}/{repo_id}/commit/{sha}", **pull_request}

    def _resolve(self, request, repo_id, revision, path):
        commit = self._repo(request, repo_id, to="read").at(revision)
        if path not in commit.files:
            raise _HubError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit.sha})
        body, size, etag = commit.files[path].content, len(commit.files[path].content), f'"{commit.files[path].oid}"'
        headers = {"X-Repo-Commit": commit.sha, "ETag": etag, "Content-Type": "application/octet-stream"}
        if commit.files[path].lfs:
            headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(size)}
        if not (span := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))):
            return 200, headers, body
        body = body[int(span[1]) : int(span[2]) + 1 if span[2] else size]
        return 206, {**headers, "Content-Range": f"bytes {span[1]}-{int(span[1]) + len(body) - 1}/{size}"}, body


def skip_waits(monkeypatch) -> list[float]:
    """Have the client retry at once; what it would have waited, in seconds, is added to the returned list."""
    waits: list[float] = []
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(**{**vars(time), "sleep": waits.append}))
    return waits


def _apply(key: str, value: dict, files: dict[str, _File], objects: dict[str, bytes]) -> None:
    path = value["path"]
    if key == "file":
        files[path] = _File(base64.b64decode(value["content"]), lfs=False)
    elif key == "lfsFile" and value["oid"] in objects:
        files[path] = _File(objects[value["oid"]], lfs=True)
    elif key == "lfsFile":
        raise _HubError(400, f"The LFS object of {path} has not been uploaded")
    else:
        gone = [path] if key == "deletedFile" else [file for file in files if file.startswith(path.rstrip("/") + "/")]
        if not gone or gone[0] not in files:
            raise _HubError(404, "A file with this name doesn't exist", "EntryNotFound")
        for file in gone:
            del files[file]


def _read_card(readme: str) -> tuple[dict, list[str], list[str]]:
    if not (found := _FRONT_MATTER.match(readme)):
        return {}, [], ["empty or missing yaml metadata in repo card"]
    try:
        data = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        return {}, [f"The metadata is no YAML: {error}"], []
    if not isinstance(data, dict):
        return {}, ["The metadata is no mapping"], []
    errors = [f'"{key}" must be a string' for key in _CARD_STRINGS if not isinstance(data.get(key, ""), str)]
    errors += [f'"{key}" must be an array' for key in _CARD_LISTS if not isinstance(data.get(key, []), list)]
    return data, errors, []


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    # HTTP/1.0, whose every request has its own connection: a Hub that was closed is gone for a client's pool as well.
    def _serve(self):
        self.query = parse_qs(urlsplit(self.path).query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, headers, body, drop = self.server.hub._answer(self)
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if self.command == "HEAD":
            body = b""
        elif drop:
            body = body[: len(body) // 2]
        if not drop or body:  # else the headers are the answer, and stay in their buffer
            self.end_headers()
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

    def log_message(self, *args):
        pass
