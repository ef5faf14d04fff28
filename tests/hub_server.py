"""A small Hub on loopback: speaks what huggingface_hub says on the wire, keeps commits as folders.

Faults are planted by ``server.fail(part, answer, times)`` for requests whose "METHOD path" holds
the part: an HTTP status, "drop" for a connection that breaks before anything is done, or "mute" for
one that breaks after it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_test_token"
USER = "tester"


@dataclass
class Repo:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self):
        return self.commits[-1] if self.commits else "0" * 40


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[list] = []
        self.requests: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def fail(self, part, answer, times=1):
        self.faults.append([part, answer, times])

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline().strip(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, status, content=b"", headers=None):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _dispatch(self):
        body = self._body()
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        for fault in self.server.faults:
            if fault[0] in self.server.requests[-1] and fault[2] > 0:
                fault[2] -= 1
                return self._break(fault[1], path, body)
        if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid credentials"})
        return self._answer(path, body)

    do_GET = do_POST = do_PUT = do_HEAD = _dispatch

    def _break(self, answer, path, body):
        if answer == "mute":
            self._send = lambda *_: None
            self._answer(path, body)
            del self._send
        if answer in ("drop", "mute"):
            self.close_connection = True
            self.connection.close()
            return None
        return self._send(answer, {"error": f"planted {answer}"})

    def _answer(self, path, body):
        parts = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            access = {"accessToken": {"role": "write"}}
            return self._send(200, {"type": "user", "name": USER, "orgs": [], "auth": access})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if parts[0] == "lfs":
            return self._object(parts[1], body)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if parts[:2] == ["api", "models"]:
            return self._model("/".join(parts[2:4]), parts[4:], body)
        if len(parts) >= 5 and parts[2] == "resolve":
            return self._resolve("/".join(parts[:2]), "/".join(parts[4:]))
        return self._send(404, {"error": path})

    def _create(self, request):
        repo_id = f"{request.get('organization') or USER}/{request['name']}"
        url = {"url": f"{self.server.endpoint}/{repo_id}", "name": repo_id}
        if repo_id in self.server.repos:
            return self._send(409, url | {"error": "You already created this model repo"})
        is_private = request.get("visibility") == "private" or bool(request.get("private"))
        self.server.repos[repo_id] = Repo(private=is_private)
        return self._send(200, url)

    def _batch(self, request):
        def entry(item):
            href = f"{self.server.endpoint}/lfs/{item['oid']}"
            actions = {"upload": {"href": href}, "verify": {"href": href}}
            return {"oid": item["oid"], "size": item["size"], "actions": actions}

        objects = [entry(item) for item in request["objects"]]
        return self._send(200, {"transfer": "basic", "objects": objects})

    def _object(self, oid, body):
        if self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == oid
            self.server.objects[oid] = body
        return self._send(200, {})

    def _model(self, repo_id, rest, body):
        repo = self.server.repos.get(repo_id)
        if repo is None:
            return self._send(404, {"error": "no repo"}, {"X-Error-Code": "RepoNotFound"})
        if rest[:1] == ["preupload"]:
            return self._preupload(json.loads(body))
        if rest[:1] == ["commit"]:
            return self._commit(repo_id, repo, body)
        if rest[:1] == ["tree"]:
            rows = [
                {"type": "file", "path": n, "size": len(c), "oid": "0" * 40}
                for n, c in repo.files.items()
            ]
            return self._send(200, rows)
        return self._send(200, self._info(repo_id, repo))

    def _info(self, repo_id, repo):
        return {
            "_id": "0",
            "id": repo_id,
            "modelId": repo_id,
            "sha": repo.sha,
            "private": repo.private,
            "tags": [],
            "siblings": [{"rfilename": name} for name in repo.files],
            "createdAt": "2026-01-01T00:00:00.000Z",
            "lastModified": "2026-01-01T00:00:00.000Z",
        }

    def _preupload(self, request):
        def mode(item):
            kind = "lfs" if item["path"].endswith(".safetensors") else "regular"
            return {"path": item["path"], "uploadMode": kind, "shouldIgnore": False, "oid": None}

        return self._send(200, {"files": [mode(item) for item in request["files"]]})

    def _commit(self, repo_id, repo, body):
        files = dict(repo.files)
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        repo.files = files
        repo.commits.append(hashlib.sha1(body + bytes(len(repo.commits))).hexdigest())
        url = f"{self.server.endpoint}/{repo_id}/commit/{repo.sha}"
        return self._send(200, {"success": True, "commitOid": repo.sha, "commitUrl": url})

    def _resolve(self, repo_id, name):
        repo = self.server.repos.get(repo_id)
        if repo is None:
            return self._send(404, {}, {"X-Error-Code": "RepoNotFound"})
        headers = {"X-Repo-Commit": repo.sha}
        if name not in repo.files:
            return self._send(404, {}, headers | {"X-Error-Code": "EntryNotFound"})
        content = repo.files[name]
        headers |= {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Content-Length": str(len(content)),
        }
        return self._send(200, content, headers)
