"""A stand-in for the Hugging Face Hub on the loopback: what the real client calls to push and to load a model.

Not the Hub: repositories are kept in memory, one user, one token. It speaks what huggingface_hub 2.4 speaks without
xet: create_repo, validate-yaml, preupload, LFS batch, single and multi-part upload, commit, tree, refs, branches,
model_info and resolve with byte ranges. Faults are armed by a pattern of "METHOD path" and used up in order.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopbackTokenThatIsSecret"
PART = 1 << 14  # bytes: larger LFS files are uploaded in parts


@dataclass
class Repo:
    """Commits are whole: oid -> files (path -> content); branches name one."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)  # sha256 of files stored as LFS

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)}{branch}{sorted(files)}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Fault:
    pattern: str  # of "METHOD path"
    kind: str  # a status ("401"), "cut" (half an answer), "hang", "wrong" (other bytes of the same length)
    times: int = 1
    seen: int = 0


class HubServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}  # LFS objects that have arrived, by sha256
        self.parts: dict[tuple[str, int], bytes] = {}
        self.faults: list[Fault] = []
        self.asked: list[str] = []  # "METHOD path" of each request
        self.release = threading.Event()  # ends every "hang"
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def arm(self, pattern: str, kind: str, times: int = 1) -> Fault:
        self.faults.append(Fault(pattern, kind, times))
        return self.faults[-1]

    def fault(self, line: str) -> str | None:
        with self.lock:
            self.asked.append(line)
            for fault in self.faults:
                if fault.seen < fault.times and re.search(fault.pattern, line):
                    fault.seen += 1
                    return fault.kind
        return None

    def has_seen(self, pattern: str) -> bool:
        with self.lock:
            return any(re.search(pattern, line) for line in self.asked)

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        found = self.repos[repo]
        oid = found.at(revision)
        return {} if oid is None else found.commits[oid]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(url.path)
        kind = self.server.fault(f"{self.command} {path}")
        self.cut = self.wrong = False
        if kind == "hang":
            self.server.release.wait()
            self.close_connection = True
            return
        if kind is not None and kind.isdigit():
            message = {"401": "Invalid username or password."}.get(kind, "not now")
            self._json({"error": message}, int(kind), {"X-Error-Message": message})
            return
        self.cut, self.wrong = kind == "cut", kind == "wrong"
        with self.server.lock:
            for pattern, name in ROUTES:
                if match := re.fullmatch(pattern, f"{self.command} {path}"):
                    getattr(self, name)(*match.groups())
                    return
        self._json({"error": "no such route"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = _answer

    def _repo(self, name: str) -> Repo | None:
        """The repository, or None after a 404/401 as the Hub gives it: a private one is not seen without its token."""
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and not self._authorised()):
            self._json({"error": "Repository not found"}, 401 if repo else 404, {"X-Error-Code": "RepoNotFound"})
            return None
        return repo

    def _authorised(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _at(self, name: str, revision: str) -> tuple[Repo, str] | None:
        repo = self._repo(name)
        if repo is None:
            return None
        oid = repo.at(revision)
        if oid is None:
            self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repo, oid

    def create(self) -> None:
        if not self._authorised():
            self._json({"error": "Invalid username or password."}, 401)
            return
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.server.url}/{name}", "name": name}
        if name in self.server.repos:
            self._json({**url, "error": "You already created this model repo"}, 409)
            return
        repo = self.server.repos[name] = Repo(private=asked.get("visibility") == "private")
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        self._json(url)

    def validate(self) -> None:
        self._json({"errors": [], "warnings": []})

    def info(self, name: str, revision: str = "main") -> None:
        if found := self._at(name, revision):
            repo, oid = found
            siblings = [{"rfilename": path} for path in repo.commits[oid]]
            self._json({"id": name, "modelId": name, "sha": oid, "private": repo.private, "siblings": siblings})

    def refs(self, name: str) -> None:
        if repo := self._repo(name):
            branches = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": oid} for b, oid in repo.branches.items()]
            self._json({"branches": branches, "converts": [], "tags": []})

    def branch(self, name: str, branch: str) -> None:
        if not (self._authorised() and (repo := self._repo(name))):
            return
        if branch in repo.branches:
            self._json({"error": "Reference already exists"}, 409)
            return
        repo.branches[branch] = repo.branches["main"]
        self._json({})

    def preupload(self, name: str, revision: str) -> None:
        if found := self._at(name, revision):
            repo, oid = found
            files = []
            for asked in json.loads(self.body)["files"]:
                mode = "lfs" if asked["path"].endswith(".safetensors") else "regular"
                there = repo.commits[oid].get(asked["path"])
                known = {} if there is None else {"oid": _sha256(there) if mode == "lfs" else _blob_id(there)}
                files.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, **known})
            self._json({"files": files})

    def batch(self, name: str) -> None:
        if not self._repo(name):
            return
        objects = []
        for asked in json.loads(self.body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            href = f"{self.server.url}/lfs/{oid}"
            upload: dict[str, Any] = {"href": href}
            if size > PART:
                count = -(-size // PART)
                header = {str(n + 1): f"{href}?part={n + 1}" for n in range(count)}
                upload = {"href": f"{href}/complete", "header": {"chunk_size": str(PART), **header}}
            there = (
                {}
                if oid in self.server.blobs
                else {"actions": {"upload": upload, "verify": {"href": f"{href}/verify"}}}
            )
            objects.append({"oid": oid, "size": size, **there})
        self._json({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if "part" in self.query:
            self.server.parts[oid, int(self.query["part"])] = self.body
        else:
            self.server.blobs[oid] = self.body
        self._json({}, headers={"ETag": _blob_id(self.body)})

    def complete(self, oid: str) -> None:
        parts = json.loads(self.body)["parts"]
        self.server.blobs[oid] = b"".join(self.server.parts[oid, part["partNumber"]] for part in parts)
        self._json({})

    def verify(self, oid: str) -> None:
        whole = _sha256(self.server.blobs.get(oid, b"")) == oid
        if not whole:
            self.server.blobs.pop(oid, None)
        self._json({} if whole else {"error": "sha256 mismatch"}, 200 if whole else 400)

    def commit(self, name: str, revision: str) -> None:
        found = self._at(name, revision)
        if found is None:
            return
        if not self._authorised():
            self._json({"error": "forbidden"}, 403)
            return
        repo, oid = found
        files = dict(repo.commits[oid])
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.server.blobs:
                    self._json({"error": f"LFS object {value['oid']} is missing"}, 400)
                    return
                files[value["path"]] = self.server.blobs[value["oid"]]
                repo.large.add(value["oid"])
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        made = repo.commit(revision, files)
        self._json({"commitUrl": f"{self.server.url}/{name}/commit/{made}", "commitOid": made})

    def paths(self, name: str, revision: str) -> None:
        is_json = "json" in (self.headers.get("Content-Type") or "")
        body = self.body.decode()
        self.tree(name, revision, only=json.loads(body)["paths"] if is_json else parse_qs(body)["paths"])

    def tree(self, name: str, revision: str, only: list[str] | None = None) -> None:
        if found := self._at(name, revision):
            repo, oid = found
            entries = []
            for path, content in repo.commits[oid].items():
                if only is not None and path not in only:
                    continue
                entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
                if (sha := _sha256(content)) in repo.large:
                    entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 130}
                entries.append(entry)
            self._json(entries)

    def resolve(self, name: str, revision: str, path: str) -> None:
        found = self._at(name, revision)
        if found is None:
            return
        repo, oid = found
        content = repo.commits[oid].get(path)
        if content is None:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        sha = _sha256(content)
        etag = sha if sha in repo.large else _blob_id(content)
        headers = {"X-Repo-Commit": oid, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if sha in repo.large:
            headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(content))}
        if self.wrong:
            content = bytes([content[0] ^ 1]) + content[1:]
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            status, start = 206, int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        self._send(status, content, headers)

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if self.cut else body)
        if self.cut:
            self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


_NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate"),
    (rf"(?:GET|HEAD) /api/models/{_NAME}", "info"),
    (rf"(?:GET|HEAD) /api/models/{_NAME}/revision/(.+)", "info"),
    (rf"(?:GET|HEAD) /api/models/{_NAME}/refs", "refs"),
    (rf"POST /api/models/{_NAME}/branch/(.+)", "branch"),
    (rf"POST /api/models/{_NAME}/preupload/(.+)", "preupload"),
    (rf"POST /api/models/{_NAME}/commit/(.+)", "commit"),
    (rf"(?:GET|HEAD) /api/models/{_NAME}/tree/([^/]+)/?", "tree"),
    (rf"POST /api/models/{_NAME}/paths-info/([^/]+)", "paths"),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs/(\w+)", "put"),
    (r"POST /lfs/(\w+)/complete", "complete"),
    (r"POST /lfs/(\w+)/verify", "verify"),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/([^/]+)/(.+)", "resolve"),
]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@contextmanager
def serving(server: HubServer) -> Iterator[HubServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
